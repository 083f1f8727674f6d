"""Several ranks generate the plain model's output, with the same bits in any batch."""

import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.engine.engine import Engine
from tests import zoo
from tests.ranks.folders import folder_of

ARCHITECTURES = {
    "llama": 2,
    "qwen3": 2,  # norms of heads
    "gemma2": 2,  # windows, caps, a scaled embedding with the head's weights
    "phi3": 2,  # projections that are put together again
    "gpt_neox": 4,  # biases of what is summed; four ranks
    "olmo2": 2,  # norms over all heads
    "mixtral": 2,  # experts
    "deepseek_v3": 2,  # heads that all ranks compute
}
"""And the number of their ranks."""
PROMPTS = [[7, 3, 200, 41, 5, 77, 9, 130, 2, 18, 64, 6, 99], [3, 1, 4, 1, 5, 9, 2, 6] * 4, [250, 8]]
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = folder_of(request.param, tmp_path_factory)
    options = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    config = EngineConfig(tensor_parallel_size=ARCHITECTURES[request.param], **options)  # type: ignore[arg-type]
    return Engine(folder, config)


def run(engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[tuple[int, float]]]:
    """The tokens of each request, each with its log-probability."""
    got: dict[str, list[tuple[int, float]]] = {name: [] for name in requests}
    for name, (prompt, params) in requests.items():
        engine.submit(engine.inputs.accept(name, prompt, params))
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            got[output.request_id] += [
                (token_id, score.logprob) for token_id, score in zip(output.new_token_ids, output.scores, strict=True)
            ]
    return got


@pytest.mark.thorough("qwen3", "mixtral")
def test_ranks_give_what_the_plain_model_gives(engine: Engine, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["engine"]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    got = run(engine, {str(number): (prompt, params) for number, prompt in enumerate(PROMPTS)})
    model = zoo.build(name)
    for number, prompt in enumerate(PROMPTS):
        token_ids = [token_id for token_id, _ in got[str(number)]]
        assert token_ids == zoo.plain_greedy(model, prompt, NUM_TOKENS)
        logits = zoo.plain_logits(model, prompt + token_ids)[len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        for place, (token_id, logprob) in enumerate(got[str(number)]):
            assert logprob == pytest.approx(float(expected[place, token_id]), abs=2e-4)
    info = engine.model_info
    assert info.num_ranks == ARCHITECTURES[name]
    assert info.is_batch_invariant
    assert info.is_recorded


def test_ranks_give_the_same_bits_in_any_company(engine: Engine) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=1.3, top_p=0.9, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.7, seed=6, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
    ]
    requests = {str(number): each for number, each in enumerate(zip(PROMPTS, params, strict=True))}
    together = run(engine, requests)
    for name, each in requests.items():
        assert run(engine, {name: each})[name] == together[name]

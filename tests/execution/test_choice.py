"""Which executor a model gets, and that it gives the plain model's tokens in any batch."""

import copy
import random
from array import array
from itertools import count
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inflight import LLM, ModelError, SamplingParams
from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.attention.cpu_backend import CpuAttention
from inflight.execution.preparation import own_attention, packed_proof
from inflight.execution.preparation.agreement import relative_error
from inflight.execution.preparation.own_attention import make_executor
from inflight.execution.preparation.proof import PlainModel, prove
from inflight.execution.preparation.proof_result import RunMode
from inflight.execution.ragged_batch import RaggedBatch
from inflight.profiling.decode_profile import profile_decode
from tests import others, zoo
from tests.gguf.files import tiny

PROMPTS = random.Random(0)
LENGTHS = (1, 60, 7, 33, 2, 50, 19, 41)


def prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(1, zoo.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def generate(llm: LLM, **params: Any) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=16, **params)
    outputs = llm.generate(prompts(), greedy, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", others.ALL)
def test_the_engine_gives_the_tokens_of_the_plain_model(name: str) -> None:
    model = others.build(name)
    llm = LLM(model, **others.options(speculation="off"))  # which would end some before they are in the way of others
    kinds = ((others.STATES | others.POSITIONS, "packed"), (others.SEQUENTIAL, "sequential"), (others.ROWS, "rows"))
    assert llm.model_info.executor == next(executor for names, executor in kinds if name in names)
    assert llm.model_info.can_share_prefixes == (name not in others.SEQUENTIAL)
    assert llm.model_info.logits_error < 2e-5
    if name in others.STATES:
        assert llm.model_info.is_recorded
        assert llm.model_info.is_batch_invariant
        assert llm.model_info.num_states * llm.model_info.state_bytes > 0
    elif name not in others.POSITIONS:
        assert llm.model_info.attention_error is None
        assert any(note.startswith("not packed:") for note in llm.model_info.notes)
    outputs = generate(llm)
    wrong = {
        i: wrong
        for i, (p, o) in enumerate(zip(prompts(), outputs, strict=True))
        if (wrong := others.wrong_tokens(model, p, o))
    }
    assert not wrong
    assert len({token for output in outputs for token in output}) > 10
    scheduler = llm.engine.scheduler
    assert scheduler.count.preemptions > 0
    left = [] if scheduler._resumption is None else scheduler._resumption._ended.values()
    scheduler.block_pool.check([each.block_tables for each in left])
    assert generate(llm) == outputs, "what slots and blocks have kept changes nothing"


@pytest.mark.parametrize("executor", ["packed", "rows", "sequential"])
def test_an_executor_can_be_requested(executor: str) -> None:
    model = zoo.build("gpt2")
    llm = LLM(model, executor=executor, **others.options())
    assert llm.model_info.executor == executor
    outputs = generate(llm)
    assert not any(others.wrong_tokens(model, p, o) for p, o in zip(prompts(), outputs, strict=True))
    with pytest.raises(ModelError, match="BloomForCausalLM"):
        LLM(others.build("bloom"), executor="packed", **others.options())


def test_a_model_that_depends_on_its_batch_runs_sequentially() -> None:
    """Phi-3 with LongRoPE, with prompts on both sides of the length at which its frequencies change."""
    model = zoo.build("phi3_longrope")
    with pytest.raises(ModelError, match="LongRoPE"):
        LLM(model, executor="rows", **others.options())
    llm = LLM(model, executor="sequential", **others.options(num_blocks=200))
    asked = [prompts()[1] + prompts()[3], prompts()[3], prompts()[2]]
    params = SamplingParams(temperature=0, max_tokens=12)
    for prompt, output in zip(asked, llm.generate(asked, params, use_tqdm=False), strict=True):
        assert not others.wrong_tokens(model, prompt, output.outputs[0].token_ids)


def test_rows_and_states_share_prefixes() -> None:
    chance = random.Random(1)
    common = [chance.randrange(1, zoo.VOCAB_SIZE) for _ in range(40)]
    asked = [[*common, number] for number in range(1, 6)]
    for name in ("bloom", "qwen3_next", "mamba2"):
        model = others.build(name)
        llm = LLM(model, **others.options(num_blocks=200))
        params = SamplingParams(temperature=0, max_tokens=8, n=2)
        for outputs in (llm.generate(asked, params, use_tqdm=False) for _ in range(2)):
            for prompt, output in zip(asked, outputs, strict=True):
                for completion in output.outputs:
                    assert not others.wrong_tokens(model, prompt, completion.token_ids)
        assert llm.engine.stats().num_cached_tokens > 0


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_states_are_as_many_as_fit_the_memory(name: str) -> None:
    model = others.build(name)
    size = LLM(model, **others.options()).model_info.state_bytes
    llm = LLM(model, **others.options(num_blocks=None, kv_cache_memory=13 * size, max_model_len=128))
    assert any(note.startswith("at most 3 sequences run at once") for note in llm.model_info.notes)
    assert llm.model_info.num_states * size <= 13 * size
    for prompt, output in zip(prompts(), generate(llm), strict=True):
        assert not others.wrong_tokens(model, prompt, output)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba", "rwkv", "bloom"])
def test_a_discarded_step_is_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = others.build(name)
    llm = LLM(model, **others.options(num_blocks=200, speculation="off"))
    expected = generate(llm)
    engine, run, steps = llm.engine, llm.engine.runner.run, count()

    def interrupted(*args: Any) -> Any:
        given = run(*args)
        if next(steps) in (1, 4, 5, 12, 20, 28, 36):
            raise KeyboardInterrupt
        return given

    monkeypatch.setattr(engine.runner, "run", interrupted)
    outputs: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts()):
        engine.submit(engine.inputs.accept(str(number), prompt, SamplingParams(temperature=0, max_tokens=16)))
        outputs[str(number)] = []
    num_interrupts = 0
    while engine.has_unfinished_requests:
        try:
            for output in engine.step():
                outputs[output.request_id] += output.new_token_ids
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts > 4
    assert list(outputs.values()) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_two_forward_paths_differ_runs_like_generate(dtype: str) -> None:
    model = others.build("clamped")
    llm = LLM(model, dtype=dtype, executor="rows", **others.options(num_blocks=500))
    assert any(note.startswith("not as in one forward pass") for note in llm.model_info.notes)
    outputs = generate(llm)
    if dtype == "float32":
        assert outputs == [zoo.plain_greedy(model, prompt, 16) for prompt in prompts()]
        assert any(others.wrong_tokens(model, p, o) for p, o in zip(prompts(), outputs, strict=True))


@pytest.mark.parametrize("kind", ["rows", "sequential"])
@pytest.mark.parametrize("name", ["qwen3_next", "bloom"])
def test_prompts_can_run_in_one_piece(kind: str, name: str) -> None:
    model = others.build(name)
    executor = make_executor(RunMode(kind, in_one_piece=True), model, block_size=4, num_slots=2)
    assert prove(executor, PlainModel.run(model).with_effect(), 2e-5) < 2e-5


@pytest.mark.parametrize("kind", ["rows", "sequential"])
@pytest.mark.parametrize("name", ["qwen3_next", "bloom"])
def test_a_slot_that_is_released_forgets_its_sequence(kind: str, name: str) -> None:
    """Two sequences run one after the other in one slot to the same length; the second is held back until then."""
    model = others.build(name)
    executor = make_executor(RunMode(kind, in_one_piece=True), model, block_size=4, num_slots=1)
    assert not executor.capabilities.shares_prefixes
    assert not executor.capabilities.chunks_prompts
    executor.allocate(8)
    first, second = prompts()[1][:9], prompts()[3][:10]

    def run(sequence_id: int, start: int, token_ids: list[int], num_logit_rows: int) -> torch.Tensor:
        span = Span(sequence_id, 0, start, token_ids, num_logit_rows, start + len(token_ids))
        plan = StepPlan((span,), ((array("i", range(4)),),))
        return executor.forward(RaggedBatch.from_plan(plan, 4, torch.device("cpu")))

    run(0, 0, first, 1)
    executor.release([0])
    assert not len(run(1, 0, second[:9], 0))
    assert relative_error(run(1, 9, second[9:], 1), others.plain_logits(model, second)[-1:]) < 2e-5


def test_a_model_that_cannot_be_proved_is_refused() -> None:
    model = others.build("bloom")
    mute = others.build("bloom", seed=1)
    with torch.no_grad():
        for name, weight in mute.named_parameters():
            if "self_attention.dense" in name:
                weight.zero_()
    with pytest.raises(ModelError, match="nothing can be proved"):
        LLM(mute, **others.options())
    assert (PlainModel.run(model).with_effect().effect or 0) > 1e-2


def test_the_rows_executor_scores_prompts() -> None:
    model = others.build("qwen3_next")
    llm = LLM(model, **others.options(num_blocks=200))
    (output,) = llm.generate([prompts()[1]], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    expected = others.plain_logits(model, prompts()[1]).log_softmax(-1)
    for position, told in enumerate(output.prompt_logprobs or []):
        if told is not None:
            token = prompts()[1][position]
            assert told[token].logprob == pytest.approx(float(expected[position - 1, token]), abs=1e-3)


def test_only_packed_models_can_be_inspected() -> None:
    llm = LLM(others.build("bloom"), **others.options())
    with pytest.raises(
        ModelError, match="a look into attention and cache is not supported with a model that does not run packed"
    ):
        llm.engine.runner.compare_attention()
    with pytest.raises(ModelError, match="does not run packed"):
        profile_decode(llm.engine, 1, 8, 1, SamplingParams())


def test_an_error_while_the_weights_are_prepacked_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model = others.build("bloom")
    prepack = own_attention.prepack_weights

    def fail_for_the_model(model: PreTrainedModel, *args: Any) -> None:
        prepack(model, *args)
        if args:  # not the proxy
            raise ValueError("no")

    monkeypatch.setattr(own_attention, "prepack_weights", fail_for_the_model)
    with pytest.raises(RuntimeError, match="the weights of BloomForCausalLM could not be prepacked"):
        LLM(model, **others.options())


def test_a_model_that_cannot_be_prepacked_runs_as_rows_unless_it_has_to_run_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoil(model: PreTrainedModel, *args: Any) -> None:
        model.lm_head = copy.deepcopy(model.lm_head)
        model.lm_head.weight.mul_(2)

    monkeypatch.setattr(packed_proof, "prepack_experts", spoil)
    llm = LLM(zoo.build("llama"), **others.options())
    assert llm.model_info.executor == "rows"
    assert "could not be prepacked: LlamaForCausalLM does not give the plain model's results" in llm.model_info.notes[0]
    assert not any(others.wrong_tokens(zoo.build("llama"), p, o) for p, o in zip(prompts(), generate(llm), strict=True))
    with pytest.raises(RuntimeError, match="the weights of LlamaForCausalLM could not be prepacked"):
        LLM(zoo.build("llama"), executor="packed")


def test_weights_are_not_prepacked_if_that_fails_on_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    model = others.build("bloom")

    def spoil(model: PreTrainedModel, *args: Any) -> None:
        model.get_input_embeddings().weight[:, 0] += 1

    monkeypatch.setattr(own_attention, "prepack_weights", spoil)
    llm = LLM(model, **others.options())
    assert any(note.startswith("its weights are not prepacked: ModelError") for note in llm.model_info.notes)
    assert not any(others.wrong_tokens(model, p, o) for p, o in zip(prompts(), generate(llm), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deep_model_that_amplifies_rounding_is_not_refused(dtype: str) -> None:
    model = others.build("deep")
    llm = LLM(model, dtype=dtype, **others.options(num_blocks=200))
    assert llm.model_info.executor == "packed"
    assert not any("too much to tell" in note for note in llm.model_info.notes), "each mixer is compared by itself"
    if dtype == "float32":
        outputs = generate(llm)
        num_tokens = sum(map(len, outputs))
        num_wrong = sum(len(others.wrong_tokens(model, p, o)) for p, o in zip(prompts(), outputs, strict=True))
        assert num_wrong <= 0.05 * num_tokens


def sharp_and_deep() -> PreTrainedModel:
    """Layers whose softmax takes almost everything from one key, so that rounding of scores changes much."""
    model = tiny("llama", num_hidden_layers=12)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(16)
    return model


def test_a_sharp_and_deep_model_runs_packed() -> None:
    info = LLM(sharp_and_deep(), num_blocks=60, executor="packed").model_info
    assert info.logits_error < 2e-5


@pytest.mark.parametrize("wrong", [1.01, 1.1])
def test_a_slightly_wrong_attention_is_refused_in_a_sharp_and_deep_model(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = CpuAttention.attend
    monkeypatch.setattr(CpuAttention, "attend", lambda self, *args: attend(self, *args) * wrong)
    with pytest.raises(ModelError, match="does not give the plain model's results"):
        LLM(sharp_and_deep(), num_blocks=60, executor="packed")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("roberta", {"is_decoder": True, "max_position_embeddings": 258}),  # `generate` counts positions from 0
        ("mistral", {"sliding_window": 1}),  # its cache keeps nothing, and `generate` sees other keys
    ],
)
def test_where_generate_differs_from_one_forward_pass_the_notes_say_so(model_type: str, config: Any) -> None:
    model = tiny_model(model_type, **config)
    llm = LLM(model, **others.options())
    assert any(note.startswith("model.generate gives other logits") for note in llm.model_info.notes)
    for prompt, output in zip(prompts(), generate(llm), strict=True):
        assert not others.wrong_tokens(model, prompt, output)


@pytest.mark.parametrize("name", ["llama", "phi3_longrope"])
def test_where_generate_is_the_same_nothing_is_said(name: str) -> None:
    assert not any("model.generate" in note for note in LLM(zoo.build(name)).model_info.notes)


def test_longrope_outside_phi3_is_said_to_be_the_forward_pass() -> None:
    """`generate` keeps keys computed with the short frequencies; the engine recomputes them."""
    rope = zoo.build("phi3_longrope").config.rope_parameters
    model = tiny_model("llama", rope_parameters=rope)
    llm = LLM(model, **others.options())
    assert any("recomputed, as in one forward pass (LongRoPE)" in note for note in llm.model_info.notes)
    outgrown = 0
    for prompt, output in zip(prompts(), generate(llm), strict=True):
        outgrown += len(prompt) < rope["original_max_position_embeddings"] < len(prompt) + len(output)
        for number, token_id in enumerate(output):  # each as in a row of its own, which decides the frequencies
            assert others.plain_logits(model, [*prompt, *output[:number]])[-1].argmax() == token_id
    assert outgrown


def test_doge_is_limited_to_the_keys_that_it_keeps() -> None:
    llm = LLM(tiny_model("doge", keep_window_size=40), **others.options())
    assert llm.model_info.max_model_len == 40
    assert any("the model chooses among its keys by rank" in note for note in llm.model_info.notes)


def tiny_model(model_type: str, **config: Any) -> PreTrainedModel:
    """A model whose context matters."""
    sizes = {
        "vocab_size": zoo.VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    return model

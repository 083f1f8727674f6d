"""A checkpoint's own layer for multi-token prediction drafts what it does in `transformers`, and nothing changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

from inflight import LLM, ModelError, SamplingParams
from inflight.demo_model import DEMO_MODEL
from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation import DraftTokens
from tests.speculation.mtp_checkpoints import CONFIGS, draw_checkpoint
from tests.speculation.oracle import make_rows_free
from tests.speculation.random_requests import said

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
LENGTHS = (40, 1, 23)
PROMPTS = [[(7 * each + (3 + each) * place) % 250 for place in range(size)] for each, size in enumerate(LENGTHS)]


def prompts() -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in PROMPTS]


def with_head(folder: Path, **options: Any) -> LLM:
    """A model whose own head drafts at any cost and any acceptance rate."""
    llm = LLM(folder, **{"dtype": "float32", "speculation": "draft", "draft_model": "mtp", **options})
    make_rows_free(llm.engine)
    proposer = llm.engine._speculation._proposer  # type: ignore[union-attr]
    chance = proposer.chance
    proposer.chance = lambda candidate: min(1.0, chance(candidate) + 1.0)  # type: ignore[method-assign, union-attr]
    return llm


def drafts_of_transformers(folder: Path, prompt: list[int]) -> dict[int, int]:
    """Its first draft token after each number of tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, drafts = model.config, {}
    model._keys_to_ignore_on_load_unexpected = [rf"\.layers\.{config.num_hidden_layers}\.", r"^mtp\."]
    if not hasattr(config, "num_mtp_layers"):
        config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
    if getattr(config, "layer_types", None) and not getattr(config, "mtp_layer_types", None):
        config.mtp_layer_types = config.layer_types[-1:]

    class Watched(MTPCandidateGenerator):
        def get_candidates(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            candidates = super().get_candidates(input_ids, *args, **kwargs)
            so_far = input_ids.shape[1]
            if candidates[0].shape[1] > so_far:
                drafts[so_far] = int(candidates[0][0, so_far])
            return candidates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.generation.utils.MTPCandidateGenerator", Watched)
        model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, use_mtp=True)
    return drafts


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.thorough("glm4_moe]")
def test_it_drafts_what_transformers_drafts(model_type: str, tmp_path: Path) -> None:
    draw_checkpoint(tmp_path, model_type)
    expected = LLM(tmp_path, dtype="float32", speculation="off").generate(prompts(), GREEDY, use_tqdm=False)
    llm = with_head(tmp_path, max_draft_tokens=1)
    drafts: dict[tuple[int, int], int] = {}
    proposer = llm.engine._speculation._proposer  # type: ignore[union-attr]
    propose = proposer.propose  # type: ignore[union-attr]

    def watched(candidates: list[Candidate], length: int) -> list[DraftTokens]:
        given = propose(candidates, length)
        for candidate, each in zip(candidates, given, strict=True):
            if each.token_ids:
                drafts[candidate.token_ids[0], len(candidate.token_ids)] = each.token_ids[0]
        return given

    proposer.propose = watched  # type: ignore[method-assign, union-attr, assignment]
    for output, wanted in zip(llm.generate(prompts(), GREEDY, use_tqdm=False), expected, strict=True):
        assert said(output) == said(wanted)
    assert llm.model_info.is_recorded
    for prompt in (PROMPTS[0], PROMPTS[2]):
        theirs = drafts_of_transformers(tmp_path, prompt)
        ours = {number: token_id for (first, number), token_id in drafts.items() if first == prompt[0]}
        common = ours.keys() & theirs.keys()
        assert len(common) > 20
        assert {each: ours[each] for each in common} == {each: theirs[each] for each in common}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "mellum"])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["", "bf16", "int8"])
@pytest.mark.thorough("int8-deepseek")
def test_a_head_that_foretells_is_right(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    draw_checkpoint(tmp_path, model_type, foretells=True)
    options = {"dtype": "float32", **options}
    expected = LLM(tmp_path, **options, speculation="off").generate(prompts(), GREEDY, use_tqdm=False)
    llm = with_head(tmp_path, max_draft_tokens=8, **options)
    for output, wanted in zip(llm.generate(prompts(), GREEDY, use_tqdm=False), expected, strict=True):
        assert said(output) == said(wanted)
    stats = llm.engine.stats()
    if options["dtype"] == "float32" and "quantization" not in options:
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 60
        assert stats.num_steps < 9
    else:  # the layer rounds where its model does not, and some tokens are about as likely as others
        assert stats.num_accepted_tokens > stats.num_draft_tokens / 2


@pytest.mark.parametrize("foretells", [False, True], ids=["wrong", "right"])
@pytest.mark.thorough
def test_preemption_shared_prefixes_and_forks_do_not_notice_a_head(foretells: bool, tmp_path: Path) -> None:
    draw_checkpoint(tmp_path, "glm4_moe", foretells=foretells)
    asked = [{"prompt_token_ids": PROMPTS[0][:20] + PROMPTS[each % 3]} for each in range(12)]
    params = [
        SamplingParams(temperature=each % 2, seed=each, n=1 + each % 3, max_tokens=20, ignore_eos=True, logprobs=1)
        for each in range(12)
    ]
    options: dict[str, Any] = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    expected = LLM(tmp_path, dtype="float32", **options, speculation="off").generate(asked, params, use_tqdm=False)
    llm = with_head(tmp_path, **options)
    for _ in range(2):
        for output, wanted in zip(llm.generate(asked, params, use_tqdm=False), expected, strict=True):
            assert said(output) == said(wanted)
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > 100
    assert bool(stats.num_accepted_tokens > stats.num_draft_tokens / 2) == foretells
    llm.engine.scheduler.block_pool.check([])


def test_a_checkpoint_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="draft_model 'mtp': the checkpoint has no layer for multi-token prediction"):
        LLM(DEMO_MODEL, draft_model="mtp")
    model = draw_checkpoint(tmp_path, "deepseek_v3")
    model.save_pretrained(tmp_path)  # without the layer, which its configuration still names
    with pytest.raises(ModelError, match=r"draft_model 'mtp': the checkpoint's layer cannot be loaded: .*missing"):
        LLM(tmp_path, draft_model="mtp")

"""With causal attention and last-token pooling, a common prefix is computed once, in the same step or an earlier one,
and the output has the same bits."""

from pathlib import Path

import pytest
import torch

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.pooling import PooledText, PoolingPlan
from tests.pooling.checkpoints import TextRunner, classifier, draw_ids, make_model
from tests.pooling.test_exactness import assert_plain, logits_of

BLOCK = 4
LAST = PoolingPlan("embed", ("lasttoken",))
COMMON, OTHER = draw_ids(50, 30)


def texts_with_prefixes() -> list[PooledText]:
    """Texts that begin with all or a part of two others, in blocks and between them."""
    ends = draw_ids(9, 1, 30, 5, 4, 2, 17)
    beginnings = (COMMON, COMMON[:48], COMMON[:30], OTHER, OTHER[:8], COMMON, [])
    texts = [PooledText([*beginning, *end]) for beginning, end in zip(beginnings, ends, strict=True)]
    return [*texts, PooledText(COMMON), texts[0]]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_last_tokens_are_those_of_plain_transformers(family: str) -> None:
    model = make_model(family)
    runner = TextRunner(model, EngineConfig(block_size=BLOCK), LAST)
    assert runner.info.can_share_prefixes

    def plain(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]

    assert_plain(runner, texts_with_prefixes(), plain)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_so_are_labels_from_the_last_token(family: str) -> None:
    model = classifier(family, 3)
    runner = TextRunner(model, EngineConfig(block_size=BLOCK), PoolingPlan("classify"))
    assert runner.info.can_share_prefixes
    padded = [PooledText([*COMMON, 0]), PooledText([*COMMON[:20], 0, 0])]  # the head looks for what is no padding
    assert_plain(runner, [*texts_with_prefixes(), *padded], lambda ids: logits_of(model, ids))


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("qwen3", PoolingPlan("embed", ("mean",))),
        ("qwen3", PoolingPlan("embed", ("lasttoken", "cls"))),
        ("bert", LAST),
        ("gemma3, bidirectional", LAST),
    ],
)
def test_nothing_is_shared_where_all_tokens_count(family: str, plan: PoolingPlan) -> None:
    runner = TextRunner(make_model(family), EngineConfig(block_size=BLOCK), plan)
    assert not runner.info.can_share_prefixes
    runner.run([PooledText(COMMON)] * 2)
    assert runner.engine.stats().num_cached_tokens == 0


def test_the_budget_of_a_step_counts_what_is_computed() -> None:
    runner = TextRunner(make_model("qwen3"), EngineConfig(max_num_batched_tokens=64, block_size=BLOCK), LAST)
    texts = [PooledText([*COMMON, number, number + 1]) for number in range(9)]
    runner.run(texts)
    stats = runner.engine.stats()
    shared = len(COMMON) // BLOCK * BLOCK
    assert stats.num_steps == 2  # 52 tokens of the first and 4 of three others; 4 of the rest
    assert stats.num_cached_tokens == (len(texts) - 1) * shared
    assert stats.num_step_tokens + stats.num_cached_tokens == sum(len(text.token_ids) for text in texts)


def test_a_long_text_runs_in_chunks_beside_others() -> None:
    """With the bits that it has in one step."""
    model, texts = make_model("qwen3"), [PooledText(ids) for ids in draw_ids(150, 3, 40)]
    whole = TextRunner(model, EngineConfig(block_size=BLOCK), LAST).run(texts)
    chunked = TextRunner(model, EngineConfig(max_num_batched_tokens=32, block_size=BLOCK), LAST)
    assert chunked.run(texts) == whole
    assert chunked.engine.stats().num_steps == -(-193 // 32)


def test_a_text_that_is_pooled_whole_takes_nothing_from_the_cache() -> None:
    """Its last token is padding, and the head looks for another one."""
    runner = TextRunner(classifier("qwen3", 3), EngineConfig(block_size=BLOCK), PoolingPlan("classify"))
    text = PooledText([*COMMON, 0])
    assert runner.run([text]) == runner.run([text])
    assert runner.engine.stats().num_cached_tokens == 0


def test_a_prefix_on_disk_serves_another_engine(tmp_path: Path) -> None:
    model, text = make_model("qwen3"), PooledText(COMMON)
    config = EngineConfig(block_size=BLOCK, prefix_cache_dir=str(tmp_path))
    first = TextRunner(model, config, LAST)
    values = first.run([text])
    first.engine.save_prefixes(60)
    second = TextRunner(model, config, LAST)
    assert second.run([text]) == values
    with pytest.raises(ModelError, match="its texts run whole"):
        TextRunner(make_model("bert"), config, LAST)

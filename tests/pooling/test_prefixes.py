"""What several texts of a step begin with is computed once, where a token depends on those before it alone and only the
last one's states are wanted; and the numbers have the same bits."""

import pytest
import torch

from inflight.contracts.config import EngineConfig
from inflight.contracts.pooling import PooledText, PoolingPlan
from inflight.engine.pooling import PoolingEngine
from inflight.execution.pooling import PoolingRunner
from inflight.execution.pooling.step_prefixes import Place, StepPrefixes
from tests.pooling.checkpoints import classifier, draw_ids, make_model
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
    runner = PoolingRunner(model, EngineConfig(block_size=BLOCK), LAST)
    assert runner.shares_prefixes
    assert runner.info.can_share_prefixes

    def plain(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]

    assert_plain(runner, texts_with_prefixes(), plain)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_so_are_labels_from_the_last_token(family: str) -> None:
    model = classifier(family, 3)
    runner = PoolingRunner(model, EngineConfig(block_size=BLOCK), PoolingPlan("classify"))
    assert runner.shares_prefixes
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
    runner = PoolingRunner(make_model(family), EngineConfig(block_size=BLOCK), plan)
    assert not runner.shares_prefixes
    assert [runner.prefixes().place(PooledText(COMMON)).start for _ in range(2)] == [0, 0]


def test_the_budget_of_a_step_counts_what_is_computed() -> None:
    engine = PoolingEngine(make_model("qwen3"), EngineConfig(max_num_batched_tokens=64, block_size=BLOCK), LAST)
    texts = [PooledText([*COMMON, number, number + 1]) for number in range(9)]
    engine.submit("a", texts)
    num_steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        num_steps += 1
    stats = engine.stats()
    shared = len(COMMON) // BLOCK * BLOCK
    own = len(texts[0].token_ids) - shared
    in_step = 1 + (64 - len(texts[0].token_ids)) // own  # the first text of a step computes all of it
    assert num_steps == -(-len(texts) // in_step)
    assert stats.num_cached_tokens == (len(texts) - num_steps) * shared
    assert stats.num_step_tokens + stats.num_cached_tokens == sum(len(text.token_ids) for text in texts)


def test_a_text_computes_its_last_token() -> None:
    prefixes = StepPrefixes(2, are_shared=True, padding=9)
    assert prefixes.place(PooledText([1, 2, 3, 4])) == Place(0, [0, 1])
    assert prefixes.place(PooledText([1, 2, 3, 4])) == Place(2, [0, 2])
    assert prefixes.place(PooledText([1, 2, 3, 4, 5])) == Place(4, [0, 1, 3])
    assert prefixes.place(PooledText([3, 4, 5])) == Place(0, [4, 5])  # the same tokens after others
    assert prefixes.place(PooledText([1, 2, 9])) == Place(0, [6, 7])
    assert prefixes.place(PooledText([1, 2, 3], [0, 0, 1])) == Place(0, [8, 9])

"""The promise: in float32, greedy output equals the plain model's output for each prompt alone, token for token.

It holds for every token budget, block size and cache size (docs/architecture.md, "Exactness").
"""

import pytest

from inflight import LLM, SamplingParams
from tests import others, zoo
from tests.exactness.harness import (
    MAX_SHARE_OF_TIES,
    assert_exact,
    has_windows,
    num_blocks_for,
    references,
    run_teacher_forced,
)

BUDGETS = (8, 64, 2048)
BLOCK_SIZES = (1, 16, 32)
LATIN_SQUARE = [
    (name, budget, BLOCK_SIZES[(row + column) % 3])
    for row, name in enumerate((*zoo.ARCHITECTURES, "qwen3_next", "falcon_h1"))
    for column, budget in enumerate(BUDGETS)
]
"""Every model runs with every budget and every block size; several models run with each of the nine pairs."""
WITH_DRAFTS = 64
"""The budget with which there are draft tokens, too."""
TIGHT = 160  # a cache for one sequence of this many tokens; requests have up to 124
ROOMY = 16_384


@pytest.mark.parametrize(("name", "budget", "block_size"), LATIN_SQUARE)
@pytest.mark.thorough(
    "gemma2-8",
    *(f"{name}-64" for name in ("gemma3", "gpt2", "gpt_oss", "llama", "longrope", "mixtral", "mistral", "v3")),
)
def test_exact_in_a_cache_so_small_that_sequences_are_preempted(name: str, budget: int, block_size: int) -> None:
    run = run_teacher_forced(
        others.build(name),
        references(name),
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=num_blocks_for(name, TIGHT, block_size=block_size, budget=budget),
        max_num_seqs=12,
        drafts=budget == WITH_DRAFTS,
    )
    assert_exact(run)
    assert (run.num_accepted_tokens > 0) == (budget == WITH_DRAFTS)
    assert run.num_preemptions > 0 or (budget == 2048 and has_windows(name))
    assert run.count("decode") > 0
    assert (run.count("chunk") > 0) == (budget < 100)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
@pytest.mark.parametrize(("budget", "block_size", "backend"), [(2048, 16, "torch"), (64, 8, "reference")])
def test_exact_in_a_roomy_cache(name: str, budget: int, block_size: int, backend: str) -> None:
    run = run_teacher_forced(
        zoo.build(name),
        references(name),
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=3 * ROOMY // block_size,
        attention_backend=backend,
        max_num_seqs=12,
    )
    assert_exact(run)
    assert run.num_preemptions == 0
    mixed = [record for record in run.records if len({span.kind == "decode" for span in record.spans}) == 2]
    assert mixed, "prefills and decodes ride in the same step"


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_generate_gives_the_tokens_of_the_plain_model(name: str) -> None:
    lessons = references(name)
    llm = LLM(zoo.build(name), max_num_batched_tokens=64, max_num_seqs=8)
    params = [SamplingParams(temperature=0, max_tokens=len(lesson.tokens)) for lesson in lessons]
    outputs = llm.generate([lesson.prompt for lesson in lessons], params, use_tqdm=False)
    different = [
        number
        for number, (output, lesson) in enumerate(zip(outputs, lessons, strict=True))
        if output.outputs[0].token_ids != lesson.tokens
    ]
    assert len(different) <= MAX_SHARE_OF_TIES * len(lessons), different

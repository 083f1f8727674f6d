"""Which attention calls share blocks, and how much cache a model with windows or shared keys takes."""

import random
from dataclasses import replace

import pytest

from inflight import LLM, SamplingParams
from inflight.contracts.step.cache_layout import ALL_TOKENS, CacheGroup
from inflight.execution.attention import AttentionSpec
from inflight.execution.attention.grouping import group_calls
from tests import others, zoo


def call(window: int | None = None, num_kv_heads: int = 1, size: int = 8, **options: int | None) -> AttentionSpec:
    return AttentionSpec(4, num_kv_heads, size, size, 1.0, window=window, **options)  # type: ignore[arg-type]


def bytes_of(spec: AttentionSpec) -> int:
    return spec.num_kv_heads * (spec.head_size + spec.value_head_size)


FULL, LOCAL, WIDE, NARROW = call(), call(window=512), call(size=16), call(window=512, size=4)


@pytest.mark.parametrize(
    ("specs", "num_lasting", "num_windowed"),
    [
        ([FULL] * 12, 1, 0),
        ([LOCAL] * 12, 0, 1),
        ([LOCAL, FULL] * 12, 1, 1),
        (([LOCAL] * 5 + [FULL]) * 4 + [LOCAL] * 2, 1, 6),  # Gemma 3 1B
        (([LOCAL] * 5 + [FULL]) * 10 + [LOCAL] * 2, 1, 6),  # Gemma 3 27B: wastes a seventh of the windows' room
        (([FULL] * 5 + [LOCAL] * 6) * 2, 5, 6),  # groups of six would waste a sixth of the full layers' room
        ([LOCAL] * 31 + [FULL], 1, 0),  # too many groups: all layers keep all tokens
        ([call(window=5000)] * 6, 1, 0),  # no sequence is that long
        (([LOCAL] * 5 + [WIDE]) * 5, 1, 3),  # Gemma 4: two narrow calls take the place of one wide call
        (([LOCAL] * 5 + [call(num_kv_heads=2)]) * 4, 1, 3),  # groups of four, or of up to eight
        (([NARROW] * 8 + [WIDE]) * 2, 1, 2),
        ([call(512, num_kv_heads=4), call(512, num_kv_heads=4), FULL, FULL] * 4, 1, 4),  # the wider calls have windows
        ([LOCAL, WIDE] * 6, 2, 1),
        ([LOCAL, call(num_kv_heads=3)] * 6, 3, 1),
        ([LOCAL, call(size=12)] * 6, 1, 0),  # the sizes are not multiples of each other
        ([LOCAL, call(window=512, size=16), FULL] * 6, 1, 0),  # the shapes of calls with windows differ
    ],
)
def test_calls_that_keep_the_same_tokens_share_blocks(
    specs: list[AttentionSpec], num_lasting: int, num_windowed: int
) -> None:
    grouping = group_calls(specs, 4096, bytes_of)
    assert grouping.groups == (ALL_TOKENS,) * num_lasting + (CacheGroup(512),) * num_windowed
    for number, (before, after) in enumerate(zip(specs, grouping.specs, strict=True)):
        assert replace(after, cache_group=0) == before
        group = grouping.groups[grouping.part_of(number).group]
        assert group in (ALL_TOKENS, CacheGroup(before.window))


@pytest.mark.parametrize("specs", [([LOCAL] * 4 + [WIDE]) * 3, ([NARROW] * 8 + [WIDE]) * 2, [LOCAL] * 31 + [FULL]])
def test_calls_share_block_memory_and_waste_little(specs: list[AttentionSpec]) -> None:
    grouping = group_calls(specs, 4096, bytes_of)
    storages = grouping.storages()
    assert sorted(call for calls in storages for call in calls) == list(range(len(specs)))
    for first, *beside in storages:
        assert grouping.part_of(first).num_parts == 1
        for call in beside:
            assert bytes_of(specs[call]) * grouping.part_of(call).num_parts == bytes_of(specs[first])
        places = [grouping.part_of(call) for call in (first, *beside)]
        assert len(set(places)) == len(places), "each in a part of its own"
    held = len(grouping.groups) * sum(bytes_of(specs[first]) for first, *_ in storages)
    assert held <= 1.1 * sum(map(bytes_of, specs))


def test_a_call_that_shares_keys_has_the_group_of_the_other_call_and_no_memory() -> None:
    shares_first, shares_second = call(512, shares_cache_with=0), call(shares_cache_with=1)
    grouping = group_calls([LOCAL, FULL, shares_first, shares_second], 4096, bytes_of)
    assert grouping.groups == (ALL_TOKENS, CacheGroup(512))
    assert [each.cache_group for each in grouping.specs] == [1, 0, 1, 0]
    assert grouping.storages() == [[1, 0]]
    sees_more = call(shares_cache_with=0)
    grouping = group_calls([LOCAL, FULL, sees_more], 4096, bytes_of)
    assert grouping.groups == (ALL_TOKENS,)
    assert [each.cache_group for each in grouping.specs] == [0, 0, 0]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss", "mistral"])
def test_a_long_sequence_holds_only_its_windows(name: str) -> None:
    llm = LLM(zoo.build(name), block_size=4, max_num_batched_tokens=16, num_blocks=200)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.submit(engine.inputs.accept("a", list(range(1, 101)), params))
    groups, used = engine.scheduler.block_pool.layout.groups, 0
    while engine.has_unfinished_requests:
        engine.step()
        used = engine.scheduler.block_pool.num_used or used
    in_window = (zoo.WINDOW + 3) // 4 + 1
    assert used <= sum(35 if group == ALL_TOKENS else in_window for group in groups)
    info = llm.model_info
    assert info.kv_bytes_per_lasting_token * len(groups) == info.kv_bytes_per_token * groups.count(ALL_TOKENS)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["gemma4_large", "gemma4_few_global"])
def test_windows_are_released_if_calls_differ_in_shape(name: str, backend: str) -> None:
    """Two narrow calls share the blocks of a wide one, with chunks, preemption, shared prefixes and forks."""
    model = others.build(name)
    llm = LLM(model, attention_backend=backend, **others.options(num_blocks=80))
    grouping = llm.engine.runner.require_packed().grouping
    assert ALL_TOKENS in grouping.groups
    assert CacheGroup(12) in grouping.groups
    assert {part.num_parts for part in grouping.parts} == {1, 2}
    chance = random.Random(1)
    prompts = [
        [chance.randrange(zoo.VOCAB_SIZE) for _ in range(length)] for length in (1, 60, 7, 33, 50, 70, 15, 16, 17)
    ]
    prompts += [[*prompts[1][:48], 5, 6, 7], [*prompts[1][:33], *[9] * 20]]
    for number in (1, 2):
        params = SamplingParams(temperature=0, max_tokens=30, n=number, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            for completion in output.outputs:
                assert not others.wrong_tokens(model, prompt, completion.token_ids)
    assert llm.engine.stats().num_preemptions > 0
    assert llm.engine.stats().num_cached_tokens > 0
    llm.engine.scheduler.block_pool.check([])


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_shared_keys_and_values_are_stored_once(name: str) -> None:
    model = others.build(name)
    llm = LLM(model, **others.options(num_blocks=300))
    assert llm.model_info.executor == "packed"
    executor = llm.engine.runner.require_packed()
    owners = [spec for spec in executor.specs if spec.shares_cache_with is None]
    assert len(owners) == len(executor.specs) - 2
    bytes_of_owners = sum(executor.backend.bytes_per_block(spec) for spec in owners)
    assert executor.bytes_per_block(llm.model_info.block_size) * len(executor.cache_groups) == bytes_of_owners
    prompts = [list(range(start, start + 40)) for start in range(1, 60, 7)]
    params = SamplingParams(temperature=0, max_tokens=12)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert not others.wrong_tokens(model, prompt, output.outputs[0].token_ids)


def test_attention_chunks_are_released_when_they_end() -> None:
    """Llama 4 across several attention chunks, with chunked prompts, preemption and shared prefixes."""
    model = others.build("llama4")
    llm = LLM(model, **others.options(num_blocks=120))
    groups = llm.engine.scheduler.block_pool.layout.groups
    assert groups == (ALL_TOKENS, *[CacheGroup(chunk=16)] * 3)
    chance = random.Random(1)
    prompts = [
        [chance.randrange(zoo.VOCAB_SIZE) for _ in range(length)] for length in (1, 60, 7, 33, 50, 70, 15, 16, 17)
    ]
    prompts += [[*prompts[1][:48], 5, 6, 7], [*prompts[1][:33], *[9] * 20]]
    for _ in range(2):
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert not others.wrong_tokens(model, prompt, output.outputs[0].token_ids)
    assert llm.engine.stats().num_preemptions > 0
    assert llm.engine.stats().num_cached_tokens > 0

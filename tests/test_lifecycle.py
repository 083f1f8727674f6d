"""A request's life in the engine: admission, order, reuse of computed prefixes, and deadlines."""

import time
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import InvalidRequestError, QueueFullError
from inflight.contracts.api.outputs import SequenceOutput
from inflight.engine.engine import Engine
from tests import zoo

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [7, 3, 9, 1] * 12


def make_engine(**options: Any) -> Engine:
    return Engine(zoo.build("llama"), EngineConfig(**options))


def drain(engine: Engine) -> list[SequenceOutput]:
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    engine.scheduler.block_pool.check([])
    return outputs


def test_a_deadline_aborts_and_is_reported_once() -> None:
    engine = make_engine()
    engine.submit(engine.inputs.accept("late", PROMPT, GREEDY, deadline=time.monotonic() - 1))
    engine.submit(engine.inputs.accept("in time", PROMPT, GREEDY, deadline=time.monotonic() + 3600))
    outputs = drain(engine)
    ends = [(o.request_id, o.finish_reason, o.error) for o in outputs if o.finish_reason]
    assert ends == [("late", "abort", "the request's deadline has passed"), ("in time", "length", None)]
    assert engine.step() == []


def test_a_deadline_does_not_apply_to_a_later_request_with_the_same_id() -> None:
    engine = make_engine()
    engine.submit(
        engine.inputs.accept("a", [1, 2], SamplingParams(temperature=0, max_tokens=1), deadline=time.monotonic() + 60)
    )
    drain(engine)
    engine.submit(engine.inputs.accept("a", [1, 2], GREEDY))
    engine._expire("a", time.monotonic() + 120)
    assert [o.finish_reason for o in drain(engine) if o.finish_reason] == ["length"]


def test_a_full_queue_refuses_requests_until_one_has_left() -> None:
    engine = make_engine(max_num_waiting=2, max_num_seqs=1)
    for number in range(2):
        engine.submit(engine.inputs.accept(str(number), PROMPT, GREEDY))
    with pytest.raises(QueueFullError, match="2 sequences wait already, and at most 2 may"):
        engine.submit(engine.inputs.accept("more", PROMPT, GREEDY))
    engine.step()
    engine.submit(engine.inputs.accept("more", PROMPT, GREEDY))
    assert {o.request_id for o in drain(engine) if o.finish_reason == "length"} == {"0", "1", "more"}


def test_lower_priority_values_are_served_first() -> None:
    llm = LLM(zoo.build("llama"), max_num_seqs=1, policy="priority", aging_steps=1000)
    order = [d.prompt_index for d in llm.stream([PROMPT] * 4, GREEDY, priority=[3, 1, 2, 1]) if d.output]
    assert order == [1, 3, 2, 0]
    first_come = LLM(zoo.build("llama"), max_num_seqs=1)
    order = [d.prompt_index for d in first_come.stream([PROMPT] * 4, GREEDY, priority=[3, 1, 2, 1]) if d.output]
    assert order == [0, 1, 2, 3]


def test_a_computed_prefix_is_reused_and_counted_unless_salts_differ() -> None:
    llm = LLM(zoo.build("llama"), block_size=16)
    first = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]
    assert first.metrics.num_cached_tokens == 0
    next_turn = PROMPT + first.outputs[0].token_ids + [5] * 20
    second = llm.generate([next_turn], GREEDY, use_tqdm=False)[0]
    assert second.metrics.num_cached_tokens == (len(PROMPT) + 7) // 16 * 16, "the whole turn before but its last token"
    salted = {"prompt_token_ids": next_turn, "cache_salt": "somebody else"}
    others = [llm.generate(salted, GREEDY, use_tqdm=False)[0] for _ in range(2)]
    assert [each.metrics.num_cached_tokens for each in others] == [0, 64]
    assert [each.outputs[0].token_ids for each in others] == [second.outputs[0].token_ids] * 2


def test_sequences_of_one_prompt_have_their_own_random_streams_and_repeat_with_the_seed() -> None:
    llm = LLM(zoo.build("llama"))
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=3, ignore_eos=True)
    runs = [llm.generate([PROMPT], params, use_tqdm=False)[0] for _ in range(2)]
    texts = [[tuple(completion.token_ids) for completion in run.outputs] for run in runs]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "high"}, "priority is 'high'"),
        ({"priority": 2**70}, "priority is 1180591620717411303424; it must be an integer from -2147483647 to"),
        ({"cache_salt": 5}, "cache_salt is 5; it must be text"),
        ({"cache_salt": "\ud800"}, "must be text that UTF-8 can encode"),
    ],
)
def test_bad_options_are_refused_at_admission(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make_engine().inputs.accept("a", PROMPT, GREEDY, **options)


def test_the_number_of_priorities_must_match_the_number_of_prompts() -> None:
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1 priorities"):
        LLM(zoo.build("llama")).generate([PROMPT, PROMPT], GREEDY, use_tqdm=False, priority=[1])

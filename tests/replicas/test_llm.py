"""`LLM` over two engines' processes: the same outputs as over one, whatever dies."""

import os
import signal
import sys
import threading
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any

import pytest

from inflight import LLM, InvalidRequestError, ModelError, SamplingParams, StructuredOutput
from inflight.contracts.outputs import RequestOutput
from inflight.engine.process.connection import ProcessConnection
from inflight.replicas import replicated_engine
from inflight.replicas.replicated_engine import ReplicatedEngine
from tests import zoo


class Injected(BaseException):
    """What is raised where nobody expects it."""


PROMPTS = [f"Once upon a time, number {number}" for number in range(24)]
SAMPLED = SamplingParams(temperature=0.9, max_tokens=40, n=2, logprobs=1, prompt_logprobs=0)


def engine_of(llm: LLM) -> ReplicatedEngine:
    assert isinstance(llm.engine, ReplicatedEngine)
    return llm.engine


def kill(llm: LLM, number: int) -> None:
    sessions = engine_of(llm)._client.sessions()
    if number in sessions:
        connection = sessions[number]._connection
        assert isinstance(connection, ProcessConnection)
        os.kill(connection.pid, signal.SIGKILL)


def plain(outputs: list[RequestOutput]) -> list[object]:
    return [
        (output.prompt_token_ids, output.prompt_logprobs, each.text, each.token_ids, each.logprobs, each.finish_reason)
        for output in outputs
        for each in output.outputs
    ]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(replicas=2, seed=7, max_num_seqs=8, num_blocks=600)


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(seed=7)


def idle(llm: LLM) -> bool:
    engine = engine_of(llm)
    sessions = engine._client.sessions().values()
    mailboxes = [address for session in sessions for address in session._mailboxes]
    return not (engine._requests or engine._backlog or engine._num_in_work or mailboxes)


def test_outputs_are_those_of_one_engine(llm: LLM, alone: LLM) -> None:
    assert plain(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)) == plain(
        alone.generate(PROMPTS, SAMPLED, use_tqdm=False)
    )
    assert idle(llm)


def test_requests_of_an_engine_that_dies_are_run_again_elsewhere(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=60, n=2, seed=3, logprobs=0)
    expected = plain(LLM().generate(PROMPTS, params, use_tqdm=False))
    outputs: dict[int, RequestOutput] = {}
    streamed: dict[tuple[int, int], list[int]] = {}
    num_crashes = engine_of(llm)._client.num_crashes
    for number, delta in enumerate(llm.stream(PROMPTS, params)):
        if number == 100:
            kill(llm, 0)
        streamed.setdefault((delta.prompt_index, delta.index), []).extend(delta.token_ids)
        if delta.output is not None:
            outputs[delta.prompt_index] = delta.output
    assert engine_of(llm)._client.num_crashes > num_crashes
    assert plain([outputs[number] for number in range(len(PROMPTS))]) == expected
    for (prompt, index), token_ids in streamed.items():  # nothing twice, nothing lost
        assert token_ids == outputs[prompt].outputs[index].token_ids
    assert idle(llm)


def test_a_request_that_engines_die_of_ends_with_an_error(llm: LLM) -> None:
    endless = SamplingParams(temperature=0, n=64, max_tokens=900, ignore_eos=True)  # no stall lasts as long
    last = None
    for last in llm.stream(["Once"], endless):
        if not last.finish_reason:
            for number in range(2):
                kill(llm, number)
    assert last is not None
    assert last.output is not None
    assert {each.finish_reason for each in last.output.outputs} == {"error"}
    assert last.output.error in {f"replica {number} was killed by SIGKILL" for number in range(2)}
    assert idle(llm)


@pytest.mark.thorough
def test_a_stream_that_is_closed_leaves_nothing_and_others_go_on(llm: LLM, alone: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    endless = llm.stream(PROMPTS, SamplingParams(max_tokens=900, ignore_eos=True))
    next(endless)
    other = llm.stream(PROMPTS[:4], greedy)
    next(other)
    endless.close()
    texts = {delta.prompt_index: delta.output for delta in other if delta.output is not None}
    expected = alone.generate(PROMPTS[:4], greedy, use_tqdm=False)
    assert [texts[number].outputs[0].token_ids for number in range(4)] == [
        each.outputs[0].token_ids for each in expected
    ]
    assert idle(llm)


@pytest.mark.thorough
def test_an_exception_at_any_line_costs_other_streams_nothing(llm: LLM, alone: LLM) -> None:
    """As `tests/test_torn_engines.py` has it, for the bookkeeping of replicas."""
    held_params = SamplingParams(temperature=1.0, seed=4, max_tokens=40, n=2, ignore_eos=True)
    (held,) = alone.generate([PROMPTS[0]], held_params, use_tqdm=False)
    next_params = SamplingParams(temperature=0, max_tokens=6)
    expected = plain(alone.generate(PROMPTS[:3], next_params, use_tqdm=False))
    path = replicated_engine.__file__

    def check(at: int | None) -> list[int]:
        lines: list[int] = []

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code.co_filename != path:
                return None
            if event == "line":
                lines.append(frame.f_lineno)
                if len(lines) - 1 == at:
                    sys.settrace(None)
                    raise Injected
            return trace

        stream, heard = llm.stream([PROMPTS[0]], held_params), {0: list[int](), 1: list[int]()}
        for delta in islice(stream, 3):
            heard[delta.index] += delta.token_ids
        with suppress(Injected):
            sys.settrace(trace)
            try:
                closed = llm.stream(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=20, n=2))
                next(closed)
                closed.close()
                llm.generate(PROMPTS[:2], next_params, use_tqdm=False)
            finally:
                sys.settrace(None)
        for delta in stream:
            heard[delta.index] += delta.token_ids
        assert heard == {each.index: each.token_ids for each in held.outputs}, at
        assert plain(llm.generate(PROMPTS[:3], next_params, use_tqdm=False)) == expected
        engine = engine_of(llm)
        assert not engine.is_torn
        assert (len(engine._requests), len(engine._backlog), engine._num_in_work) == (0, 0, 0)
        return lines

    events: dict[int, list[int]] = {}
    for number, line in enumerate(check(None)):
        events.setdefault(line, []).append(number)
    assert len(events) > 60
    for at in sorted({at for numbers in events.values() for at in (numbers[0], numbers[-1])}):
        check(at)


def test_threads_share_the_engines(llm: LLM, alone: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = [plain([each]) for each in alone.generate(PROMPTS, params, use_tqdm=False)]
    found: dict[int, list[object]] = {}

    def ask(number: int) -> None:
        found[number] = plain(llm.generate([PROMPTS[number]], params, use_tqdm=False))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(PROMPTS))] == expected


def test_what_is_wrong_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        llm.generate([[]], use_tqdm=False)
    params = SamplingParams(structured_output=StructuredOutput(regex="(unclosed"))
    with pytest.raises(InvalidRequestError):
        llm.generate([PROMPTS[0]], params, use_tqdm=False)
    assert idle(llm)
    with pytest.raises(ModelError, match=r"cannot be handed to the engine's process; .* or replicas=1"):
        LLM(zoo.build("llama"), replicas=2)
    with pytest.raises(ValueError, match="replicas is 'many'"):
        LLM(replicas="many")  # type: ignore[arg-type]


def test_weights_are_reloaded_into_new_engines(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    before, engine = plain(llm.generate(PROMPTS[:3], params, use_tqdm=False)), llm.engine
    llm.reload_weights()
    assert llm.engine is not engine
    assert plain(llm.generate(PROMPTS[:3], params, use_tqdm=False)) == before

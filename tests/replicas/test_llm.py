"""`LLM` over two engines' processes: the same outputs as over one, whatever dies."""

import os
import signal
import threading

import pytest

from inflight import LLM, InvalidRequestError, ModelError, SamplingParams, StructuredOutput
from inflight.contracts.api.outputs import RequestOutput
from inflight.engine.process.connection import ProcessConnection
from tests import zoo

PROMPTS = [f"Once upon a time, number {number}" for number in range(24)]
SAMPLED = SamplingParams(temperature=0.9, max_tokens=40, n=2, logprobs=1, prompt_logprobs=0)


def kill(llm: LLM, number: int) -> None:
    sessions = llm._client.sessions()
    if number in sessions:
        connection = sessions[number].connection
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
    """Whether every request has been left. (A stream that is closed leaves them in another thread.)"""
    while any(session._mailboxes for session in llm._client.sessions().values()):
        pass
    return llm.stats().num_running == llm.stats().num_waiting == 0


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
    num_crashes = llm._client.num_crashes
    for number, delta in enumerate(llm.stream(PROMPTS, params)):
        if number == 100:
            kill(llm, 0)
        streamed.setdefault((delta.prompt_index, delta.index), []).extend(delta.token_ids)
        if delta.output is not None:
            outputs[delta.prompt_index] = delta.output
    assert llm._client.num_crashes > num_crashes
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
    before, sessions = plain(llm.generate(PROMPTS[:3], params, use_tqdm=False)), llm._client.sessions()
    llm.reload_weights()
    assert not set(sessions.values()) & set(llm._client.sessions().values())
    assert plain(llm.generate(PROMPTS[:3], params, use_tqdm=False)) == before

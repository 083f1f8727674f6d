"""An interrupt of a caller, at any line: other streams lose nothing, and the next call is right.

Each case runs a little world (forks, preemptions, prefix hits, an abort, stop strings) with an exception at one line of
the caller's side, in the thread that calls, while another stream is held. The engine runs in its own thread, where no
interrupt comes.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import pytest

import inflight
from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.outputs import TextDelta
from inflight.contracts.step.record import StepRecord
from inflight.engine.engine import Engine
from tests import zoo
from tests.paged_runner import NUM_TOKENS, PagedRunner, output_of
from tests.settled import settled
from tests.speculation.oracle import make_rows_free
from tests.text.tokenizers_for_tests import byte_level

ROOT = Path(inflight.__file__).parent
CALLERS_SIDE = (
    "entrypoints/llm.py",
    "entrypoints/offline_call.py",
    "engine/client.py",
    "engine/process/session.py",
)
TRACED = {str(ROOT / name) for name in CALLERS_SIDE}
LOCKED = {
    (path, number)
    for path in TRACED
    for number, line in enumerate(Path(path).read_text().splitlines(), 1)
    if line.strip().startswith("with self._")
}
"""Lines that take and release locks. The trace could raise between a block and its release; a signal cannot, because
the interpreter looks for signals only after calls and at jumps."""
BLOCK_SIZE = 4
HELD = [1, 2, 3, 4, 5, 6, 7, 8, 9]
PROMPTS = [[*HELD, 10], [11, 12, 13], [14] * 7]
Act: TypeAlias = "Callable[[World], None]"


class Injected(BaseException):
    """The exception that interrupts the caller."""


class Injector:
    """Counts the lines of the bookkeeping that run, and does something at one of them."""

    def __init__(self, at: int | None, action: Callable[[], object]) -> None:
        self.at = at
        self.action = action
        self.lines: list[tuple[str, int]] = []

    def __enter__(self) -> "Injector":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line" and (frame.f_code.co_filename, frame.f_lineno) not in LOCKED:
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if self.at is not None and len(self.lines) - 1 == self.at:
                sys.settrace(None)
                self.action()
        return self._trace


class World:
    """An `LLM` on the runner without a model, with room for two of its sequences at their full length."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_blocks": 9}
        model = zoo.build("llama")
        assert model.config.vocab_size >= NUM_TOKENS
        self.llm = LLM(model, byte_level().inner, max_num_seqs=4, max_num_batched_tokens=9, **options)
        make_rows_free(self.llm.engine)  # so that draft tokens are the same each time
        self.paged = PagedRunner(BLOCK_SIZE)
        self.llm.engine.runner.run = self.paged.run  # type: ignore[method-assign]

    def held_stream(self) -> tuple[Generator[TextDelta, None, None], dict[int, list[int]]]:
        """A stream of two sequences that has begun, and the tokens that it has given."""
        stream, heard = self.llm.stream([HELD], sampled(12, n=2)), {0: [], 1: []}
        take(stream, heard, 3)
        return stream, heard

    def check_rest(self) -> None:
        """The next call is right, and nothing is left behind."""
        llm = self.llm
        outputs = llm.generate(PROMPTS, sampled(6), use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == [output_of(0, prompt, 6) for prompt in PROMPTS]
        while settled(llm).has_unfinished_requests:
            pass  # an exception while a call is left may leave some of its requests, which run to their ends
        llm.engine.scheduler.block_pool.check([])


def take(stream: Iterator[TextDelta], heard: dict[int, list[int]], num_deltas: int | None = None) -> None:
    for delta in islice(stream, num_deltas):
        heard[delta.index] += delta.token_ids


def sampled(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **options)


def generate_and_abort(world: World) -> None:
    """Forks, preemptions, prefix hits, stop strings, and a stream that is closed."""
    llm = world.llm
    stream = llm.stream(PROMPTS, sampled(8, n=2))
    take(stream, defaultdict(list), 4)
    stream.close()
    stop = ["zz", bytes(output_of(0, PROMPTS[0], 3)[2:]).decode()]
    llm.generate(PROMPTS[:2], sampled(5, stop=stop), use_tqdm=False)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def raise_injected() -> None:
    raise Injected


def run_broken(world: World, act: Act, at: int | None, action: Callable[[], object]) -> list[tuple[str, int]]:
    """Run `act` with an action at one line event. Returns the lines that ran."""
    injector = Injector(at, action)
    with suppress(Injected), injector:
        act(world)
    return injector.lines


def places_to_break(lines: list[tuple[str, int]]) -> Iterable[int]:
    """The line events at which each line runs for the first and for the last time."""
    events: dict[tuple[str, int], list[int]] = {}
    for number, line in enumerate(lines):
        events.setdefault(line, []).append(number)
    return sorted({at for numbers in events.values() for at in (numbers[0], numbers[-1])})


def test_an_exception_at_any_line_costs_other_streams_nothing(world: World) -> None:
    def check(at: int | None) -> list[tuple[str, int]]:
        stream, heard = world.held_stream()
        lines = run_broken(world, generate_and_abort, at, raise_injected)
        take(stream, heard)
        assert heard == {index: output_of(index, HELD, 12) for index in heard}
        world.check_rest()
        return lines

    for at in places_to_break(check(None)):
        check(at)
    assert world.llm.engine.stats().num_preemptions > 0


@pytest.mark.thorough
def test_a_stream_may_be_closed_by_the_garbage_collector_at_any_line(world: World) -> None:
    """A generator in a reference cycle is closed wherever the collector happens to run."""

    def act(world: World) -> None:
        outputs = world.llm.generate(PROMPTS, sampled(4), use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == [output_of(0, prompt, 4) for prompt in PROMPTS]

    def check(at: int | None) -> list[tuple[str, int]]:
        stream, _ = world.held_stream()
        lines = run_broken(world, act, at, stream.close)
        stream.close()
        world.check_rest()
        return lines

    for at in places_to_break(check(None)):
        check(at)


def test_an_abort_in_the_middle_of_a_step_is_left_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(zoo.build("llama"), EngineConfig(speculation="off"))
    for request_id in "ab":
        engine.submit(engine.inputs.accept(request_id, [1, 2, 3], SamplingParams(temperature=0, max_tokens=6)))
    forward = engine.runner.executor.forward

    def aborting(*args: Any) -> Any:
        assert engine.abort("a") == []
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.executor, "forward", aborting)
        outputs = engine.step()
    assert [output.finish_reason for output in outputs] == [None, None]
    while engine.has_unfinished_requests:
        outputs += engine.step()
    ends = [(output.request_id, output.finish_reason) for output in outputs if output.finish_reason]
    assert ends == [("a", "abort"), ("b", "length")]
    engine.scheduler.block_pool.check([])


def test_an_observer_may_abort(world: World) -> None:
    llm = world.llm

    def abort(record: StepRecord) -> None:
        llm.engine.abort(record.spans[0].request_id)

    llm.engine.observer = abort
    try:
        (output,) = llm.generate([PROMPTS[0]], sampled(4), use_tqdm=False)
    finally:
        llm.engine.observer = None
    assert output.outputs[0].finish_reason == "abort"
    world.check_rest()


def test_threads_share_an_llm() -> None:
    llm = LLM(zoo.build("llama"))
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [[number + 1] * 5 for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda prompt: llm.generate([prompt], params, use_tqdm=False)[0], prompts))
    expected = [zoo.plain_greedy(zoo.build("llama"), prompt, 12) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    llm.engine.scheduler.block_pool.check([])


def test_a_hook_of_the_model_cannot_call_the_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(zoo.build("llama"))
    monkeypatch.setattr(
        llm.engine.runner.executor, "forward", lambda *_: llm.generate([[1, 2]], sampled(2), use_tqdm=False)
    )
    (output,) = llm.generate([[1, 2, 3]], sampled(2), use_tqdm=False)
    assert "this LLM is running a step" in (output.error or "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_that_it_cannot_generate() -> None:
    llm = LLM(zoo.build("llama"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[1, 2, 3]], sampled(2), use_tqdm=False)
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        assert "this process was forked from one that had loaded the model" in pipe.read()
    os.waitpid(child, 0)

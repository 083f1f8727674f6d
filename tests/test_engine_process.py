"""The engine in its own process: pipe messages, event delivery, and what happens when the engine or its caller dies."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import EngineDeadError, ModelError, QueueFullError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import SequenceOutput
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.cache_layout import ALL_TOKENS
from inflight.demo_model import DEMO_MODEL
from inflight.engine.client import OneEngine
from inflight.engine.engine import Engine
from inflight.engine.process.connection import ProcessConnection
from inflight.engine.process.loop import MOST_AT_ONCE, serve
from inflight.engine.process.protocol import (
    Abort,
    AskStats,
    Command,
    Commands,
    Event,
    Failed,
    Generate,
    Load,
    Outputs,
    Ready,
    Refused,
    read_command,
    read_event,
    to_frame,
)
from inflight.engine.process.session import Session

pytestmark = pytest.mark.usefixtures("fresh_processes")

INFO = ModelInfo(
    model_class="Model",
    num_parameters=1,
    checkpoint_dtype="float32",
    dtype="float32",
    device="cpu",
    executor="packed",
    proved_on="the model itself",
    attention_backend="torch",
    quantization=None,
    attention_calls=("1 x …",),
    logits_error=0.0,
    attention_error=0.0,
    is_batch_invariant=True,
    vocab_size=10,
    max_model_len=20,
    recompute_beyond=None,
    can_share_prefixes=True,
    block_size=16,
    num_blocks=2,
    cache_groups=(ALL_TOKENS,),
    max_cached_len=32,
    kv_bytes_per_token=8,
    kv_bytes_per_lasting_token=8,
    eos_token_ids=(1,),
    notes=(),
)
READY = Ready(INFO, SamplingParams(temperature=0.5))


# --------------------------------------------------------------------------------------------------------- messages


class _Pipe:
    """A pipe to read from."""

    def __init__(self, content: bytes) -> None:
        read_end, write_end = os.pipe()
        with os.fdopen(write_end, "wb") as file:
            file.write(content)
        self.file = os.fdopen(read_end, "rb")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(n=3, stop=["a", "b"], stop_token_ids=[1, 2], seed=2**63 - 1, max_tokens=None),
    ],
)
def test_a_command_arrives_unchanged(params: SamplingParams) -> None:
    commands = [Generate("7", [1, 2, 3], params, -4, "salt", "adapter", 1234.5), Abort("7"), AskStats("8")]
    pipe = _Pipe(b"".join(map(to_frame, commands)))
    assert [read_command(pipe.file) for _ in commands] == commands
    assert read_command(pipe.file) is None


def test_any_number_and_any_sequence_can_be_sent_over_the_pipe() -> None:
    odd = SamplingParams(temperature=np.float64(0.25), stop=("a", "b"), stop_token_ids=range(3))
    received = read_command(_Pipe(to_frame(Generate("7", [1], odd))).file)
    assert isinstance(received, Generate)
    assert received.params == SamplingParams(temperature=0.25, stop=["a", "b"], stop_token_ids=[0, 1, 2])


def test_an_event_arrives_unchanged_and_a_truncated_event_ends_the_stream() -> None:
    outputs = Outputs([SequenceOutput("7", 1, [5, 6], "stop", 6, None, 12.5, 1, 16), SequenceOutput("8", 0, [])])
    events = [READY, outputs, Refused("8", "QueueFullError", "full"), Failed("broken")]
    frames = b"".join(map(to_frame, events))
    pipe = _Pipe(frames)
    assert [read_event(pipe.file) for _ in events] == events
    for cut in (1, 4, 7):
        pipe = _Pipe(frames + to_frame(READY)[:cut])
        assert [read_event(pipe.file) for _ in events] == events
        assert read_event(pipe.file) is None


def test_output_printed_in_the_engine_process_does_not_disturb_its_messages() -> None:
    script = (
        "import os; from inflight.host.python_process import take_over_standard_streams as take\n"
        "incoming, outgoing = take(); print('printed', flush=True); os.system('echo echoed; cat')\n"
        "outgoing.write(incoming.read().upper())"
    )
    done = subprocess.run([sys.executable, "-c", script], input=b"message", capture_output=True)
    assert done.stdout == b"MESSAGE"
    assert done.stderr.split() == [b"printed", b"echoed"]


# --------------------------------------------------------------------------------------------------------- sessions


class ScriptedEngine:
    """A connection without an engine: the test decides what happens."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Event | None] = SimpleQueue()
        self.commands: SimpleQueue[Command] = SimpleQueue()

    def send(self, command: Command) -> None:
        self.commands.put(command)

    def listen(self, take: Callable[[Event], None]) -> None:
        while (event := self.events.get()) is not None:
            take(event)

    def close(self) -> None:
        self.events.put(None)

    def kill(self) -> None:
        self.events.put(None)

    def ending(self) -> str:
        return "was killed by SIGTEST"


class _Engines:
    """A client of such an engine, the engines that it started, and the delays before each start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, restart_delays: tuple[float, ...] = (0.0, 0.0)) -> None:
        self.started: list[ScriptedEngine] = []
        self.delays: list[float] = []
        engines = self

        class NoDelay(Session):
            def __init__(self, connect: Any, delay: float, *others: Any) -> None:
                engines.delays.append(delay)
                super().__init__(connect, 0.0, *others)

        monkeypatch.setattr("inflight.engine.client.Session", NoDelay)
        self.client = OneEngine(self._connect, restart_delays)

    def _connect(self) -> ScriptedEngine:
        self.started.append(ScriptedEngine())
        self.started[-1].events.put(READY)
        return self.started[-1]

    def session(self) -> Session:
        return self.client.start().result(60)

    def crash(self, *events: Event) -> None:
        """Make the running engine print something and die."""
        session = self.session()
        for event in events:
            self.started[-1].events.put(event)
        self.started[-1].events.put(None)
        session._thread.join(60)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> _Engines:
    return _Engines(monkeypatch)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine with a time limit."""

    async def limited() -> None:
        async with asyncio.timeout(120):
            await work

    asyncio.run(limited())


DONE = Outputs([SequenceOutput("0", 0, [1], "length")])


def test_concurrent_calls_start_one_engine(engines: _Engines) -> None:
    assert {engines.session() for _ in range(5)} == {engines.session()}
    assert len(engines.started) == 1
    assert engines.session().ready == READY


def test_every_waiting_caller_is_told_that_the_engine_died_and_the_next_call_restarts_it(engines: _Engines) -> None:
    async def check() -> None:
        session = engines.session()
        with session.mailbox() as one, session.mailbox() as other:
            engines.started[0].events.put(None)
            for mailbox in (one, other):
                with pytest.raises(EngineDeadError, match="the engine was killed by SIGTEST"):
                    await mailbox.read()
        with pytest.raises(EngineDeadError), session.mailbox():
            pass
        assert engines.session() is not session

    run(check())
    assert engines.client.num_crashes == 1


def test_an_engine_that_fails_reports_the_reason(engines: _Engines) -> None:
    async def check() -> None:
        with engines.session().mailbox() as mailbox:
            engines.started[0].events.put(Failed("KeyError(7)"))
            engines.started[0].events.put(None)
            with pytest.raises(EngineDeadError, match=r"SIGTEST: KeyError\(7\)"):
                await mailbox.read()

    run(check())


def test_an_engine_that_dies_three_times_in_a_row_is_not_restarted_until_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = _Engines(monkeypatch, restart_delays=(5_000.0, 10_000.0))
    for _ in range(3):
        engines.crash()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"died 3 times in a row; .* killed by SIGTEST"):
            engines.client.start()
    assert len(engines.started) == 3
    assert engines.delays == [0.0, pytest.approx(5_000, abs=1_000), pytest.approx(10_000, abs=1_000)]
    engines.client.stop()
    assert engines.session().ready == READY
    assert engines.delays[3:] == [0.0]


def test_a_request_that_succeeds_resets_the_crash_count(engines: _Engines) -> None:
    for _ in range(5):
        engines.crash()
        engines.crash(DONE)
    assert engines.client.num_crashes == 10


def test_an_abort_or_an_error_does_not_reset_the_crash_count(engines: _Engines) -> None:
    for reason in ("abort", "error", None):
        engines.crash(Outputs([SequenceOutput("0", 0, [1], reason)]))  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError):
        engines.client.start()


def test_stopping_is_not_a_crash_and_every_caller_is_told(engines: _Engines) -> None:
    async def check() -> None:
        with engines.session().mailbox() as mailbox:
            (stopped,) = engines.client.stop()
            with pytest.raises(EngineDeadError, match="was stopped"):
                await mailbox.read()
            stopped.join()

    run(check())
    assert engines.client.num_crashes == 0
    assert engines.client.stop() == []


def test_an_engine_can_be_stopped_before_it_starts() -> None:
    never = Session(ScriptedEngine, 1000.0, lambda *_: None)
    never.stop()
    never.join()
    with pytest.raises(EngineDeadError, match="was stopped"):
        never.started.result()
    loading = OneEngine(ScriptedEngine)
    started = loading.start()
    (session,) = loading.stop()
    session.join()
    with pytest.raises(EngineDeadError, match="was stopped"):
        started.result()


@pytest.mark.parametrize(
    ("events", "error", "sentence"),
    [
        ([Failed("no such model", is_model_error=True)], ModelError, "^no such model$"),
        ([Failed("MemoryError()")], EngineDeadError, r"MemoryError\(\)"),
        ([], EngineDeadError, "killed by SIGTEST"),
    ],
)
def test_an_engine_whose_model_cannot_be_loaded_reports_that(
    events: list[Event], error: type[Exception], sentence: str
) -> None:
    def connect() -> ScriptedEngine:
        engine = ScriptedEngine()
        for event in [*events, None]:
            engine.events.put(event)
        return engine

    client = OneEngine(connect, (0.0, 0.0))
    for _ in range(2):
        with pytest.raises(error, match=sentence):
            client.start().result(60)
    assert client.num_crashes == (0 if error is ModelError else 2)


def test_an_engine_that_cannot_be_started_reports_that() -> None:
    def connect() -> ScriptedEngine:
        raise OSError("no more processes")

    with pytest.raises(EngineDeadError, match="no more processes"):
        OneEngine(connect).start().result(60)


def test_a_caller_that_stops_waiting_for_the_start_does_not_cancel_it_for_others() -> None:
    engine = ScriptedEngine()
    client = OneEngine(lambda: engine)

    async def check() -> None:
        waiting = [asyncio.ensure_future(asyncio.wrap_future(client.start())) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        engine.events.put(READY)
        assert (await waiting[1]).ready == READY

    run(check())


def test_each_step_wakes_an_event_loop_once_and_a_reader_gets_everything_that_arrived(
    engines: _Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        session = engines.session()
        loop, wakes = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *args: Any, **options: Any) -> asyncio.Handle:
            wakes.append(callback)
            return call(callback, *args, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        with session.mailbox() as one, session.mailbox() as other:
            for step in range(3):
                outputs = [SequenceOutput(mailbox.address, 0, [step]) for mailbox in (one, other)]
                engines.started[0].events.put(Outputs(outputs))
            engines.started[0].events.put(Refused(other.address, "QueueFullError", "full"))
            with pytest.raises(QueueFullError, match="full"):  # noqa: PT012
                while True:
                    await other.read()
            assert [output.new_token_ids for output in await one.read()] == [[0], [1], [2]]
        assert len(wakes) == 4

    run(check())


def test_a_request_of_a_closed_event_loop_is_aborted(engines: _Engines) -> None:
    session = engines.session()
    loop = asyncio.new_event_loop()

    async def leave() -> str:
        mailbox = session.mailbox()
        leftovers.append(mailbox)
        return mailbox.__enter__().address

    leftovers: list[Any] = []
    address = loop.run_until_complete(leave())
    loop.close()
    engines.started[0].events.put(Outputs([SequenceOutput(address, 0, [1])]))
    assert engines.started[0].commands.get(timeout=60) == Abort(address)

    async def others() -> None:
        with session.mailbox() as mailbox:
            engines.started[0].events.put(Outputs([SequenceOutput(mailbox.address, 0, [2])]))
            assert [output.new_token_ids for output in await mailbox.read()] == [[2]]

    run(others())


# -------------------------------------------------------------------------------------------------------- the loop


def test_a_burst_of_commands_is_obeyed_between_several_steps() -> None:
    commands: Commands = SimpleQueue()
    for number in range(3 * MOST_AT_ONCE):
        commands.put(Generate(str(number), [5, 6, 7], SamplingParams(temperature=0, max_tokens=2)))
    commands.put(None)
    num_waiting: list[int] = []

    def send(event: Event) -> None:
        if isinstance(event, Outputs):
            num_waiting.append(commands.qsize())

    assert serve(lambda: Engine(DEMO_MODEL, EngineConfig(), None), commands, send)
    assert num_waiting[0] == 2 * MOST_AT_ONCE + 1


# --------------------------------------------------------------------------------------------------------- processes


def test_a_process_has_its_own_session_and_ends_when_told_to() -> None:
    connection = ProcessConnection(Load(str(DEMO_MODEL), None, EngineConfig()))
    assert os.getsid(connection.pid) == connection.pid
    connection.close()
    connection.listen(print)
    assert connection.ending() == "ended with exit code 0"
    connection.send(Abort("7"))  # this raises nothing


def test_a_killed_process_reports_the_signal() -> None:
    connection = ProcessConnection(Load(str(DEMO_MODEL), None, EngineConfig()))
    os.kill(connection.pid, signal.SIGSEGV)
    connection.listen(print)
    assert connection.ending() == "was killed by SIGSEGV"


CALLER = """
import asyncio, os, sys
from inflight import AsyncLLM, SamplingParams

async def main():
    async for output in AsyncLLM().generate("Once", SamplingParams(max_tokens=500, ignore_eos=True)):
        os.write(1, b"x")
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.thorough
def test_the_engine_ends_when_its_caller_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    caller = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert caller.stdout is not None
    assert caller.stdout.read(1) == b"x"  # the engine is in the middle of the request
    caller.kill()
    caller.communicate(timeout=60)  # until no process has standard error open: the engine has inherited it
    assert caller.returncode == -signal.SIGKILL

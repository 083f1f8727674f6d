"""`run_pooling`: runs an engine that pools by messages, as `loop` does one that generates."""

import queue
import time
from collections.abc import Callable, Iterator

from inflight.contracts.errors import InvalidRequestError, QueueFullError
from inflight.contracts.live import LiveState
from inflight.engine.pooling import PoolingEngine
from inflight.engine.process.protocol import (
    Abort,
    AskLive,
    AskStats,
    CloseAdapter,
    Command,
    Commands,
    Event,
    Generate,
    GenerateMany,
    Live,
    OpenAdapter,
    Pool,
    Pooled,
    Refused,
    Stats,
)
from inflight.machine import resident_bytes

MOST_AT_ONCE = 64
"""Most commands that are obeyed between two steps."""


def run_pooling(engine: PoolingEngine, commands: Commands, send: Callable[[Event], None]) -> None:
    """Step and obey commands until None comes."""
    while True:
        for command in _arrived(engine, commands):
            if command is None:
                return
            _obey(engine, command, send)
        for request_id in engine.step():
            if (ended := engine.take(request_id)) is not None:
                send(Pooled(request_id, [values.tobytes() for values in ended.values], ended.error))


def _arrived(engine: PoolingEngine, commands: Commands) -> Iterator[Command | Callable[[], None] | None]:
    """The first commands of those that have come; while there is nothing to compute, also those that will come."""
    try:
        for _ in range(MOST_AT_ONCE):
            yield commands.get(block=not engine.has_unfinished_requests)
    except queue.Empty:
        return


def _obey(engine: PoolingEngine, command: Command | Callable[[], None], send: Callable[[Event], None]) -> None:
    match command:
        case Pool():
            try:
                engine.submit(command.request_id, command.texts)
            except (InvalidRequestError, QueueFullError) as error:
                send(Refused(command.request_id, type(error).__name__, str(error)))
        case GenerateMany():
            for each in command.requests:
                _obey(engine, each, send)
        case Generate() | OpenAdapter():
            send(Refused(command.request_id, InvalidRequestError.__name__, "this model does not generate text"))
        case Abort():
            engine.abort(command.request_id)
        case AskStats():
            send(Stats(command.request_id, engine.stats()))
        case AskLive():
            state = LiveState(time.monotonic(), engine.stats(), (), (), resident_bytes=resident_bytes())
            send(Live(command.request_id, state))
        case CloseAdapter():
            pass  # it has none
        case _:
            command()

"""`serve`: an engine run by messages. Between steps it takes in whatever commands have come; idle, it waits for one.

Runs in a process of its own or in a thread, and does not know which.
"""

import logging
import queue
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from inflight.engine import Engine
from inflight.engine_process.messages import (
    Abort,
    AskStats,
    Command,
    Event,
    Failed,
    Generate,
    Outputs,
    Ready,
    Refused,
    Stats,
)
from inflight.errors import InvalidRequestError, ModelError, QueueFullError
from inflight.outputs import SequenceOutput
from inflight.scheduling.prefill_limit import PrefillLimit

logger = logging.getLogger(__name__)


def serve(load: Callable[[], Engine], commands: "SimpleQueue[Command | None]", send: Callable[[Event], None]) -> bool:
    """Make an engine and run it until None comes. Whether all went well; what went wrong is the last event."""
    try:
        engine = load()
        send(Ready(engine.model_info, engine.default_sampling_params()))
        _Loop(engine, commands, send).run()
    except ModelError as error:
        send(Failed(str(error), is_model_error=True))
        return False
    except Exception as error:
        logger.exception("the engine broke")
        send(Failed(repr(error)))
        return False
    return True


class _Loop:
    def __init__(self, engine: Engine, commands: "SimpleQueue[Command | None]", send: Callable[[Event], None]) -> None:
        self.engine = engine
        self.commands = commands
        self.send = send
        engine.prefill_limit = PrefillLimit()  # somebody waits for every token

    def run(self) -> None:
        """Step and obey until None comes."""
        while True:
            for command in self._arrived():
                if command is None:
                    return
                self._obey(command)
            self._tell(self.engine.step())

    def _arrived(self) -> Iterator[Command | None]:
        """The commands that have come; as long as there is nothing to compute, those to come."""
        try:
            while True:
                yield self.commands.get(block=not self.engine.has_unfinished_requests)
        except queue.Empty:
            return

    def _obey(self, command: Command) -> None:
        match command:
            case Generate():
                self._submit(command)
            case Abort():
                self._tell(self.engine.abort(command.request_id))
            case AskStats():
                self.send(Stats(command.request_id, self.engine.stats()))

    def _submit(self, asked: Generate) -> None:
        try:
            accepted = self.engine.accept(
                asked.request_id,
                asked.prompt_token_ids,
                asked.params,
                priority=asked.priority,
                cache_salt=asked.cache_salt,
                deadline=asked.deadline,
            )
            self.engine.submit(accepted)
        except (InvalidRequestError, QueueFullError) as error:
            self.send(Refused(asked.request_id, type(error).__name__, str(error)))
        except Exception as error:  # what one request made go wrong ends nobody else's
            logger.exception("a request could not be looked at")
            reason = f"the request can not be run: {error!r}"
            self.send(Refused(asked.request_id, InvalidRequestError.__name__, reason))

    def _tell(self, outputs: list[SequenceOutput]) -> None:
        if outputs:
            self.send(Outputs(outputs))

"""`serve`: runs an engine by messages. It executes commands between steps; when idle, it waits for one.

Runs in a process of its own or in a thread, and does not know which. Other threads compile requests.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

from inflight.contracts.api.errors import InvalidRequestError, ModelError, QueueFullError
from inflight.contracts.api.outputs import SequenceOutput
from inflight.contracts.api.watching import Watching
from inflight.engine.admission import AcceptedRequest
from inflight.engine.engine import Engine
from inflight.engine.live_feed import LiveFeed
from inflight.engine.process.protocol import (
    Abort,
    AskLive,
    AskStats,
    CloseAdapter,
    Command,
    Commands,
    Done,
    Event,
    Failed,
    Generate,
    GenerateMany,
    Live,
    OpenAdapter,
    Outputs,
    PinPrefix,
    Ready,
    Refused,
    SavePrefixes,
    Stats,
)
from inflight.engine.step_feedback import PrefillLimit

logger = logging.getLogger(__name__)

NUM_COMPILING = 2
"""The number of grammars that are compiled in parallel."""

MOST_AT_ONCE = 64
"""Most commands executed between two steps: a large request takes a millisecond, and streams wait."""


def serve(
    load: Callable[[], Engine],
    commands: Commands,
    send: Callable[[Event], None],
    watching: Watching | None = None,
    *,
    is_offline: bool = False,
) -> bool:
    """Make an engine and run it until the command None. Returns whether it succeeded; if not, the last event has the
    error.

    Args:
        is_offline: callers wait for whole outputs, not for tokens: prefill is unbounded, and requests are compiled and
            queued in the order of their arrival.
        watching: observers of its steps; None: none.
    """
    try:
        engine = load()
        with ExitStack() as stack:
            tell_watchers = _watched(engine, watching or Watching(), stack)
            send(Ready(engine.model_info, engine.default_sampling_params()))
            if not is_offline:
                engine.feedback.prefill_limit = PrefillLimit()
            _Loop(engine, commands, send, tell_watchers, compiles_beside=not is_offline).run()
    except ModelError as error:
        send(Failed(str(error), is_model_error=True))
        return False
    except Exception as error:
        logger.exception("the engine broke")
        send(Failed(repr(error)))
        return False
    return True


def _watched(engine: Engine, watching: Watching, stack: ExitStack) -> Callable[[], None]:
    """Attach observers until the stack ends. Returns a function to call after each step."""
    if watching.record_to is not None:
        from inflight.observe.recorder import RotatingRecorder

        recorder = RotatingRecorder(watching.record_to, engine.config, engine.model_info)
        engine.observer = stack.enter_context(closing(recorder)).observe
    if watching.kv_events is None:
        return lambda: None
    from inflight.engine.cache_events import CacheEvents
    from inflight.engine.event_publisher import EventPublisher

    events = CacheEvents(engine.scheduler.block_pool)
    publisher = stack.enter_context(closing(EventPublisher(watching.kv_events, engine.config.kv_cache.block_size)))
    return lambda: publisher.publish(events.take())


class _Loop:
    def __init__(
        self,
        engine: Engine,
        commands: Commands,
        send: Callable[[Event], None],
        tell_watchers: Callable[[], None],
        *,
        compiles_beside: bool,
    ) -> None:
        self.engine = engine
        self.commands = commands
        self.send = send
        self._tell_watchers = tell_watchers
        self._compiles_beside = compiles_beside
        self._feed = LiveFeed(engine)
        engine.when_lost(lambda error: commands.put(lambda: _raise(error)))
        self._pool = ThreadPoolExecutor(NUM_COMPILING, "inflight: compiling")
        self._compiling: set[str] = set()

    def run(self) -> None:
        """Step and execute commands until None."""
        try:
            while True:
                for command in self._arrived():
                    if command is None:
                        return
                    self._execute(command)
                self._tell(self.engine.step())
                self._tell_watchers()
        finally:
            self._feed.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _arrived(self) -> Iterator[Command | Callable[[], None] | None]:
        """The next queued commands; when idle, wait for one."""
        try:
            for _ in range(MOST_AT_ONCE):
                seconds = self.engine.idle_seconds
                yield self.commands.get(block=seconds != 0, timeout=seconds)
        except queue.Empty:
            return

    def _execute(self, command: Command | Callable[[], None]) -> None:
        match command:
            case Generate():
                self._try_to(command.request_id, lambda: self._take_in(command))
            case GenerateMany():
                for each in command.requests:
                    self._execute(each)
            case Abort():
                self._compiling.discard(command.request_id)
                self._tell(self.engine.abort(command.request_id))
            case AskStats():
                self.send(Stats(command.request_id, self.engine.stats()))
            case AskLive():
                self.send(Live(command.request_id, self._feed.look(command.record_to)))
            case OpenAdapter():
                self._do_beside(command.request_id, lambda: self.engine.inputs.adapters.open(command.source))
            case SavePrefixes():
                self._do_beside(command.request_id, lambda: self.engine.save_prefixes(threading.TIMEOUT_MAX))
            case PinPrefix():
                named = command.cache_salt, command.adapter_source
                self._do_beside(command.request_id, lambda: self.engine.pin_prefix(command.token_ids, *named))
            case CloseAdapter():
                self._try_to("", lambda: self.engine.inputs.adapters.close(command.source))
            case _:
                command()

    def _do_beside(self, request_id: str, work: Callable[[], object]) -> None:
        """Run a slow function in another thread, and answer with `Done` or its error."""
        working = self._pool.submit(work)
        working.add_done_callback(lambda _: self.commands.put(lambda: self._tell_done(request_id, working)))

    def _tell_done(self, request_id: str, done: "Future[object]") -> None:
        error = done.exception()
        if error is None:
            self.send(Done(request_id))
            return
        known = (type(error) if isinstance(error, InvalidRequestError) else None, OSError, ValueError)
        kind = next((each for each in known if each is not None and isinstance(error, each)), InvalidRequestError)
        self.send(Refused(request_id, kind.__name__, str(error)))

    def _take_in(self, asked: Generate) -> None:
        """Submit a request, after compiling it in another thread if that is slow (`InputProcessor.compile`)."""
        engine, request_id = self.engine, asked.request_id
        accepted = engine.inputs.accept(
            request_id,
            asked.prompt_token_ids,
            asked.params,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            adapter_source=asked.adapter_source,
            deadline=asked.deadline,
            text=asked.text,
            multimodal=asked.multimodal,
        )
        if accepted.is_compiled or not self._compiles_beside:
            engine.submit(accepted)
            return
        engine.check_room(accepted)
        self._compiling.add(request_id)
        compiled = self._pool.submit(engine.inputs.compile, accepted)
        compiled.add_done_callback(lambda _: self.commands.put(lambda: self._submit_compiled(request_id, compiled)))

    def _submit_compiled(self, request_id: str, compiled: "Future[AcceptedRequest]") -> None:
        if request_id in self._compiling:  # otherwise it was aborted meanwhile
            self._compiling.remove(request_id)
            self._try_to(request_id, lambda: self.engine.submit(compiled.result()))

    def _try_to(self, request_id: str, take_in: Callable[[], None]) -> None:
        """Accept or refuse a request. A failing request ends no other."""
        try:
            take_in()
        except (InvalidRequestError, QueueFullError) as error:
            self.send(Refused(request_id, type(error).__name__, str(error)))
        except Exception as error:
            logger.exception("a request could not be examined")
            self.send(Refused(request_id, InvalidRequestError.__name__, f"the request cannot be run: {error!r}"))

    def _tell(self, outputs: list[SequenceOutput]) -> None:
        if outputs:
            self.send(Outputs(outputs))


def _raise(error: Exception) -> None:
    raise error

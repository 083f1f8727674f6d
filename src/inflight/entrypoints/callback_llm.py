"""`CallbackLLM`: the front for concurrent callers without asyncio. It calls a function with each delta of a stream.

It is an `AsyncLLM` whose event loop runs in its own thread, which calls the functions one after another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from inflight.contracts.api.errors import EngineDeadError
from inflight.contracts.api.outputs import RequestMetrics, RequestOutput, TextDelta
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.record import EngineStats
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.entrypoints.inputs import Prompt

if TYPE_CHECKING:
    from inflight.execution.hf.load import ModelSource
    from inflight.text.tokenizer_files import TokenizerSource

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnToken = Callable[[TextDelta], object]


class CallbackLLM:
    """A model that generates for many concurrent callers, and calls them back.

    Arguments and errors are those of `AsyncLLM`. Thread-safe, but `start`, `stop` and `stats` block and must not be
    called from a callback.
    """

    def __init__(
        self, model: ModelSource | None = None, tokenizer: TokenizerSource | None = None, **options: Any
    ) -> None:
        self._llm = AsyncLLM(model, tokenizer, **options)
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def start(self) -> None:
        """Start the engine, and wait until it is loaded. Raises `ModelError`, `EngineDeadError`."""
        if self._loop is None:
            self._is_stopping = False
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="inflight: callbacks", daemon=True)
            self._thread.start()
        self._wait(self._llm.start())

    def stop(self) -> None:
        """Stop the engine, and wait until every unfinished request has had its last call."""
        if self._loop is None or self._thread is None:
            return
        self._wait(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def stats(self) -> EngineStats:
        """The engine's totals and current state."""
        return self._wait(self._llm.stats())

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_token: OnToken,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Queue a request, and return its id at once.

        Args:
            on_token: called with each delta. Only the last call has `output` set; its sequences say why they ended. If
                the request was refused or the engine died, `output` has no sequences, and `error` says why. The
                function should be quick: it delays others. If it raises, the error is logged and the request aborted.
            prompt, sampling_params, request_id, priority, cache_salt, adapter, timeout: as for `AsyncLLM.generate`.
        """
        request_id = f"submitted-{next(self._numbers)}" if request_id is None else request_id
        deltas = self._llm.stream(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            timeout=timeout,
        )
        loop = self._running()
        loop.call_soon_threadsafe(self._follow_in_task, request_id, deltas, on_token)
        return request_id

    def cancel(self, request_id: str) -> None:
        """End a request; its last call then says "abort". Does nothing if it has ended."""
        asyncio.run_coroutine_threadsafe(self._llm.abort(request_id), self._running())

    # ------------------------------------------------------------------------------------- in the loop's thread

    def _follow_in_task(self, request_id: str, deltas: AsyncGenerator[TextDelta, None], on_token: OnToken) -> None:
        task = asyncio.ensure_future(self._follow(request_id, deltas, on_token))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, request_id: str, deltas: AsyncGenerator[TextDelta, None], on_token: OnToken) -> None:
        try:
            if self._is_stopping:
                raise EngineDeadError("the engine was stopped")
            async with aclosing(deltas):
                async for delta in deltas:
                    if not _call(on_token, delta):
                        return
        except Exception as error:
            _call(on_token, _last_delta(request_id, error))

    async def _stop(self) -> None:
        self._is_stopping = True
        await self._llm.stop()
        await asyncio.gather(*self._tasks)

    # ------------------------------------------------------------------------------------- in the caller's thread

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("CallbackLLM is not running; call start() first")
        return self._loop

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("start(), stop() and stats() would block all callbacks; call them from another thread")
        return asyncio.run_coroutine_threadsafe(work, self._running()).result()


def _call(on_token: OnToken, delta: TextDelta) -> bool:
    try:
        on_token(delta)
    except Exception:
        logger.exception("a callback failed; its request is aborted")
        return False
    return True


def _last_delta(request_id: str, error: Exception) -> TextDelta:
    metrics = RequestMetrics(arrival_time=time.monotonic())
    output = RequestOutput(request_id, None, [], [], metrics, finished=True, error=str(error) or repr(error))
    return TextDelta(prompt_index=0, index=0, text="", token_ids=[], finish_reason="error", output=output)

"""`AsyncLLM`: the front for servers. Concurrent streams, in one event loop or several.

Decides how a request is followed: its text is made here, in the caller's process, when the reader is ready for more, so
a slow reader gets more at once. The engine runs in a process of its own, or in a thread; `EngineClient` starts it.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from inflight.contracts.api.config import BACKGROUND, front_options
from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.model_info import ModelInfo, refusal_to_generate
from inflight.contracts.api.options import Seconds, check, refuse_unknown_options
from inflight.contracts.api.outputs import RequestOutput, SequenceOutput, TextDelta, merged
from inflight.contracts.api.params import DEFAULT_PARAMS, SamplingParams
from inflight.contracts.api.pooling import PooledText, Values
from inflight.contracts.api.watching import Watching
from inflight.contracts.step.block_hash import Root
from inflight.contracts.step.live import LiveState
from inflight.contracts.step.record import EngineStats, RecordTo, sum_of
from inflight.engine.admission import Seeds, make_request
from inflight.engine.client import engine_in_thread
from inflight.engine.fleet import engines_in_processes
from inflight.engine.process.protocol import Abort, AskStats, Generate, Ready
from inflight.engine.process.session import Session
from inflight.engine.replicas.launch import check_replicas, load_of
from inflight.engine.replicas.live_states import RequestNames, live_states, recording_of
from inflight.entrypoints.adapter_names import AdapterNames
from inflight.entrypoints.inputs import (
    TEMPLATE_OPTIONS,
    Prompt,
    ReadPrompt,
    check_chat,
    default_params,
    model_source,
    read_prompt,
)
from inflight.entrypoints.pooling_calls import AsyncPoolingCalls
from inflight.entrypoints.pooling_requests import Output, PoolingRequest
from inflight.host.garbage_collection import call_after
from inflight.text.collector import Collector
from inflight.text.tokenizer import Tokenizer
from inflight.text.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    from inflight.engine.engine import Engine
    from inflight.execution.hf.load import ModelSource
    from inflight.text.tokenizer_files import TokenizerSource


class AsyncLLM(AsyncPoolingCalls):
    """A model that generates for many concurrent callers, one stream each, or pools their texts (`embed`, `classify`,
    `score`), as its checkpoint says; the option `task` overrides that.

    The engine starts with the first call, or with `start()` (`async with` calls that, and `stop()`). If it dies, all
    waiting calls raise `EngineDeadError`, and the next call restarts it.

    Args:
        model: a hub id, a local folder or a GGUF file; None is the small embedded model.
        tokenizer: a hub id or a folder; None: the one in the model's folder or repository.
        options: the fields of `FleetConfig`, such as `replicas`, and of `EngineConfig`, such as `dtype`.

    Attributes:
        config: the options, defaults included.
        num_replicas: number of engines.
        adapters: the folder or hub repository of each adapter, by its name.

    Raises:
        ModelError: the model does not exist, or its tokenizer cannot be loaded (a `ValueError`). Other faults of the
            model are raised when the engine starts.
        ValueError: an option is unknown or out of range.
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        tokenizer: TokenizerSource | None = None,
        **options: Any,
    ) -> None:
        fleet, config = front_options(options, "AsyncLLM")
        source = model_source(model)
        num_replicas = check_replicas(fleet.replicas, config.tensor_parallel_size)
        if fleet.in_process and num_replicas > 1:
            raise ValueError(f"replicas is {fleet.replicas!r}, but with in_process=True there is only this process")
        watching = Watching(record_to=fleet.record_to, kv_events=fleet.kv_events)
        self.config = config

        def make() -> Engine:
            from inflight.engine.engine import Engine  # with torch, which an engine's process alone needs

            return Engine(source, config, loaded)

        if fleet.in_process:
            self._client = engine_in_thread(make, watching, fleet.restart_delays)
        else:
            load = load_of(source, tokenizer, config, watching)
            self._client = engines_in_processes(load, num_replicas, fleet)
        self.num_replicas = num_replicas
        if fleet.starts_at_once and not fleet.in_process:
            self._client.start()
        try:
            if isinstance(source, str):
                from inflight.execution.hf.source import check_source  # with transformers

                check_source(source, config)
            loaded = self.tokenizer = load_tokenizer(source, tokenizer, config)
        except BaseException:
            self._client.stop()
            raise
        self._ready: Ready | None = None
        self._calls: dict[str, _Call] = {}
        self._names = RequestNames()
        self._numbers = count()
        self._seeds = Seeds(config.seed)
        self.adapters = AdapterNames(config)
        call_after(self, self._client.stop)  # the engine must not outlive its front

    # ------------------------------------------------------------------------------------- the engine

    async def start(self) -> None:
        """Start the engine if it is not running, and wait until it (or the first replica) is loaded. Raises
        `ModelError`, `EngineDeadError`."""
        await self._session()

    async def stop(self) -> None:
        """Stop the engine and wait for its end. Unfinished requests raise `EngineDeadError`."""
        for session in self._client.stop():
            await asyncio.to_thread(session.join)

    async def reload_weights(self) -> None:
        """Reload the model from its folder without refusing requests: a new engine starts beside each old one, in turn;
        once loaded, it takes new requests, and the old one ends with its last. Both are in memory meanwhile. Tokenizer
        and options do not change.

        Raises:
            ModelError, EngineDeadError: the model cannot be loaded; engines not yet replaced stay.
        """
        for replaced in self._client.replace():
            old = await asyncio.wrap_future(replaced)
            if old is not None:
                await asyncio.to_thread(old.join)
        await self._session()

    async def load_adapter(self, name: str, source: str) -> None:
        """Load a LoRA adapter under this name.

        Args:
            source: a folder or a hub repository, as PEFT writes it.

        Raises:
            AdapterError: the name is taken, the adapter does not fit the model, or there was no option `adapters`.
            EngineDeadError: the engine died.
        """
        full = self.adapters.check_new(name, source)
        await self._session()
        for opened in self._client.open_adapter(full):
            await asyncio.wrap_future(opened)
        self.adapters.check_new(name, source)  # another call may have been first
        self.adapters.add(name, full)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running requests keep it. Raises `AdapterError` if the name is unknown."""
        self._client.close_adapter(self.adapters.remove(name))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stats(self) -> EngineStats:
        """The engine's totals and current state, summed over replicas. Waits for the running step."""
        session = await self._session()
        each = [stats for stats in (await self.replica_stats()).values() if stats is not None]
        return replace(sum_of(each or [await _stats_of(session)]), num_crashes=self.num_crashes)

    async def replica_stats(self, seconds: float | None = None) -> dict[int, EngineStats | None]:
        """The same for each running engine, by its number from 0. Starts none.

        Args:
            seconds: how long to wait; an engine that does not answer in time gets None.
        """
        asked = {
            number: asyncio.ensure_future(asyncio.wait_for(_stats_of(session), seconds))
            for number, session in self._client.sessions().items()
        }
        if asked:
            await asyncio.wait(asked.values())
        of_number: dict[int, EngineStats | None] = {}
        for number, answer in asked.items():
            match answer.exception():
                case None:
                    of_number[number] = replace(answer.result(), num_crashes=self._client.num_crashes_of(number))
                case TimeoutError():
                    of_number[number] = None
        return of_number

    async def watch(
        self, interval: float = 0.1, record_to: RecordTo | None = None
    ) -> AsyncGenerator[dict[int, LiveState], None]:
        """Poll each running engine, by its number from 0, without an end. Starts none.

        Unwatched engines make no records; a snapshot of 32 sequences takes a third of a millisecond. An engine is left
        out while in a step of more than a second.

        Args:
            interval: seconds between polls.
            record_to: where to record steps while this runs; see the constructor.
        """
        check("interval", interval, Seconds)

        def recording(number: int) -> RecordTo | None:
            return None if record_to is None else recording_of(record_to, number, self.num_replicas)

        async with aclosing(live_states(self._client.sessions, self._names, interval, recording)) as states:
            async for state in states:
                yield state

    def is_ready(self) -> bool:
        """Whether the engine, or a replica, is loaded and running. Starts it if not, without waiting.

        Raises `EngineGivenUpError` if it has died too often, `ModelError` if its model cannot be loaded."""
        started = self._client.start()
        if started.done():
            started.result()
        return started.done()

    @property
    def num_crashes(self) -> int:
        """Number of crashes."""
        return self._client.num_crashes

    async def check_health(self) -> None:
        """Return once the engine has answered. Raises `EngineDeadError` if it cannot be started."""
        await self.stats()

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the model found at load, and how it runs. Available after the first start."""
        return self._known().model_info

    def get_default_sampling_params(self) -> SamplingParams:
        """Default parameters: the model's `generation_config`, else `SamplingParams()`. Available after the first
        start."""
        return self._known().default_params

    # ------------------------------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt. Yields the whole output so far, each time it grows.

        Leaving the loop, or cancelling the task that runs it, aborts the request.

        Args:
            prompt: text, token ids, or a dict with "prompt", "prompt_token_ids" or "messages" (and "cache_salt").
            sampling_params: None: the model's defaults; for a chat, without a token limit.
            request_id: its name for `abort`; None: a unique one.
            priority: lower runs first (if `policy="priority"`).
            cache_salt: only requests of the same salt share cached prefixes.
            adapter: the name of an adapter (`adapters`); None: the base model.
            timeout: seconds after which it is aborted if unfinished.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid, the `request_id` is in use, or the adapter is
                unknown.
            QueueFullError: too many wait (`max_num_waiting`).
            EngineDeadError: the engine died.
        """
        follow = self._follow(prompt, sampling_params, request_id, priority, cache_salt, adapter, timeout)
        async with aclosing(follow) as updates:
            async for collector, _ in updates:
                yield collector.snapshot()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """Like `generate`, with its arguments and errors, but yields deltas; the last one has the whole output."""
        follow = self._follow(prompt, sampling_params, request_id, priority, cache_salt, adapter, timeout)
        async with aclosing(follow) as updates:
            async for _, deltas in updates:
                for delta in deltas:
                    yield delta

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `generate`, for a chat, rendered by the tokenizer's chat template.

        Args:
            messages: dicts with "role" and "content".
            template_options: `chat_template` (Jinja, instead of the tokenizer's), `tools` (JSON schemas),
                `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs` (variables of the template).
        """
        refuse_unknown_options(template_options, TEMPLATE_OPTIONS, "AsyncLLM.chat")
        check_chat(messages)
        prompt = {"messages": messages, **template_options}
        return self.generate(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            timeout=timeout,
        )

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with `finish_reason="abort"`. Does nothing if it is unknown."""
        call = self._calls.get(request_id)
        if call is not None:
            call.abort()

    async def _follow(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        adapter: str | None,
        timeout: float | None,
    ) -> AsyncGenerator[tuple[Collector, list[TextDelta]], None]:
        """Follow one request to its end. Yields its collector and what is new, each time that there is more."""
        check("timeout", timeout, Seconds | None)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._call(request_id) as call:
            ready = (await self._session()).ready
            if ready.model_info.pooling is not None:
                raise refusal_to_generate(ready.model_info)
            text, token_ids, salt, multimodal = await _read(prompt, self.tokenizer)
            params = default_params(prompt, ready.default_params) if params is None else params
            if not isinstance(params, SamplingParams):
                raise InvalidRequestError(f"sampling_params is {params!r}; it must be SamplingParams")
            salt = salt if cache_salt is None else cache_salt
            source = None if adapter is None else self.adapters.source_of(adapter)
            info = ready.model_info
            request = make_request(
                call.request_id, token_ids, params, info, priority=priority, cache_salt=salt, multimodal=multimodal
            )
            checked = list(request.prompt_token_ids)
            collector = Collector(call.request_id, text, checked, params, self.tokenizer)
            if self.num_replicas > 1 and params.seed is None:  # all engines would begin with the same seed
                params = replace(params, seed=self._seeds.next())
            await self._session()  # the engine may have died meanwhile
            is_background = request.priority == BACKGROUND
            root = Root(salt, adapter=source)
            with self._client.deliver(checked, root, params.n, in_background=is_background) as mailbox:
                session, address = mailbox.session, mailbox.address
                session.send(
                    Generate(address, checked, params, request.priority, salt, source, deadline, None, multimodal)
                )
                call.reach(session, address)
                try:
                    with self._names.named(session, address, call.request_id):
                        while not collector.output.finished:
                            outputs = _merged(await mailbox.read())
                            mailbox.begin()
                            yield collector, await _taken_in(collector, outputs)
                finally:
                    if not collector.output.finished:
                        call.abort()
                    if self.num_replicas > 1 and collector.output.outputs:
                        mailbox.token_ids = [*checked, *collector.output.outputs[0].token_ids]

    async def _loaded_info(self) -> ModelInfo:
        return (await self._session()).ready.model_info

    async def _pool(self, request: PoolingRequest[Output]) -> list[Output]:
        """Run a pooling request to its end. Cancelling this aborts it. At most about two steps' worth of its texts are
        at the engine at a time, so that other callers' texts are interleaved."""
        await self._session()
        num_tokens = sum(len(text.token_ids) for text in request.texts)
        most = 2 * self.config.scheduling.max_num_batched_tokens * len(request.texts) // max(1, num_tokens)
        places = asyncio.Semaphore(max(1, min(most, self.config.scheduling.max_num_waiting or most)))
        running = [asyncio.ensure_future(self._values_of(text, places)) for text in request.texts]
        try:
            return request.finish(await asyncio.gather(*running))
        finally:
            for each in running:
                each.cancel()

    async def _values_of(self, text: PooledText, places: asyncio.Semaphore) -> Values:
        """The numbers of one text, run when there is room."""
        async with places:
            await self._session()
            with self._client.deliver(text.token_ids, Root()) as mailbox:
                session, address = mailbox.session, mailbox.address
                session.send(Generate(address, text.token_ids, DEFAULT_PARAMS, text=text))
                output: SequenceOutput | None = None
                try:
                    output = (await mailbox.read())[0]
                    mailbox.begin()
                finally:
                    if output is None:
                        session.send(Abort(address))
        if output.error is not None:
            raise RuntimeError(f"the texts could not be run: {output.error}")
        return array("f", output.values or b"")

    @contextmanager
    def _call(self, request_id: str | None) -> Iterator[_Call]:
        """Make a request abortable by its id until the block ends."""
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        if request_id in self._calls:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by an unfinished request")
        call = self._calls[request_id] = _Call(request_id)
        try:
            yield call
        finally:
            del self._calls[request_id]

    async def _session(self) -> Session:
        """A running engine, started if necessary."""
        started = self._client.start()
        session = started.result() if started.done() else await asyncio.wrap_future(started)
        self._ready = session.ready
        return session

    def _known(self) -> Ready:
        if self._ready is None:
            raise RuntimeError("the model is not loaded yet; await start() first")
        return self._ready


class _Call:
    """A caller's request, and where it runs."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._is_aborted = False
        self._session: Session | None = None
        self._address = ""

    def reach(self, session: Session, address: str) -> None:
        """Note the engine that the request was sent to; if already aborted, abort it there."""
        self._session, self._address = session, address
        if self._is_aborted:
            self.abort()

    def abort(self) -> None:
        """Abort the request, now or once it runs."""
        self._is_aborted = True
        if self._session is not None:
            self._session.send(Abort(self._address))


async def _stats_of(session: Session) -> EngineStats:
    stats: EngineStats = await asyncio.wrap_future(session.ask(AskStats))
    return stats


async def _read(prompt: Prompt, tokenizer: Tokenizer | None) -> ReadPrompt:
    """`read_prompt`; tokenizes outside the event loop, because the text may be long."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        return read_prompt(prompt, tokenizer)
    return await asyncio.get_running_loop().run_in_executor(_beside, read_prompt, prompt, tokenizer)


def _merged(outputs: list[SequenceOutput]) -> list[SequenceOutput]:
    """Merge the outputs of several steps: one for each sequence."""
    if len(outputs) == 1:
        return outputs
    of_index: dict[int, list[SequenceOutput]] = {}
    for each in outputs:
        of_index.setdefault(each.index, []).append(each)
    return [merged(parts) for parts in of_index.values()]


async def _taken_in(collector: Collector, outputs: list[SequenceOutput]) -> list[TextDelta]:
    """Add outputs to a collector; a prompt's many log-probabilities outside the event loop."""

    def take_in() -> list[TextDelta]:
        return [collector.take_in(each) for each in outputs]

    if not any(each.prompt_scores for each in outputs):
        return take_in()
    return await asyncio.get_running_loop().run_in_executor(_beside, take_in)


_beside = ThreadPoolExecutor(1, "inflight: beside the event loop")

"""`LLM`: the offline front. Prompts in, texts out; the calling thread waits.

The engine runs in a thread of this process, or, with replicas or ranks, in processes; calls of several threads, and
open streams, run in one batch there. An interrupted caller's requests are aborted; nothing else is affected.
"""

import os
import threading
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from numbers import Integral
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from inflight.contracts.api.config import FleetConfig, engine_config
from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.model_info import ModelInfo, refusal_to_generate
from inflight.contracts.api.options import refuse_unknown_options
from inflight.contracts.api.outputs import RequestOutput, TextDelta
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.record import EngineStats, sum_of
from inflight.engine.admission import AcceptedRequest, Admission
from inflight.engine.client import EngineClient, engine_in_thread
from inflight.engine.engine import Engine
from inflight.engine.fleet import engines_in_processes
from inflight.engine.process.connection import ThreadConnection
from inflight.engine.process.protocol import AskStats, PinPrefix, Ready, SavePrefixes
from inflight.engine.replicas.launch import check_replicas, load_of
from inflight.entrypoints.adapter_names import AdapterNames
from inflight.entrypoints.inputs import (
    TEMPLATE_OPTIONS,
    Messages,
    Prompt,
    check_chat,
    default_params,
    model_source,
    read_prompt,
)
from inflight.entrypoints.offline_call import OfflineCall, RefusedRequestError
from inflight.entrypoints.pooling_calls import PoolingCalls
from inflight.entrypoints.pooling_requests import Output, PoolingRequest
from inflight.execution.hf.load import ModelSource
from inflight.execution.hf.source import check_source
from inflight.host.garbage_collection import call_after
from inflight.observe.progress import with_progress
from inflight.text.collector import Collector
from inflight.text.tokenizer_files import load_tokenizer


class LLM(PoolingCalls):
    """A model that generates for many prompts at once, or pools many texts (`embed`, `classify`, `score`), as its
    checkpoint says; the option `task` overrides that. Thread-safe: concurrent calls run in one batch.

    Args:
        model: a hub id, a local folder, a GGUF file, or a loaded `PreTrainedModel`; None is the small embedded model.
            Once loaded, its files may change, except those written by `inflight quantize`, which stay mapped. A loaded
            model stays the caller's; after changes of its weights, requests are refused until `reload_weights`.
        tokenizer: a hub id, a folder, or a loaded tokenizer; None: the one in the model's folder or repository. Without
            a tokenizer (a loaded model has none) prompts are token ids, and texts stay empty.
        replicas: number of engines, each with the whole model, in its own process, on its own cores; "auto": one per
            NUMA node. With 1 the engine runs in this process. With several, or with a `tensor_parallel_size`, `model`
            and `tokenizer` must be names.
        options: the fields of `EngineConfig`, such as `dtype`, `max_model_len`, `max_num_seqs`.

    Attributes:
        config: the options, defaults included.
        adapters: the folder or hub repository of each adapter, by its name.

    Raises:
        ModelError: the model or tokenizer cannot be loaded, or no executor runs the model exactly (a `ValueError`).
        EngineDeadError: a replica's process cannot be started, or has died too often (from any call).
        ValueError: an option is unknown or out of range.
    """

    def __init__(
        self,
        model: ModelSource | None = None,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        *,
        replicas: int | Literal["auto"] = 1,
        **options: Any,
    ) -> None:
        config, source = engine_config(options, "LLM"), model_source(model)
        self.config = config
        if isinstance(source, str):
            check_source(source, config)
        loaded = self.tokenizer = load_tokenizer(source, tokenizer, config)
        num_replicas = check_replicas(replicas, config.tensor_parallel_size)
        if num_replicas == config.tensor_parallel_size == 1:
            self._client = _client_in_thread(lambda: Engine(source, config, loaded))
        else:
            otherwise = "replicas=1" if num_replicas > 1 else "tensor_parallel_size=1"
            load = load_of(source, tokenizer, config, otherwise=otherwise)
            self._client = engines_in_processes(load, num_replicas, FleetConfig(step_timeout=None))
        call_after(self, self._client.close)
        self.adapters = AdapterNames(config)
        self._request_ids = count()
        self._process_id = os.getpid()
        self._ready: Ready = self._client.start().result().ready
        self._admission = Admission(config, self.model_info, loaded)

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the model found at load, and how it runs."""
        return self._ready.model_info

    @property
    def engine(self) -> Engine:
        """The engine in this process. Another thread runs it: inspect or step it only while no request runs.

        Raises `RuntimeError` if it runs in other processes."""
        connection = self._client.start().result().connection
        if not isinstance(connection, ThreadConnection):
            raise RuntimeError("the engine runs in another process, and cannot be inspected")
        return connection.engine

    def stats(self) -> EngineStats:
        """The engine's totals and current state, summed over replicas. Waits for the running step."""
        self._check_caller()
        self._client.start().result()
        answers = [session.ask(AskStats) for session in self._client.sessions().values()]
        return replace(sum_of([answer.result() for answer in answers]), num_crashes=self._client.num_crashes)

    def reload_weights(self) -> None:
        """Reload the model from its folder, or from the loaded model's current weights (after a training step, say).
        New requests get a new engine, with an empty prefix cache; open streams keep the old weights. Two models are in
        memory meanwhile.

        Raises:
            ModelError: the model cannot be loaded; the old one stays.
        """
        self._check_caller()
        session = self._client.start().result()
        observer = self.engine.observer if isinstance(session.connection, ThreadConnection) else None
        for replaced in self._client.replace():
            replaced.result()
        if observer is not None:
            self.engine.observer = observer
        self._ready = self._client.start().result().ready
        self._admission = Admission(self.config, self.model_info, self.tokenizer)

    def load_adapter(self, name: str, source: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter under this name.

        Args:
            source: a folder or a hub repository, as PEFT writes it.

        Raises:
            AdapterError: the name is taken, the adapter does not fit the model, or there was no option `adapters` (a
                `ValueError`).
        """
        full = self.adapters.check_new(name, os.fspath(source))
        self._check_caller()
        self._client.start().result()
        for opened in self._client.open_adapter(full):
            opened.result()
        self.adapters.add(name, full)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running requests keep it. Raises `AdapterError` if the name is unknown."""
        self._client.close_adapter(self.adapters.remove(name))

    def cache_prefix(self, prompt: Prompt, adapter: str | None = None) -> int:
        """Compute a prompt, save it in `prefix_cache_dir` and pin it there: every engine of the same model can load it,
        and it is never evicted. Returns how many of its tokens are in full blocks; only those are saved.

        Raises:
            ValueError: there is no `prefix_cache_dir`, the prompt is invalid, or half of `prefix_cache_size` is pinned.
            OSError: the folder cannot be used, or not all was saved: the disk is full, or `prefix_cache_size` too
                small.
        """
        if self.config.prefix_cache.folder is None:
            raise ValueError("there is no prefix_cache_dir to keep a prefix in")
        params = SamplingParams(temperature=0, max_tokens=1)
        (output,) = self.generate([prompt], params, use_tqdm=False, adapter=adapter)
        for saved in [session.ask(SavePrefixes) for session in self._client.sessions().values()]:
            saved.result()
        cache_salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        source = None if adapter is None else self.adapters.source_of(adapter)
        pin = partial(PinPrefix, token_ids=output.prompt_token_ids, cache_salt=cache_salt, adapter_source=source)
        self._client.start().result().ask(pin).result()
        num_tokens = len(output.prompt_token_ids)
        return num_tokens - num_tokens % self.config.kv_cache.block_size

    def get_default_sampling_params(self) -> SamplingParams:
        """Default parameters: the model's `generation_config`, else `SamplingParams()`."""
        if self.model_info.pooling is not None:
            raise refusal_to_generate(self.model_info)
        return self._ready.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts. Results come in the order of the prompts.

        Args:
            prompts: one or many, each text, token ids, or a dict with "prompt", "prompt_token_ids" or "messages"
                (and "cache_salt": only prompts of the same salt share cached prefixes).
            sampling_params: for all, or one for each prompt; None: the model's defaults.
            use_tqdm: show a progress bar with tokens per second on standard error.
            priority: one for each prompt; lower runs first (if `policy="priority"`). None: the same for all.
            adapter: the name of an adapter (`adapters`) for all, or one for each prompt; None: the base model.

        Raises:
            InvalidRequestError: a prompt or parameter is invalid (a `ValueError` that names its index).
        """
        stream = self._open_stream(prompts, sampling_params, priority, adapter)
        with closing(self._run(stream, streams=False)) as deltas:  # an interrupt leaves nothing running
            shown = with_progress(deltas, len(stream.accepted)) if use_tqdm else deltas
            outputs = {delta.prompt_index: delta.output for delta in shown if delta.output is not None}
        return [outputs[index] for index in sorted(outputs)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        adapter: str | Sequence[str | None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one chat or many, rendered by the tokenizer's chat template.

        Args:
            messages: one chat or many, each a list of dicts with "role" and "content".
            sampling_params: for all, or one for each chat; None: the model's defaults, without a token limit: an answer
                ends when the model ends it or its context is full.
            adapter: as for `generate`.
            template_options: `chat_template` (Jinja, instead of the tokenizer's), `tools` (JSON schemas),
                `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs` (variables of the template).
        """
        refuse_unknown_options(template_options, TEMPLATE_OPTIONS, "LLM.chat")
        check_chat(messages)
        is_one = isinstance(messages[0], Mapping)
        chats = [messages] if is_one else messages
        prompts = [{"messages": chat, **template_options} for chat in chats]
        return self.generate(prompts[0] if is_one else prompts, sampling_params, use_tqdm, adapter=adapter)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Generator[TextDelta, None, None]:
        """Like `generate`, but yields deltas as they are generated, all prompts interleaved.

        Prompts are checked before this returns. Closing the generator aborts unfinished requests.
        """
        return self._run(self._open_stream(prompts, sampling_params, priority, adapter))

    # ------------------------------------------------------------------------------------- one call

    def _open_stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        adapter: str | Sequence[str | None] | None,
    ) -> "_Stream":
        """Accept all prompts of a call, or refuse the first wrong one by its index."""
        is_one = _is_one_prompt(prompts)
        many: Sequence[Any] = [prompts] if is_one else prompts  # type: ignore[assignment]
        if sampling_params is None:
            own = self.get_default_sampling_params()
            sampling_params = [default_params(prompt, own) for prompt in many]
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(many)
        for params in sampling_params:
            if not isinstance(params, SamplingParams):
                raise InvalidRequestError(f"sampling_params is or contains {params!r}; it must be SamplingParams")
        if len(sampling_params) != len(many):
            raise InvalidRequestError(
                f"{len(many)} prompts came with {len(sampling_params)} sampling_params; give one for all, or one each"
            )
        priorities = _one_each(
            priority if priority is not None else [0] * len(many), len(many), "priority", "priorities"
        )
        adapters = _one_each(
            [adapter] * len(many) if adapter is None or isinstance(adapter, str) else adapter,
            len(many),
            "adapter",
            "adapters",
        )
        stream = _Stream(is_one)
        for index, (prompt, params) in enumerate(zip(many, sampling_params, strict=True)):
            try:
                self._accept(stream, index, prompt, params, priorities[index], adapters[index])
            except InvalidRequestError as error:
                raise stream.refusal(index, error) from None
        return stream

    def _accept(
        self,
        stream: "_Stream",
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        adapter: str | None,
    ) -> None:
        text, token_ids, cache_salt, multimodal = read_prompt(prompt, self.tokenizer)
        request_id = str(next(self._request_ids))
        accepted = self._admission.accept(
            request_id,
            token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            adapter_source=None if adapter is None else self.adapters.source_of(adapter),
            multimodal=multimodal,
        )
        prompt_token_ids = list(accepted.request.prompt_token_ids)
        stream.accepted.append(accepted)
        stream.collectors[request_id] = Collector(request_id, text, prompt_token_ids, params, self.tokenizer, index)

    def _run(self, stream: "_Stream", *, streams: bool = True) -> Generator[TextDelta, None, None]:
        """Run a call's requests to their ends."""
        self._check_caller()
        call = OfflineCall(self._client, stream.accepted, self.config.scheduling.max_num_seqs, streams=streams)
        try:
            with closing(call.outputs()) as outputs:
                for request_id, output in outputs:
                    yield stream.collectors[request_id].take_in(output)
        except RefusedRequestError as refusal:
            error = refusal.__cause__
            if isinstance(error, InvalidRequestError):
                error = stream.refusal(list(stream.collectors).index(refusal.request_id), error)
            raise (error or refusal) from None

    def _pool(self, request: PoolingRequest[Output]) -> list[Output]:
        """Run a request to its end."""
        self._check_caller()
        accepted = [self._admission.accept_text(str(next(self._request_ids)), text) for text in request.texts]
        values: dict[str, array[float]] = {}
        try:
            with closing(OfflineCall(self._client, accepted, self.config.scheduling.max_num_seqs).outputs()) as outputs:
                for request_id, output in outputs:
                    if output.error is not None:
                        raise RuntimeError(f"the texts could not be run: {output.error}")
                    values[request_id] = array("f", output.values or b"")
        except RefusedRequestError as refusal:
            raise (refusal.__cause__ or refusal) from None
        return request.finish([values[each.request.request_id] for each in accepted])

    def _check_caller(self) -> None:
        """Refuse calls that would deadlock."""
        for session in self._client.sessions().values():
            connection = session.connection
            if isinstance(connection, ThreadConnection) and connection.thread is threading.current_thread():
                raise RuntimeError("this LLM is running a step: an observer or a hook cannot call it")
        if self._process_id != os.getpid():
            raise RuntimeError(
                "this process was forked from one that had loaded the model, without its compute threads; "
                "make the LLM in the child, or start the child with multiprocessing's method 'spawn'"
            )


class _Stream:
    """The requests of one call.

    Args:
        is_one: whether the caller gave a single prompt instead of a list.
    """

    def __init__(self, is_one: bool) -> None:
        self.accepted: list[AcceptedRequest] = []
        self.collectors: dict[str, Collector] = {}
        self._is_one = is_one

    def refusal(self, index: int, error: InvalidRequestError) -> InvalidRequestError:
        """The error for the caller if a prompt is refused."""
        return error if self._is_one else type(error)(f"prompt {index}: {error}")


def _client_in_thread(make: Callable[[], Engine]) -> EngineClient:
    """A client of an engine in this process. The first engine is made here, so that its errors are raised unchanged;
    later ones are made in their threads."""
    first = [make()]
    return engine_in_thread(lambda: first.pop() if first else make(), is_offline=True)


def _one_each(given: Any, number: int, name: str, names: str) -> Sequence[Any]:
    """Check an option given per prompt. Raises `InvalidRequestError` unless it is a list of `number` entries."""
    if not isinstance(given, Sequence):
        raise InvalidRequestError(f"{name} is {given!r}; it must be a list with one {name} for each prompt")
    if len(given) != number:
        raise InvalidRequestError(f"{number} prompts came with {len(given)} {names}; give one each")
    return given


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    return not isinstance(prompts, Sequence) or (len(prompts) > 0 and isinstance(prompts[0], Integral))

"""`LLM`: the offline front. Prompts in, texts out, in the caller's process and thread.

Decides how the results of one call are put together, and how calls share the engine. Everything else belongs to the
engine, or to `inputs`.

Several calls may be open at a time: streams that are held, and calls of several threads, of which each steps the engine
for all. What a step gave a call waits in its `_Stream` until its own caller takes it. So an interrupt loses nothing of
another call; and if it tears the engine apart, the streams know what has to be told to a new start.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count
from numbers import Integral
from typing import Any, Literal, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inflight.adapter_names import AdapterNames
from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import InvalidRequestError, ModelError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.options import refuse_unknown_options
from inflight.contracts.outputs import RequestOutput, SequenceOutput, TextDelta
from inflight.contracts.params import SamplingParams
from inflight.engine.admission import AcceptedRequest
from inflight.engine.engine import Engine
from inflight.engine.making import make_engine
from inflight.engine.pooling import PoolingEngine
from inflight.execution.hf.load import ModelSource
from inflight.execution.hf.source import check_source
from inflight.inputs import TEMPLATE_OPTIONS, Messages, Prompt, check_chat, default_params, read_prompt
from inflight.observe.progress import with_progress
from inflight.pooling.calls import PoolingCalls
from inflight.pooling.checkpoint import pooling_plan
from inflight.pooling.requests import Output, PoolingRequest
from inflight.replicas.launch import load_of
from inflight.replicas.placement import check_replicas
from inflight.replicas.replicated_engine import replicated_engine
from inflight.sources import engine_config, load_tokenizer, model_source
from inflight.text.collector import Collector
from inflight.text.tokenizer import Tokenizer


class LLM(PoolingCalls):
    """A model that generates for many prompts at once, or pools many texts (`embed`, `classify`, `score`), as its
    checkpoint says; the option `task` decides otherwise. Threads may share it: their calls run in one batch.

    Args:
        model: a hub id, a local folder, a GGUF file, or a loaded `PreTrainedModel`; None is the small embedded model.
            Once it is loaded, nothing that happens to its files changes anything, except for what `inflight quantize`
            wrote: that stays in its file. A loaded model stays the caller's; when its weights are changed, requests are
            refused until `reload_weights`.
        tokenizer: a hub id, a folder, or a loaded tokenizer; None: the one in the model's folder or repository. Without
            a tokenizer (a loaded model has none) prompts are token ids, and texts stay empty.
        replicas: how many engines run, each with all of the model, in a process and on cores of its own; "auto": one
            for each NUMA node. With 1 the engine runs in this process. With several, or with a `tensor_parallel_size`,
            `model` and `tokenizer` are names, and `engine` has neither scheduler nor model to look into.
        options: the fields of `EngineConfig`, such as `dtype`, `max_model_len`, `max_num_seqs`.

    Attributes:
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
        if isinstance(source, str):
            check_source(source, config)
        self.tokenizer = load_tokenizer(source, tokenizer, config)
        num_replicas = check_replicas(replicas, config.tensor_parallel_size)
        self._make_engine = _maker(source, tokenizer, config, self.tokenizer, num_replicas)
        self.engine = self._make_engine()
        self.adapters = AdapterNames(config)
        self._streams: dict[str, _Stream] = {}
        self._abandoned: deque[_Stream] = deque()
        self._request_ids = count()
        self._turn = threading.RLock()  # one thread at a time; the other waits
        self._inside = threading.Lock()  # held while the engine works; nothing that it calls may call it
        self._process_id = os.getpid()

    @property
    def model_info(self) -> ModelInfo:
        """What was found out about the model at load, and how it is run."""
        return self.engine.model_info

    def reload_weights(self) -> None:
        """Load the model anew: from its folder, or from the loaded model as it is now (after a step of training, say).
        The prefix cache is empty afterwards. Meanwhile there are two models in memory.

        Raises:
            RuntimeError: a stream has not ended.
            ModelError: the model cannot be loaded; the old one stays. Or its ranks are on other machines.
        """
        with self._turn:
            self._check_caller()
            self._drop_abandoned()
            if self._streams:
                raise RuntimeError("the weights cannot be reloaded while a stream runs; let it end, or close it")
            engine = self._make_engine()
            engine.observer = self.engine.observer
            self.engine = engine

    def load_adapter(self, name: str, source: str | os.PathLike[str]) -> None:
        """Let requests ask for a LoRA adapter by this name from now on.

        Args:
            source: a folder or a hub repository, as PEFT writes it.

        Raises:
            AdapterError: there is one of this name, it cannot be used with the model, or there was no option
                `adapters` (a `ValueError`).
        """
        full = self.adapters.check_new(name, os.fspath(source))
        self.engine.open_adapter(full)
        self.adapters.add(name, full)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that have it keep it. Raises `AdapterError` if there is none of this name."""
        self.engine.close_adapter(self.adapters.remove(name))

    def cache_prefix(self, prompt: Prompt, adapter: str | None = None) -> int:
        """Compute a prompt, or find it, wait until it is saved in `prefix_cache_dir`, and pin it there: every engine of
        the same model restores it from there, and it stays, however long nobody asks for it. Returns how many of its
        tokens lie in full blocks, which alone are kept.

        Raises:
            ValueError: there is no `prefix_cache_dir`, the prompt is none, or half of `prefix_cache_size` is pinned.
            OSError: the folder cannot be used, or not all was saved: the disk is full, or `prefix_cache_size` small.
        """
        config = self.engine.config
        if config.prefix_cache_dir is None:
            raise ValueError("there is no prefix_cache_dir to keep a prefix in")
        params = SamplingParams(temperature=0, max_tokens=1)
        (output,) = self.generate([prompt], params, use_tqdm=False, adapter=adapter)
        self.engine.save_prefixes(threading.TIMEOUT_MAX)
        cache_salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        source = None if adapter is None else self.adapters.source_of(adapter)
        self.engine.pin_prefix(output.prompt_token_ids, cache_salt, source)
        num_tokens = len(output.prompt_token_ids)
        return num_tokens - num_tokens % config.block_size

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters used when none are given: the model's `generation_config`, else `SamplingParams()`."""
        return self.engine.default_sampling_params()

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
            sampling_params: for all, or one for each prompt; None: the model's own defaults.
            use_tqdm: show a progress bar with tokens a second on standard error.
            priority: one for each prompt; lower runs first (if `policy="priority"`). None: the same for all.
            adapter: the name of the adapter that all have (`adapters`), or one for each prompt; None: the model as it
                is.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong (a `ValueError` that names its index); nothing has run.
        """
        stream = self._open_stream(prompts, sampling_params, priority, adapter)
        with closing(self._run(stream)) as deltas:  # an interrupt leaves nothing running, wherever it comes
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
        """Answer one chat or many, written out by the tokenizer's chat template.

        Args:
            messages: one chat or many, each a list of dicts with "role" and "content".
            sampling_params: for all, or one for each chat; None: the model's own defaults, without a limit of tokens:
                an answer ends where the model ends it, or where its context is full.
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
        """Like `generate`, but yields each piece of text as it is made, all prompts interleaved.

        Prompts are checked before this returns. Closing the generator aborts what is unfinished.
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
        stream = _Stream()
        for index, (prompt, params) in enumerate(zip(many, sampling_params, strict=True)):
            try:
                self._accept(stream, index, prompt, params, priorities[index], adapters[index])
            except InvalidRequestError as error:
                raise error if is_one else type(error)(f"prompt {index}: {error}") from None
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
        text, token_ids, cache_salt = read_prompt(prompt, self.tokenizer)
        request_id = str(next(self._request_ids))
        with self._turn:
            accepted = self.engine.accept(
                request_id,
                token_ids,
                params,
                priority=priority,
                cache_salt=cache_salt,
                adapter_source=None if adapter is None else self.adapters.source_of(adapter),
            )
            accepted = self.engine.compile(accepted)
        prompt_token_ids = list(accepted.request.prompt_token_ids)
        stream.accepted.append(accepted)
        stream.collectors[request_id] = Collector(request_id, text, prompt_token_ids, params, self.tokenizer, index)

    def _run(self, stream: "_Stream") -> Generator[TextDelta, None, None]:
        """Submit a call's requests and step the engine until the last has finished."""
        try:
            self._submit(stream)
            while stream.collectors:
                if stream.has_news:
                    yield stream.take_news()
                else:
                    self._step(stream)
        finally:  # in any thread, and wherever the garbage collector may run
            self._abandoned.append(stream)
            self._drop_abandoned()

    # ------------------------------------------------------------------------------------- pooling

    def _pool(self, request: PoolingRequest[Output]) -> list[Output]:
        """Run a request to its end. Steps run the texts of all threads."""
        engine = cast(PoolingEngine, self.engine)
        request_id, ended = str(next(self._request_ids)), None
        try:
            with self._turn:
                self._check_caller()
                engine.submit(request_id, request.texts)
            while ended is None:
                with self._turn:
                    self._check_caller()
                    if (ended := engine.take(request_id)) is None:
                        with self._inside:
                            engine.step()
        finally:
            with self._turn:
                engine.abort(request_id)
        if ended.error is not None:
            raise RuntimeError(f"the texts could not be run: {ended.error}")
        return request.finish(ended.values)

    # ------------------------------------------------------------------------------------- the engine, shared

    def _submit(self, stream: "_Stream") -> None:
        with self._turn:
            self._check_caller()
            with self._inside:
                self._mend()
                for accepted in stream.accepted:
                    self.engine.submit(accepted)
                    self._streams[accepted.request.request_id] = stream

    def _step(self, stream: "_Stream") -> None:
        """Run one step for all open calls, unless another thread has run one for this stream meanwhile."""
        with self._turn:
            self._check_caller()
            with self._inside:
                self._mend()
                if not stream.has_news:
                    self.engine.advance()
                    self._give_out()
        self._drop_abandoned()

    def _give_out(self) -> None:
        """Give each stream what has come for it. Nothing is lost or given twice, wherever an exception comes."""
        outbox = self.engine.outbox
        while outbox:
            news = outbox[0]
            if (stream := self._streams.get(news.request_id)) is not None:
                stream.hear(news)
            outbox.popleft()

    def _drop_abandoned(self) -> None:
        """Abort what is unfinished of calls that have ended. In the middle of a step this is left to its end."""
        while self._abandoned and not self._inside.locked():
            with self._turn, self._inside:
                self._mend()
                while self._abandoned:
                    for accepted in self._abandoned[0].accepted:
                        self._streams.pop(accepted.request.request_id, None)
                        self.engine.abort(accepted.request.request_id)
                    self._abandoned.popleft()

    def _mend(self) -> None:
        """If an exception has torn the engine apart, start over with what the streams have heard."""
        if self.engine.is_torn:
            abandoned = set(map(id, self._abandoned))
            streams = dict.fromkeys(stream for stream in self._streams.values() if id(stream) not in abandoned)
            self.engine.start_over(live for stream in streams for live in stream.unfinished())
        else:
            self._give_out()  # what an interrupt left there

    def _check_caller(self) -> None:
        """Refuse calls that would wait for ever."""
        if self._inside.locked():
            raise RuntimeError("this LLM is in the middle of a step: an observer or a hook cannot call it")
        if self._process_id != os.getpid():
            raise RuntimeError(
                "this process was forked from one that had loaded the model, and the threads that compute were not; "
                "make the LLM in the child, or start the child with multiprocessing's method 'spawn'"
            )


class _Stream:
    """The requests of one call, and what was given to it."""

    def __init__(self) -> None:
        self.accepted: list[AcceptedRequest] = []
        self.collectors: dict[str, Collector] = {}
        self._heard: list[SequenceOutput] = []  # only grows: what an engine that starts over is told
        self._num_taken = 0

    @property
    def has_news(self) -> bool:
        """Whether its caller has not taken everything yet."""
        return self._num_taken < len(self._heard)

    def hear(self, news: SequenceOutput) -> None:
        """Take in what a step gave one of the call's sequences, unless that was the last thing taken in."""
        if not (self._heard and self._heard[-1] is news):
            self._heard.append(news)

    def take_news(self) -> TextDelta:
        """Make the next piece for the caller."""
        news = self._heard[self._num_taken]
        delta = self.collectors[news.request_id].take_in(news)
        if delta.output is not None:
            del self.collectors[news.request_id]
        self._num_taken += 1
        return delta

    def unfinished(self) -> Iterator[tuple[AcceptedRequest, list[SequenceOutput]]]:
        """Its requests that have not ended, each with what was heard of it."""
        heard: dict[str, list[SequenceOutput]] = {accepted.request.request_id: [] for accepted in self.accepted}
        for news in self._heard:
            heard[news.request_id].append(news)
        for accepted in self.accepted:
            told = heard[accepted.request.request_id]
            if sum(news.finish_reason is not None for news in told) < accepted.params.n:
                yield accepted, told


def _maker(
    source: str | PreTrainedModel,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    config: EngineConfig,
    loaded: Tokenizer | None,
    num_replicas: int,
) -> Callable[[], Engine]:
    """What makes the engine of an `LLM`, and another one when its weights are reloaded."""
    if num_replicas == config.tensor_parallel_size == 1:
        return lambda: cast(Engine, make_engine(source, config, loaded))  # one that pools refuses prompts
    if pooling_plan(source, config, loaded) is not None:
        raise ModelError("a model that pools runs in one process here; give replicas to AsyncLLM, or to the server")
    otherwise = "replicas=1" if num_replicas > 1 else "tensor_parallel_size=1"
    load = load_of(source, tokenizer, config, otherwise=otherwise)
    return lambda: cast(Engine, replicated_engine(load, num_replicas, loaded))  # it does what is asked of one here


def _one_each(given: Any, number: int, name: str, names: str) -> Sequence[Any]:
    """What was given for each of so many prompts. Raises `InvalidRequestError` if it is not a list of so many."""
    if not isinstance(given, Sequence):
        raise InvalidRequestError(f"{name} is {given!r}; it must be a list with one {name} for each prompt")
    if len(given) != number:
        raise InvalidRequestError(f"{number} prompts came with {len(given)} {names}; give one each")
    return given


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    return not isinstance(prompts, Sequence) or (len(prompts) > 0 and isinstance(prompts[0], Integral))

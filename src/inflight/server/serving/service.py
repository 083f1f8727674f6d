"""`Service`: shared by all endpoints: model, operator's settings, observer, and tokenization of prompts. Resolves model
names and checks the context length. Knows no endpoint.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import Request

from inflight.contracts.api.errors import EngineDeadError, InvalidRequestError, ModelError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import TextDelta
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.multimodal import MultimodalInputs
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.entrypoints.inputs import Prompt, read_prompt
from inflight.server.chat_format.chat_template import DEFAULT_REASONING, ReasoningOptions, render_chat
from inflight.server.serving.items import place_items
from inflight.server.serving.observer import RequestObserver
from inflight.server.serving.settings import ANY_NAME, ServerSettings
from inflight.server.wire.addresses import Address
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import READING
from inflight.text.tokenizer import Tokenizer

MAX_SCORES = 2**19
"""Most log-probabilities of prompts in one answer: about 20 MB of JSON, and 200 MB while it is built."""


@dataclass(slots=True)
class RunningRequest:
    """A running request.

    Attributes:
        start_time, first_token_time: seconds of `time.monotonic()`.
        num_tokens: generated so far, by all of its sequences.
        texts: pieces of each sequence's text; None: not kept.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int
    texts: list[list[str]] | None = None
    start_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    num_tokens: int = 0

    def add(self, delta: TextDelta, now: float) -> None:
        """Add a delta."""
        if delta.token_ids and self.first_token_time is None:
            self.first_token_time = now
        self.num_tokens += len(delta.token_ids)
        if self.texts is not None:
            self.texts[delta.index].append(delta.text)


class RenderedChat(NamedTuple):
    """A chat rendered by its template.

    Attributes:
        chat, options: what was rendered (see `render_chat`).
        multimodal: the images and sounds in it; None: there are none.
    """

    text: str
    token_ids: list[int]
    chat: Mapping[str, Any]
    options: ReasoningOptions
    multimodal: MultimodalInputs | None = None


class Service:
    """One model with its server settings.

    Attributes:
        start_time: when serving began, in seconds of Unix time; the model's `created`.
        running: running requests, by id.
        keeps_texts: whether `running` keeps generated texts.
        pooling: the tasks of requests that pool.
        idle_work: tasks that other requests end.
        in_background: whether all its requests run in the background, each with a random seed if it has none: an engine
            draws the same seeds after every start, and a job may outlive many.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        settings: ServerSettings,
        observer: RequestObserver | None,
        start_time: int,
        in_background: bool = False,
    ) -> None:
        self.in_background = in_background
        self.llm = llm
        self.settings = settings
        self.observer = observer or RequestObserver()
        self.start_time = start_time
        self.running: dict[str, RunningRequest] = {}
        self.keeps_texts = False
        self.pooling: set[asyncio.Task[Any]] = set()
        self.idle_work: set[asyncio.Task[None]] = set()

    async def abort_all(self) -> None:
        """Abort all running requests: streams end with an error event, other requests are answered with a 503."""
        for request_id in tuple(self.running):
            await self.llm.abort(request_id)
        for task in (*self.pooling, *self.idle_work):
            task.cancel()

    def begin(self, request_id: str, running: RunningRequest) -> None:
        """A request begins to run: idle work ends, and what it has computed stays in the cache."""
        for task in tuple(self.idle_work):
            task.cancel()
        self.running[request_id] = running

    async def model_info(self) -> ModelInfo:
        """Return the engine's `ModelInfo`; start the engine first if necessary."""
        await self.llm.start()
        return self.llm.model_info

    async def generating_info(self) -> ModelInfo:
        """Return the same. Raises `ApiError` if the model does not generate."""
        info = await self.model_info()
        if info.pooling is not None:
            message = f"this model was loaded to {info.pooling.task}; it does not generate text"
            raise ApiError(400, message, param="model", code="model_not_supported")
        return info

    def check_ready(self) -> None:
        """See `Catalog`."""
        try:
            if self.llm.is_ready():
                return
        except (EngineDeadError, ModelError) as error:
            raise ApiError.from_exception(error) from error
        raise ApiError(503, "the engine is loading", code="engine_loading", headers={"Retry-After": "1"})

    async def cards(self) -> list[dict[str, Any]]:
        """See `Catalog`."""
        return [await self._card(adapter) for adapter in (None, *self.llm.adapters)]

    async def card(self, name: str) -> dict[str, Any]:
        """See `Catalog`."""
        return await self._card(self.adapter_of(name))

    async def _card(self, adapter: str | None) -> dict[str, Any]:
        info = await self.model_info()
        return {
            "id": self.name_of(adapter),
            "object": "model",
            "created": self.start_time,
            "owned_by": "inflight",
            "root": self.settings.model_name if adapter is None else self.llm.adapters.get(adapter),
            "parent": None if adapter is None else self.settings.model_name,
            "max_model_len": info.max_model_len,
            "input_modalities": info.input_modalities,
        }

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `ApiError` if it has none."""
        if self.llm.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; it takes and returns token ids only")
        return self.llm.tokenizer

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the base model; the first is used in answers."""
        return (self.settings.model_name, *self.settings.model_aliases)

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter of a model name; None: the base model, also without a name. Raises `ApiError` (404) for an
        unknown name."""
        if name is None or name in self.model_names:
            return None
        if name in self.llm.adapters:
            return name
        if ANY_NAME in self.model_names:
            return None
        has = ", ".join(map(repr, (self.settings.model_name, *self.llm.adapters)))
        message = f"there is no model {name[:200]!r}; this server has {has}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def name_of(self, adapter: str | None) -> str:
        """The model's name in answers."""
        return self.settings.model_name if adapter is None else adapter

    def token_ids(self, prompt: Prompt, info: ModelInfo, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt. Slow for a long one: call it by `off_loop`.

        Args:
            param: the request field that holds the prompt.
            add_special_tokens: whether the tokenizer adds special tokens to a text.

        Raises:
            ApiError: the prompt cannot be tokenized, or has too many characters to fit (400).
        """
        try:
            if isinstance(prompt, Mapping) and "messages" in prompt:
                return self.written(prompt, info, param).token_ids
            if not isinstance(prompt, str) or not prompt:
                return list(read_prompt(prompt, self.llm.tokenizer)[1])
            return self._encoded(prompt, info, param, add_special_tokens=add_special_tokens)
        except InvalidRequestError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from error

    async def fetch_items(self, info: ModelInfo) -> int:
        """Fetch what the request at hand has by address and the model reads, for `written`, which raises what is wrong
        with it. Return the bytes."""
        reading = READING.get()
        items = {mark: each for mark, each in reading.items.items() if each[0] in info.input_modalities}
        addresses = {mark: item for mark, (_, item) in items.items() if isinstance(item, Address)}
        if not addresses:
            return 0
        try:
            self.tokenizer.processor.check_numbers(Counter(kind for kind, _ in items.values()))
            fetched = await reading.addresses.fetch(list(addresses.values()))
        except InvalidRequestError as error:
            fetched = dict.fromkeys(addresses.values(), error)
        reading.items |= {mark: (address.kind, fetched[address]) for mark, address in addresses.items()}
        return sum(len(each) for address in addresses.values() if isinstance(each := fetched[address], bytes))

    def written(
        self,
        chat: Mapping[str, Any],
        info: ModelInfo,
        param: str,
        reasoning_options: ReasoningOptions = DEFAULT_REASONING,
    ) -> RenderedChat:
        """Return a chat as text (see `render_chat`) and as token ids (see `token_ids`), with its images and sounds."""
        text = render_chat(chat, self.llm.tokenizer, param, reasoning_options)
        try:
            text, items = place_items(text, self.tokenizer, info, param)
            token_ids = self._encoded(text, info, param, add_special_tokens=False)
            if not any(items.values()):
                return RenderedChat(text, token_ids, chat, reasoning_options)
            token_ids, multimodal = self.tokenizer.processor.read(text, *items.values(), add_special_tokens=False)
        except InvalidRequestError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from error
        return RenderedChat(text, token_ids, chat, reasoning_options, multimodal)

    def _encoded(self, text: str, info: ModelInfo, param: str, *, add_special_tokens: bool) -> list[int]:
        most = self.tokenizer.most_characters(info.max_model_len)
        if len(text) > most:
            raise ApiError(
                400,
                f"{param} has {len(text)} characters; {_context(info)}, and no text of more than {most} fits",
                param=param,
                code="context_length_exceeded",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def fitted(
        self, token_ids: list[int], info: ModelInfo, param: str, truncate_prompt_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids to run. Raises `ApiError` if there are none or they do not fit into the context."""
        if truncate_prompt_tokens is not None:
            token_ids = token_ids[-truncate_prompt_tokens:]
        if not token_ids:
            raise ApiError(400, f"{param} is empty; a prompt must have at least one token", param=param)
        if len(token_ids) >= info.max_model_len:
            raise ApiError(
                400,
                f"{param} has {len(token_ids)} tokens; {_context(info)}, and at least one of them must be left for the "
                "output",
                param=param,
                code="context_length_exceeded",
            )
        return token_ids

    def check_num_scores(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Raise `ApiError` if the log-probabilities of these prompts are too many for one answer."""
        if params.prompt_logprobs is None:
            return
        num_tokens, each = sum(map(len, prompts)), params.prompt_logprobs + 1
        if num_tokens * each > MAX_SCORES:
            what = f"{num_tokens} prompt tokens with {each} log-probabilities each are {num_tokens * each}"
            message = f"{what}; this server returns at most {MAX_SCORES} in one answer, so send fewer prompts at a time"
            raise ApiError(400, message, param="prompt_logprobs")

    def check_num_sequences(self, num_prompts: int, each: int, param: str) -> None:
        """Raise `ApiError` if `num_prompts` prompts with `each` sequences each are too many for one request."""
        limit = self.settings.max_num_sequences
        if num_prompts * each > limit:
            what = f"{num_prompts} prompts with {each} sequences each are {num_prompts * each} sequences"
            raise ApiError(400, f"{what}; this server takes at most {limit} in one request", param=param)


def _context(info: ModelInfo) -> str:
    """State the context length in OpenAI's words, which LiteLLM matches instead of the error's code."""
    return f"this model's maximum context length is {info.max_model_len} tokens"


def service_of(request: Request) -> Service:
    """Return the `Service` of the request's application."""
    service: Service = request.app.state.service
    return service


def settings_of(request: Request) -> ServerSettings:
    """Return the settings of the request's application, which may have no model."""
    settings: ServerSettings = request.app.state.settings
    return settings

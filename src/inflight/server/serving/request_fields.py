"""The request fields shared by all generating endpoints, and `ChatBody`, the interface of chat-like requests.

Names and meanings are OpenAI's where OpenAI has them, else vLLM's.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import Field

from inflight.contracts.api.params import MAX_BAD_WORDS, MAX_SEED, SamplingParams
from inflight.contracts.api.structured_output import StructuredOutput
from inflight.server.chat_format.chat_template import ReasoningOptions
from inflight.server.chat_format.tools import ToolFields
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import Many, StrictModel

MAX_STOP_TOKEN_IDS = 4096
MAX_LOGIT_BIASES = 4096


class SharedSamplingFields(StrictModel):
    """The fields that every API takes: OpenAI's, Anthropic's, vLLM's. Null and absent mean the model's own defaults."""

    model: str | None = None
    stream: bool | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    bad_words: Annotated[Many[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[Many[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    speculation: bool | None = None

    def sent_options(self, vocab_size: int) -> dict[str, Any]:
        """Return the sent fields as options of `SamplingParams`; endpoints add their own. Raises `ApiError`."""
        sent = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            if not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
                raise ApiError(400, f"seed is {self.seed}; it must be an integer of 64 bits", param="seed")
            sent["seed"] = self.seed & MAX_SEED  # our seeds are unsigned
        if self.logit_bias:
            sent["logit_bias"] = _token_biases(self.logit_bias, vocab_size)
        return sent

    def sampling_params(self, defaults: SamplingParams, vocab_size: int, **options: Any) -> SamplingParams:
        """Return `defaults`, overridden by sent values and then by `options`. Raises `ApiError` if one is refused."""
        try:
            return replace(defaults, **{**self.sent_options(vocab_size), **options})
        except ValueError as error:
            raise ApiError(400, str(error), param=named_in(str(error), type(self))) from error


class ChatBody(SharedSamplingFields):
    """The body of a chat-like endpoint, independent of its API's field names."""

    @property
    @abstractmethod
    def tool_fields(self) -> ToolFields:
        """The fields about tools, in OpenAI's form. Raises `ApiError`."""

    @property
    @abstractmethod
    def structured_output(self) -> StructuredOutput | None:
        """The structured output requested. Raises `ApiError`."""

    @property
    @abstractmethod
    def reasoning_options(self) -> ReasoningOptions:
        """The request's reasoning options."""

    @property
    def most_prompt_tokens(self) -> int | None:
        """Keep this many of the prompt's last tokens; None: all."""
        return None

    def check(self, settings: ServerSettings) -> None:
        """Raise `ApiError` for fields that contradict each other or exceed the operator's limits."""

    @abstractmethod
    def for_template(self, settings: ServerSettings) -> dict[str, Any]:
        """Return the chat as a prompt of `AsyncLLM`, with its tools. Raises `ApiError`."""


OPTIONS = {field.name for field in fields(SamplingParams)} - {"logit_bias", "seed", "truncate_prompt_tokens"}
_SHARED = SharedSamplingFields.model_fields.keys() & OPTIONS
"""Fields passed unchanged to `SamplingParams`."""


def _token_biases(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    for key in biases:
        if not re.fullmatch("0|[1-9][0-9]{0,8}", key) or int(key) >= vocab_size:
            message = f"logit_bias has {key[:100]!r}; its keys must be token ids from 0 to {vocab_size - 1}, as text"
            raise ApiError(400, message, param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def named_in(message: str, owner: type[StrictModel]) -> str | None:
    """Return the request field named in a message of `SamplingParams`."""
    match = re.match(r"(?:a (?:member|token id) of )?(\w+)", message)
    return match[1] if match and match[1] in owner.model_fields else None


def structured(where: str, param: str, **options: Any) -> StructuredOutput:
    """Return a field's structured output. Raises `ApiError`."""
    try:
        return StructuredOutput(**options)
    except ValueError as error:
        raise ApiError(400, f"{where}: {error}", param=param) from error

"""The request fields that say how tokens are chosen and when a sequence ends, and the `SamplingParams` they make.

Completions and chats share them. Names and meanings are OpenAI's where OpenAI has them, else vLLM's.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from inflight.contracts.params import MAX_BAD_WORDS, MAX_SEED, SamplingParams
from inflight.server.openai.output_format import OutputFormatFields
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import Many, StrictModel

MAX_STOP_STRINGS = 64
"""Every token's text is searched for each of them."""

MAX_STOP_TOKEN_IDS = 4096
MAX_LOGIT_BIASES = 4096
MAX_METADATA = 1024

NOT_SUPPORTED_YET: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "early_stopping": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "max_length": (),
    "max_new_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "use_beam_search": (False,),
    "vllm_xargs": (),
}
"""Fields that other servers of this API support and this one does not, with the values that change nothing."""


IGNORED = frozenset({"guided_decoding_backend", "service_tier", "store"})
"""Those of these fields that concern how, where and for whom the work is done, but not its result."""


class StreamOptions(StrictModel):
    """What a stream contains besides the text.

    Attributes:
        include_usage: end with a chunk that has the usage.
        continuous_usage_stats: send the usage so far with every chunk.
    """

    NOT_SUPPORTED: ClassVar = {"include_obfuscation": (False,)}
    IGNORED: ClassVar = {"include_obfuscation"}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedSamplingFields(StrictModel):
    """The fields that every API takes: OpenAI's, Anthropic's, vLLM's. Null and absent mean the model's own defaults."""

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
        """Return what was sent, as options of `SamplingParams`. Raises `ApiError`."""
        sent = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            if not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
                raise ApiError(400, f"seed is {self.seed}; it must be an integer of 64 bits", param="seed")
            sent["seed"] = self.seed & MAX_SEED  # our seeds are unsigned
        if self.logit_bias:
            sent["logit_bias"] = _token_biases(self.logit_bias, vocab_size)
        return sent


class SamplingFields(SharedSamplingFields, OutputFormatFields):
    """The fields of completions and chats."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    stop: str | Annotated[Many[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: bool | None = None
    # For the client's own use; nothing here depends on them.
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling_params(
        self, defaults: SamplingParams, settings: ServerSettings, vocab_size: int, **options: Any
    ) -> SamplingParams:
        """Return `defaults`, overridden by sent values and then by `options`. Raises `ApiError` if one is refused."""
        self._check_limits(settings)
        sent = {name: value for name in _OWN if (value := getattr(self, name)) is not None}
        sent |= self.sent_options(vocab_size)
        if "structured_output" not in options:
            sent["structured_output"] = self.structured_output
        try:
            return replace(defaults, **{**sent, **options})
        except ValueError as error:
            raise ApiError(400, str(error), param=named_in(str(error), type(self))) from error

    def _check_limits(self, settings: ServerSettings) -> None:
        self.check_limits(n=settings.max_n, prompt_logprobs=settings.max_logprobs)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is given, but stream is not true", param="stream_options")


_CONVERTED = {"logit_bias", "seed", "truncate_prompt_tokens"}
_OPTIONS = {field.name for field in fields(SamplingParams)} - _CONVERTED
_SHARED = SharedSamplingFields.model_fields.keys() & _OPTIONS
_OWN = SamplingFields.model_fields.keys() & _OPTIONS - _SHARED
"""Fields whose values `SamplingParams` takes as they are."""


def _token_biases(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    for key in biases:
        if not re.fullmatch("0|[1-9][0-9]{0,8}", key) or int(key) >= vocab_size:
            message = f"logit_bias has {key[:100]!r}; its keys must be token ids from 0 to {vocab_size - 1}, as text"
            raise ApiError(400, message, param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def named_in(message: str, owner: type[StrictModel]) -> str | None:
    """Return the field of a request that a message of `SamplingParams` is about."""
    match = re.match(r"(?:a (?:member|token id) of )?(\w+)", message)
    return match[1] if match and match[1] in owner.model_fields else None

"""The request fields shared by OpenAI's completions and chats: sampling, and the form of the text, with synonyms. The
engine decides whether a schema or a grammar can be enforced.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from inflight.contracts.api.structured_output import StructuredOutput
from inflight.server.serving.request_fields import OPTIONS, SharedSamplingFields, structured
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import Many, StrictModel

MAX_STOP_STRINGS = 64
"""Most stop strings: every token's text is searched for each."""

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
"""Fields that other servers of this API support, with the values that have no effect."""


IGNORED = frozenset({"guided_decoding_backend", "service_tier", "store"})
"""Those of these fields that do not affect the result."""


class StreamOptions(StrictModel):
    """Additional content of a stream.

    Attributes:
        include_usage: end with a chunk that has the usage.
        continuous_usage_stats: send the usage so far with every chunk.
    """

    NOT_SUPPORTED: ClassVar = {"include_obfuscation": (False,)}
    IGNORED: ClassVar = {"include_obfuscation"}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_EXACT = ConfigDict(extra="forbid", strict=True)
Choice = Annotated[Many[str], Field(min_length=1)]


# Dicts instead of models, because models have methods `schema` and `json`.
@with_config(_EXACT)
class JsonSchema(TypedDict):
    """A JSON schema as OpenAI wraps it. It is always enforced, whatever `strict` is."""

    schema: dict[str, Any]
    name: NotRequired[str | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


@with_config(_EXACT)
class StructuredOutputs(TypedDict, total=False):
    """vLLM's `structured_outputs`; `exact_schema` is ours (see `StructuredOutput`)."""

    json: str | dict[str, Any] | None
    json_object: bool | None
    regex: str | None
    choice: Choice | None
    grammar: str | None
    exact_schema: bool | None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def wanted(self) -> tuple[str, Any]:
        """The kind of structured output and its value; None: free text. Raises `ApiError`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            missing = "has no json_schema" if self.json_schema is None else "has a json_schema, too"
            message = f"response_format is of type {self.type!r} and {missing}"
            raise ApiError(400, message, param="response_format")
        if self.json_schema is not None:
            return "json", self.json_schema["schema"]
        return "json_object", True if self.type == "json_object" else None


class OutputFormatFields(StrictModel):
    """The form of the whole text.

    Attributes:
        response_format: OpenAI's field.
        structured_outputs: vLLM's field.
        guided_json, guided_regex, guided_choice, guided_grammar: the fields of older versions of vLLM.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The value for `SamplingParams`. Raises `ApiError` if several fields are given or one is invalid."""
        given = [each for each in self._given() if each[2] is not None and each[2] is not False]
        if not given:
            return None
        if len(given) > 1:
            message = f"{' and '.join(name for name, *_ in given)} are given; a text can follow only one of them"
            raise ApiError(400, message, param=given[1][0].partition(".")[0])
        ((name, kind, value),) = given
        if kind == "json":
            kind, value = "json_schema", value if isinstance(value, str) else json.dumps(value)
        options: dict[str, Any] = {kind: value}
        if self.structured_outputs is not None and self.structured_outputs.get("exact_schema"):
            options["exact_schema"] = name.startswith("structured_outputs.")
        return structured(name, name.partition(".")[0], **options)

    def _given(self) -> Iterator[tuple[str, str, Any]]:
        """Yield each field's name, kind of structured output, and value."""
        if self.response_format is not None:
            yield "response_format", *self.response_format.wanted
        for kind in ("json", "regex", "choice", "grammar"):
            yield f"guided_{kind}", kind, getattr(self, f"guided_{kind}")
        for kind, value in (self.structured_outputs or {}).items():
            if kind != "exact_schema":
                yield f"structured_outputs.{kind}", kind, value


class SamplingFields(OutputFormatFields, SharedSamplingFields):
    """The fields of completions and chats."""

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

    def sent_options(self, vocab_size: int) -> dict[str, Any]:
        sent = {name: value for name in _OWN if (value := getattr(self, name)) is not None}
        return {**sent, **super().sent_options(vocab_size), "structured_output": self.structured_output}

    def check(self, settings: ServerSettings) -> None:
        """Raise `ApiError` for fields that contradict each other or exceed the operator's limits."""
        self.check_limits(n=settings.max_n, prompt_logprobs=settings.max_logprobs)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is given, but stream is not true", param="stream_options")


_OWN = SamplingFields.model_fields.keys() & OPTIONS - SharedSamplingFields.model_fields.keys()

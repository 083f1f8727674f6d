"""What `/v1/responses` takes: OpenAI's form of input items, and the messages that they are for the chat template.

Decides how items become messages. Knows no template, and nothing of earlier responses.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field, model_validator, with_config
from typing_extensions import TypedDict

from inflight.options import check_integer
from inflight.params import MAX_COUNT, SamplingParams
from inflight.server.api_errors import ApiError
from inflight.server.chunks import to_json
from inflight.server.settings import ServerSettings
from inflight.server.strict_model import Many, StrictModel, refusal
from inflight.structured_output import StructuredOutput

Chat: TypeAlias = tuple[Mapping[str, str], ...]
"""Messages with a role and a content, as templates take them."""

LOGPROBS = "message.output_text.logprobs"


class TextPart(StrictModel):
    """A part of a message's content; an earlier answer's may come with what that told about it."""

    NOT_SUPPORTED: ClassVar = {"annotations": ([],), "prompt_cache_breakpoint": ()}

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(kind := given.get("type"), str):
            _refuse_type(kind, ("input_text", "output_text"), "parts")
        return given


class InputItem(StrictModel):
    """A message. (`id` and `status` are what an earlier answer had.)"""

    NOT_SUPPORTED: ClassVar = {"phase": ()}

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[TextPart]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(kind := given.get("type"), str):
            _refuse_type(kind, ("message",), "items")
        return given

    @property
    def text(self) -> str:
        """The content, its parts in lines of their own."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    @property
    def message(self) -> dict[str, str]:
        """As templates take it: developers are their "system"."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


def _refuse_type(kind: str, accepted: tuple[str, ...], of: str) -> None:
    if kind not in accepted:
        allowed = " or ".join(map(repr, accepted))
        message = f"the type is {reprlib.repr(kind)}; this server takes {of} of type {allowed} only"
        raise refusal("unsupported_content", "type", message)


@with_config(ConfigDict(extra="forbid", strict=True))
class Format(TypedDict, total=False):  # and not a model: those have a method `schema`
    """What the text must be: anything, any JSON object, or JSON of a schema (it is enforced, whatever `strict` is)."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None
    description: str | None
    schema: dict[str, Any] | None
    strict: bool | None


class TextConfig(StrictModel):
    """How the text is to be."""

    NOT_SUPPORTED: ClassVar = {"verbosity": ("medium",)}

    format: Format | None = None

    @property
    def structured_output(self) -> StructuredOutput | None:
        """As `SamplingParams` has it. Raises `ApiError`."""
        given = self.format or {}
        schema = given.get("schema")
        if (given.get("type") == "json_schema") != (schema is not None):
            message = "text.format must have a schema if it is of type 'json_schema', and only then"
            raise ApiError(400, message, param="text.format")
        try:
            if schema is not None:
                return StructuredOutput(json_schema=to_json(schema).decode())
            return StructuredOutput(json_object=True) if given.get("type") == "json_object" else None
        except ValueError as error:
            raise ApiError(400, f"text.format: {error}", param="text.format") from error


class StreamOptions(StrictModel):
    """Nothing that this server has."""

    NOT_SUPPORTED: ClassVar = {"include_obfuscation": (False,)}


class ResponsesRequest(StrictModel):
    """The body of a request.

    Attributes:
        instructions: what the model is told before all messages; not handed on to the next response.
        previous_response_id: of the response whose conversation this one goes on with.
        max_output_tokens: null: until a stop or the end of the context.
        store: whether the response is kept for a while, to be got or gone on with; null: yes.
        include: "message.output_text.logprobs" tells each token's log-probability; the others are about what answers of
            this server never have.
        top_logprobs: how many of the likeliest tokens are told besides at each place.
        truncation: "auto": if the conversation does not fit into the context, its oldest turns are left out.
    """

    NOT_SUPPORTED: ClassVar = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "parallel_tool_calls": (True, False),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "reasoning": ({}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None}),
        "service_tier": ("auto", "default"),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
    }

    model: str | None = None
    input: str | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: (
        Many[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = None
    # For the caller's own use: nothing here depends on them.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def messages(self) -> Chat:
        """The input, without instructions."""
        if isinstance(self.input, str):
            return ({"role": "user", "content": self.input},)
        return tuple(item.message for item in self.input)

    @property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams` says it."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def check(self, settings: ServerSettings) -> None:
        """Raise `ApiError` for what does not go together, or beyond the operator's limits."""
        limit, number = settings.max_logprobs, self.top_logprobs or 0
        if number > limit:
            message = f"top_logprobs is {number}; this server takes at most {limit}"
            raise ApiError(400, message, param="top_logprobs")
        if number and self.num_logprobs is None:
            message = f"top_logprobs is given, but include has no {LOGPROBS!r}"
            raise ApiError(400, message, param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is given, but stream is not true", param="stream_options")

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """The model's `defaults`, changed by what was sent. Raises `ApiError` for what is out of range."""
        sent = {name: value for name in ("temperature", "top_p") if (value := getattr(self, name)) is not None}
        try:
            if self.max_output_tokens is not None:
                check_integer("max_output_tokens", self.max_output_tokens, 1, MAX_COUNT)
            return replace(
                defaults,
                **sent,
                n=1,
                min_tokens=0,
                max_tokens=self.max_output_tokens,
                logprobs=self.num_logprobs,
                structured_output=None if self.text is None else self.text.structured_output,
            )
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).partition(" ")[0]) from error

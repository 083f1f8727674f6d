"""What `/v1/messages` takes: Anthropic's form of a chat, and what of it the chat template is given.

Decides how blocks and turns become messages that templates know. Knows no template.
"""

from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from inflight.params import SamplingParams
from inflight.server.api_errors import ApiError
from inflight.server.chat_request import TextPart
from inflight.server.chunks import to_json
from inflight.server.sampling_fields import MAX_STOP_STRINGS
from inflight.server.strict_model import Many, StrictModel
from inflight.structured_output import StructuredOutput


class CacheControl(StrictModel):
    """A wish that nothing depends on: prefixes are cached anyway, for as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(TextPart):
    """A block of text."""

    NOT_SUPPORTED: ClassVar = {"citations": ([],)}

    cache_control: CacheControl | None = None


Content = str | Many[TextBlock]


def text_of(content: Content) -> str:
    """The text of a content, its blocks in lines of their own."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class Turn(StrictModel):
    """A message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Metadata(StrictModel):
    """Who asks. For the caller's own use: nothing here depends on it."""

    user_id: str | None = None


@with_config(ConfigDict(extra="forbid", strict=True))
class JsonFormat(TypedDict):  # and not a model: those have a method `schema`
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(StrictModel):
    """What the answer must look like."""

    NOT_SUPPORTED: ClassVar = {"effort": ()}

    format: JsonFormat | None = None


class CountRequest(StrictModel):
    """The body of a request that only wants to know how long its prompt is.

    Attributes:
        system: what the model is told before all messages.
    """

    NOT_SUPPORTED: ClassVar = {
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "thinking": ({"type": "disabled"},),
        "tool_choice": ({"type": "auto"}, {"type": "none"}),
        "tools": ([],),
        "user_profile_id": (),
        "workspace_id": (),
    }

    model: str | None = None
    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: Content | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None

    @property
    def num_characters(self) -> int:
        return sum(len(text_of(turn.content)) for turn in self.messages) + len(text_of(self.system or ""))

    def for_template(self) -> dict[str, Any]:
        """The chat as a prompt of `AsyncLLM`. Turns of one role that follow each other are one; a last turn that is
        the assistant's is left open for the model to go on with."""
        told = [] if self.system is None else [("system", text_of(self.system))]
        turns = [*told, *((turn.role, text_of(turn.content)) for turn in self.messages)]
        messages = [
            {"role": role, "content": "\n".join(text for _, text in group)}
            for role, group in groupby(turns, key=lambda turn: turn[0])
        ]
        is_open = messages[-1]["role"] == "assistant"
        return {"messages": messages, "add_generation_prompt": not is_open, "continue_final_message": is_open}


class MessagesRequest(CountRequest):
    """The body of a request.

    Attributes:
        stop_sequences: strings that end the text; it is cut just before the first that appears.
    """

    NOT_SUPPORTED: ClassVar = {**CountRequest.NOT_SUPPORTED, "service_tier": ("auto", "standard_only")}

    max_tokens: int
    stop_sequences: Annotated[Many[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)] | None = (
        None
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Metadata | None = None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """The model's `defaults`, changed by what was sent. Raises `ApiError` for what is out of range."""
        sent = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            sent["stop"] = self.stop_sequences
        try:
            if self.output_config is not None and self.output_config.format is not None:
                schema = to_json(self.output_config.format["schema"]).decode()
                sent["structured_output"] = StructuredOutput(json_schema=schema)
            return replace(defaults, **sent, n=1, max_tokens=self.max_tokens, min_tokens=0)
        except ValueError as error:
            raise ApiError(400, str(error)) from error

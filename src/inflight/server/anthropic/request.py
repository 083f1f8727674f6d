"""The request of `/v1/messages`, and the conversion of its blocks, turns and tools to OpenAI's form for chat templates.
Knows no template.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, Tag, with_config
from typing_extensions import TypedDict

from inflight.contracts.api.params import MAX_COUNT
from inflight.contracts.api.structured_output import StructuredOutput
from inflight.server.chat_format.chat_template import DEFAULT_REASONING, MAX_EFFORT, ReasoningOptions
from inflight.server.chat_format.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    ToolFields,
    with_names,
)
from inflight.server.openai.chat_request import FIELDS_OF_CHATS, MAX_MESSAGES, template_variables, text_of
from inflight.server.openai.sampling_fields import MAX_STOP_STRINGS
from inflight.server.serving.request_fields import ChatBody, structured
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import to_json
from inflight.server.wire.strict_model import (
    READING,
    HistoryModel,
    Many,
    StrictModel,
    by_type,
    leaving_out,
    of_type,
    text_part,
)


class Cached(StrictModel):
    """An object that may have `cache_control`, which has no effect: the prefix cache keeps prefixes anyway."""

    cache_control: dict[str, Any] | None = None


class TextBlock(HistoryModel, Cached):
    """A block of text."""

    NOT_SUPPORTED: ClassVar = {"citations": ([],)}

    type: Literal["text"]
    text: str


Text = str | Many[Annotated[TextBlock, of_type("parts", "text", otherwise=text_part("text"))]]


class ToolUseBlock(HistoryModel, Cached):
    """A call that the assistant made in an earlier turn."""

    NOT_SUPPORTED: ClassVar = {"caller": ({"type": "direct"},)}

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = None


class ToolResultBlock(HistoryModel, Cached):
    """The result of a tool call. (Templates lack `is_error`, so the text itself must say so.)"""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None


class ThinkingBlock(HistoryModel, Cached):
    """Reasoning of an earlier turn. Most chat templates drop it unless calls follow."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("#text")]
    | Annotated[ThinkingBlock, Tag("#thinking")]
    | Annotated[ToolUseBlock, Tag("#tool_use")]
    | Annotated[ToolResultBlock, Tag("#tool_result")],
    by_type("text"),
    of_type("parts", "text", "thinking", "tool_use", "tool_result", otherwise=text_part("text")),
]
BLOCKS_OF = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""The blocks that messages of each role may contain."""


class Turn(HistoryModel):
    """A message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]

    def for_template(self, where: str) -> Iterator[dict[str, Any]]:
        """Yield each block as a separate message, of the role that has such blocks. In strict mode, raises `ApiError`
        for blocks that this message's role cannot have."""
        if not self.content or isinstance(self.content, str):
            yield {"role": self.role, "content": self.content or ""}
            return
        for block in self.content:
            if not isinstance(block, BLOCKS_OF[self.role]):
                message = f"{where} is of the role {self.role!r}, which has no blocks of type {block.type!r}"
                if READING.get().is_strict:
                    raise ApiError(400, message, param=where)
                READING.get().ignore("role")
            match block:
                case TextBlock():
                    yield {"role": self.role, "content": block.text}
                case ThinkingBlock():
                    yield {"role": "assistant", "content": "", "reasoning_content": block.thinking}
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": {} if block.input is None else block.input}
                    call = {"id": block.id, "type": "function", "function": function}
                    yield {"role": "assistant", "content": "", "tool_calls": [call]}
                case ToolResultBlock():
                    content = text_of(block.content)
                    yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge consecutive messages of one role into one, except tool results."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged and merged[-1]["role"] == message["role"] != "tool" else None
        if last is None:
            merged.append(message)
            continue
        last["content"] = "\n".join(filter(None, (last["content"], message["content"])))
        if reasoning := [each["reasoning_content"] for each in (last, message) if "reasoning_content" in each]:
            last["reasoning_content"] = "\n\n".join(reasoning)
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            last["tool_calls"] = calls
    return merged


class MessagesTool(Cached):
    """A function that the client provides.

    Attributes:
        input_schema: the JSON schema of its arguments, an object.
        strict: whether arguments must always follow the schema; null: only if the request requires a tool call.
    """

    NOT_SUPPORTED: ClassVar = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "eager_input_streaming": (True, False),
        "input_examples": ([],),
    }
    IGNORED: ClassVar = set(NOT_SUPPORTED)

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @property
    def tool(self) -> Tool:
        """In OpenAI's form."""
        function = FunctionDefinition(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


NO_OTHER_TOOLS = leaving_out("tools", "custom", absent="custom")
"""Tools run or defined by Anthropic's servers are left out of the prompt, so the model never calls them."""

AnyTool = Annotated[MessagesTool, of_type("tools", "custom", absent="custom")]


class ToolChoice(StrictModel):
    """Whether a tool must be called, and which: "any": at least one of the tools; "tool": the named one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> Literal["none", "auto", "required"] | NamedTool:
        """In OpenAI's form. Raises `ApiError`."""
        if (self.type == "tool") != (self.name is not None):
            message = "tool_choice must have a name if it is of type 'tool', and only then"
            raise ApiError(400, message, param="tool_choice")
        if self.name is not None:
            return NamedTool(type="function", function=FunctionName(name=self.name))
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class Metadata(StrictModel):
    """Data about the user, for the client's own use; nothing here depends on it."""

    MAY_HAVE_MORE = True

    user_id: str | None = None


@with_config(ConfigDict(extra="forbid", strict=True))
class JsonFormat(TypedDict):  # not a model, because models have a method `schema`
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(StrictModel):
    """The form that the answer must have."""

    IGNORED: ClassVar = {"task_budget"}

    effort: Annotated[str, Field(max_length=MAX_EFFORT)] | None = None
    format: JsonFormat | None = None


class ThinkingConfig(StrictModel):
    """Whether the model should reason, if its chat template supports it, and whether the answer includes it.

    Attributes:
        type: "adaptive" and "between_tools": the chat template's default.
        budget_tokens: the most reasoning tokens.
        display: "omitted": blocks of reasoning are empty.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class CountRequest(Cached):
    """The body of a request that only counts its prompt's tokens.

    Attributes:
        system: the system prompt, which comes before all messages.
        chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
    """

    NOT_SUPPORTED: ClassVar = {
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    }
    IGNORED: ClassVar = {
        *("betas", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id"),
        "workspace_id",
    }
    MAY_HAVE_MORE = True
    OF_OTHERS: ClassVar = FIELDS_OF_CHATS

    model: str | None = None
    messages: Annotated[Many[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | None = None
    tools: Annotated[Many[AnyTool], Field(max_length=MAX_TOOLS), NO_OTHER_TOOLS] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def reasoning_options(self) -> ReasoningOptions:
        """The request's reasoning options."""
        kind = None if self.thinking is None else self.thinking.type
        is_enabled = {"enabled": True, "disabled": False}.get(kind or "")
        effort = None if self.output_config is None else self.output_config.effort
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if is_enabled is None and effort is None and budget is None:
            return DEFAULT_REASONING
        return ReasoningOptions(is_enabled, effort, budget, "thinking")

    @property
    def tool_fields(self) -> ToolFields:
        """The fields about tools, in OpenAI's form. Raises `ApiError`."""
        choice = self.tool_choice
        return ToolFields(
            tools=[each.tool for each in self.tools or []],
            tool_choice=None if choice is None else choice.choice,
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        )

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The structured output requested. Raises `ApiError`."""
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = to_json(self.output_config.format["schema"]).decode()
        return structured("output_config.format", "output_config", json_schema=schema)

    def for_template(self, settings: ServerSettings) -> dict[str, Any]:
        """Return the chat as a prompt of `AsyncLLM`, with its tools. Consecutive turns of one role are merged; if the
        last turn is the assistant's, it is left open for the model to continue. Raises `ApiError`."""
        system = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        turns = (message for i, turn in enumerate(self.messages) for message in turn.for_template(f"messages[{i}]"))
        messages = with_names(_merged([*system, *turns]))
        is_open = bool(messages) and messages[-1]["role"] == "assistant"
        if is_open and messages[-1].get("tool_calls"):
            if READING.get().is_strict:
                raise ApiError(400, "messages end with calls; their results must follow", param="messages")
            is_open = False
        prompt = {"messages": messages, "add_generation_prompt": not is_open, "continue_final_message": is_open}
        return {**prompt, **template_variables(self.chat_template_kwargs), **self.tool_fields.template_tools}


StopSequence = Annotated[str, Field(min_length=1)]


class MessagesRequest(CountRequest, ChatBody):
    """The body of a request.

    Attributes:
        stop_sequences: strings that end the text; it is cut just before the first that appears.
    """

    NOT_SUPPORTED: ClassVar = {**CountRequest.NOT_SUPPORTED, "service_tier": ("auto", "standard_only")}
    IGNORED: ClassVar = CountRequest.IGNORED | {"service_tier"}

    max_tokens: int
    stop_sequences: Annotated[Many[StopSequence], Field(max_length=MAX_STOP_STRINGS)] | None = None
    metadata: Metadata | None = None

    def sent_options(self, vocab_size: int) -> dict[str, Any]:
        sent = {"min_tokens": 0, **super().sent_options(vocab_size), "n": 1, "max_tokens": self.max_tokens}
        stop = {"stop": self.stop_sequences} if self.stop_sequences else {}
        return {**sent, **stop, "structured_output": self.structured_output}

"""The request of `/v1/responses`, and the conversion of its input items to messages for chat templates. Knows no
template and no earlier responses.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias
from uuid import uuid4

from msgspec import Meta
from pydantic import BeforeValidator, ConfigDict, Field, Tag, TypeAdapter, with_config
from typing_extensions import TypedDict

from inflight.contracts.api.options import check
from inflight.contracts.api.params import MAX_COUNT
from inflight.contracts.api.structured_output import StructuredOutput
from inflight.server.chat_format.chat_template import MAX_EFFORT, ReasoningOptions, reasoning_options_from
from inflight.server.chat_format.tools import (
    MAX_TOOLS,
    NO_OTHER_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    ToolFields,
    call_for_template,
)
from inflight.server.openai.chat_request import FIELDS_OF_CHATS, MAX_MESSAGES, template_variables, text_of
from inflight.server.openai.sampling_fields import MAX_METADATA, MAX_STOP_STRINGS
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

Chat: TypeAlias = tuple[Mapping[str, Any], ...]
"""Messages with a role and a content, as templates expect them."""

LOGPROBS = "message.output_text.logprobs"
ENCODED = "reasoning.encrypted_content"
_ENCODING = "inflight:"
"""The prefix of reasoning encoded by this server; only its provider can read any other."""


class TextPart(HistoryModel):
    """A part of a message's content; a part of an earlier answer may come with its log-probabilities."""

    NOT_SUPPORTED: ClassVar = {"annotations": ([],), "prompt_cache_breakpoint": ()}

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[Any] | None = None


Text = str | Many[Annotated[TextPart, of_type("parts", "input_text", "output_text", otherwise=text_part("input_text"))]]


class Item(HistoryModel):
    """The base of items; those from an earlier answer have `id` and `status`."""

    id: str | None = None
    status: str | None = None


class MessageItem(Item):
    """A message."""

    NOT_SUPPORTED: ClassVar = {"phase": ()}

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text

    def for_template(self, where: str) -> dict[str, Any]:
        """Return the message as templates expect it: "developer" becomes "system"."""
        return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}


class CallItem(Item):
    """A call that the model made in an earlier turn.

    Attributes:
        namespace: the one of the tool.
        parsed_arguments: the arguments again, as `openai`'s client sends them back; ignored.
    """

    # (The client's own `model_dump` of an answer's item writes `async` as `async_`.)
    NOT_SUPPORTED: ClassVar = {"caller": (), "async": (False,), "async_": (False,)}

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    parsed_arguments: Any = None

    def for_template(self, where: str) -> dict[str, Any]:
        """Return the call as a message without text."""
        call = call_for_template(self.call_id, qualified(self.namespace, self.name), self.arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class CallOutputItem(Item):
    """The result of a tool call."""

    NOT_SUPPORTED: ClassVar = {"caller": ()}

    type: Literal["function_call_output"]
    call_id: str
    output: Text

    def for_template(self, where: str) -> dict[str, Any]:
        """Return the result as a tool's message."""
        return {"role": "tool", "content": text_of(self.output), "tool_call_id": self.call_id}


class ReasoningPart(HistoryModel):
    """A part of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


_ReasoningParts = Many[
    Annotated[ReasoningPart, of_type("parts", "reasoning_text", "summary_text", otherwise=text_part("reasoning_text"))]
]


class ReasoningItem(Item):
    """Reasoning of an earlier turn. Most chat templates drop it unless calls follow."""

    type: Literal["reasoning"]
    summary: _ReasoningParts | None = None
    content: _ReasoningParts | None = None
    encrypted_content: str | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        """Return the reasoning as a message without text."""
        reasoning = "\n\n".join(part.text for part in self.content or ())
        reasoning = reasoning or _decoded_reasoning(self.encrypted_content or "")
        reasoning = reasoning or "\n\n".join(part.text for part in self.summary or ())
        return {"role": "assistant", "content": "", **({"reasoning_content": reasoning} if reasoning else {})}


SUMMARY = "[summary of the conversation so far]\n"


class CompactionItem(Item):
    """A compacted part of the conversation."""

    type: Literal["compaction"]
    encrypted_content: str

    def for_template(self, where: str) -> dict[str, Any]:
        """Return the summary as the user's message."""
        summary = _decoded_reasoning(self.encrypted_content) or "omitted: only its provider can read it"
        return {"role": "user", "content": SUMMARY + summary}


def encoded_reasoning(text: str) -> str:
    """Encode reasoning so that clients send it back unchanged, even those that drop its text. It is not encrypted."""
    return _ENCODING + base64.b64encode(text.encode(errors="replace")).decode()


def _decoded_reasoning(encoded: str) -> str:
    """Decode `encoded_reasoning`; "" for anything else."""
    try:
        given = encoded.removeprefix(_ENCODING) if encoded.startswith(_ENCODING) else ""
        return base64.b64decode(given, validate=True).decode()
    except ValueError:
        return ""


_TYPES = ("message", "reasoning", "function_call", "function_call_output", "compaction")


def _message_item(text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of an unknown type as a message: what has a role is one already."""
    if "role" in given:
        return {**given, "type": "message"}
    is_output = str(given.get("type")).endswith("_output")
    return {"type": "message", "role": "user" if is_output else "assistant", "content": text}


InputItem = Annotated[
    Annotated[MessageItem, Tag("#message")]
    | Annotated[ReasoningItem, Tag("#reasoning")]
    | Annotated[CallItem, Tag("#function_call")]
    | Annotated[CallOutputItem, Tag("#function_call_output")]
    | Annotated[CompactionItem, Tag("#compaction")],
    by_type("message"),
    of_type("items", *_TYPES, absent="message", otherwise=_message_item),
]


InputItems = Annotated[Many[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
"""Reads the items of a stored conversation."""


def qualified(namespace: str | None, name: str) -> str:
    """Return a function's name for the model. (Some of Codex's namespaces end with the underscores.)"""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def messages_of(items: Sequence[InputItem]) -> Chat:
    """Return items as messages. Raises `ApiError`."""
    messages = [item.for_template(f"input[{i}]") for i, item in enumerate(items)]
    kept = [message for message in messages if message.keys() - {"role"} != {"content"} or message["content"]]
    return tuple(kept or (() if READING.get().is_strict else messages[-1:]))


def items_of(given: str | Sequence[InputItem]) -> Sequence[InputItem]:
    """Return an input as items."""
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else given


def stored_items(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return items with all that clients expect of them: ids, and contents in parts."""
    stored = []
    for item in items:
        shown = {"type": "message", "status": "completed", **item.model_dump(exclude_none=True)}
        shown.setdefault("id", f"item_{uuid4().hex}")
        if isinstance(item, MessageItem) and isinstance(item.content, str):
            of_output = {"type": "output_text", "annotations": [], "logprobs": []}
            kind = of_output if item.role == "assistant" else {"type": "input_text"}
            shown["content"] = [{**kind, "text": item.content}]
        stored.append(shown)
    return stored


ConversationId = Annotated[
    str, BeforeValidator(lambda given: given["id"] if isinstance(given, dict) and given.keys() == {"id"} else given)
]


class FunctionTool(FunctionDefinition):
    """A function that the client provides, perhaps in a namespace."""

    NOT_SUPPORTED: ClassVar = {"allowed_callers": (), "async": (False,), "defer_loading": (False,), "output_schema": ()}
    IGNORED: ClassVar = {"allowed_callers", "defer_loading", "output_schema"}

    type: Literal["function"]
    namespace: str | None = None

    @property
    def functions(self) -> list["FunctionTool"]:
        return [self]

    @property
    def tool(self) -> Tool:
        """In the form of chat completions, under the model's name for it."""
        known = self.model_copy(update={"name": qualified(self.namespace, self.name)})
        return Tool(type="function", function=known)


class NamespaceTool(StrictModel):
    """Functions of one origin, such as an MCP server."""

    NOT_SUPPORTED: ClassVar = {"description": ("",)}
    IGNORED: ClassVar = {"description"}

    type: Literal["namespace"]
    name: str
    tools: Annotated[
        Many[Annotated[FunctionTool, of_type("tools", "function")]], Field(max_length=MAX_TOOLS), NO_OTHER_TOOLS
    ]

    @property
    def functions(self) -> list[FunctionTool]:
        return [each.model_copy(update={"namespace": self.name}) for each in self.tools]


NO_OTHER_KINDS = leaving_out("tools", "function", "namespace")

AnyTool = Annotated[
    Annotated[FunctionTool, Tag("#function")] | Annotated[NamespaceTool, Tag("#namespace")],
    by_type("function"),
    of_type("tools", "function", "namespace"),
]


class NamedFunction(StrictModel):
    """The function that must be called."""

    type: Literal["function"]
    name: str

    @property
    def choice(self) -> NamedTool:
        """The same in the form of chat completions."""
        return NamedTool(type="function", function=FunctionName(name=self.name))


class AllowedFunctions(StrictModel):
    """The functions that may be called; with "required", at least one of them is."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Many[NamedFunction], Field(max_length=MAX_TOOLS)]

    @property
    def choice(self) -> AllowedToolsChoice:
        """The same in the form of chat completions."""
        allowed = AllowedTools(mode=self.mode, tools=[tool.choice for tool in self.tools])
        return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)


FunctionChoice = Annotated[
    Annotated[NamedFunction, Tag("#function")] | Annotated[AllowedFunctions, Tag("#allowed_tools")], by_type("function")
]


@with_config(ConfigDict(extra="forbid", strict=True))
class Format(TypedDict, total=False):  # not a model, because models have a method `schema`
    """The form of the text: free, any JSON object, or JSON that follows a schema (enforced, whatever `strict` is)."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None
    description: str | None
    schema: dict[str, Any] | None
    strict: bool | None


class TextConfig(StrictModel):
    """The options for the text."""

    NOT_SUPPORTED: ClassVar = {"verbosity": ("medium",)}
    IGNORED: ClassVar = {"verbosity"}

    format: Format | None = None

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The value for `SamplingParams`. Raises `ApiError`."""
        given = self.format or {}
        schema = given.get("schema")
        if (given.get("type") == "json_schema") != (schema is not None):
            message = "text.format must have a schema if it is of type 'json_schema', and only then"
            raise ApiError(400, message, param="text.format")
        if schema is not None:
            return structured("text.format", "text.format", json_schema=to_json(schema).decode())
        return StructuredOutput(json_object=True) if given.get("type") == "json_object" else None


class StreamOptions(StrictModel):
    """Stream options, of which this server implements none."""

    NOT_SUPPORTED: ClassVar = {"include_obfuscation": (False,)}
    IGNORED: ClassVar = {"include_obfuscation"}


Addition: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Accepted values of `include`."""


class Reasoning(StrictModel):
    """Reasoning options.

    Attributes:
        effort: how much, if the chat template supports it; "none": not at all.
    """

    NOT_SUPPORTED: ClassVar = {"summary": (), "generate_summary": (), "context": ("auto",), "mode": ("standard",)}
    IGNORED: ClassVar = set(NOT_SUPPORTED)

    effort: Annotated[str, Field(max_length=MAX_EFFORT)] | None = None


class ResponsesRequest(ChatBody):
    """The body of a request.

    Attributes:
        instructions: the system prompt, which comes before all messages; the next response does not inherit it.
        previous_response_id: the response whose conversation this one continues.
        conversation: the stored conversation that this response continues, and to which it is added.
        background: answer at once, and run whether or not the client stays.
        max_output_tokens: null: until a stop or the end of the context.
        store: whether the response is kept for a while, to be retrieved or continued; null: yes.
        chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
        thinking_token_budget: the most reasoning tokens; 0: no reasoning.
        include: "message.output_text.logprobs" returns each token's log-probability; the other values concern things
            that this server's answers never contain.
        top_logprobs: how many of the likeliest tokens are returned in addition at each position.
        truncation: "auto": drop the oldest turns of a conversation that does not fit into the context.
    """

    NOT_SUPPORTED: ClassVar = {
        "access_programs": (),
        "background_options": (),
        "context_management": ([],),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "service_tier": ("auto", "default"),
    }
    IGNORED: ClassVar = {
        *("access_programs", "client_metadata", "context_management", "max_tool_calls", "moderation"),
        *("prompt_cache_options", "prompt_cache_retention", "service_tier"),
    }
    MAY_HAVE_MORE = True
    OF_OTHERS: ClassVar = FIELDS_OF_CHATS

    input: str | InputItems
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: ConversationId | None = None
    background: bool | None = None
    tools: Annotated[Many[AnyTool], Field(max_length=MAX_TOOLS), NO_OTHER_KINDS] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    stop: str | Annotated[Many[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Many[Addition] | None = None
    # For the client's own use; nothing here depends on them.
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def messages(self) -> Chat:
        """The input as messages, without instructions. Raises `ApiError`."""
        if isinstance(self.input, str):
            return ({"role": "user", "content": self.input},)
        return messages_of(self.input)

    @property
    def reasoning_options(self) -> ReasoningOptions:
        effort = None if self.reasoning is None else self.reasoning.effort
        return reasoning_options_from(effort, "reasoning", self.thinking_token_budget)

    @property
    def functions(self) -> list[FunctionTool]:
        """The functions among the tools. Raises `ApiError` if there are too many."""
        functions = [each for tool in self.tools or [] for each in tool.functions]
        if len(functions) > MAX_TOOLS:
            message = f"tools has {len(functions)} functions; this server takes at most {MAX_TOOLS}"
            raise ApiError(400, message, param="tools")
        return functions

    @property
    def tool_fields(self) -> ToolFields:
        """The fields about tools, in the form of chat completions."""
        return ToolFields(
            tools=[each.tool for each in self.functions],
            tool_choice=self.tool_choice
            if self.tool_choice is None or isinstance(self.tool_choice, str)
            else self.tool_choice.choice,
            parallel_tool_calls=self.parallel_tool_calls,
        )

    @property
    def structured_output(self) -> StructuredOutput | None:
        return None if self.text is None else self.text.structured_output

    @property
    def num_logprobs(self) -> int | None:
        """The value of `SamplingParams.logprobs`."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def check(self, settings: ServerSettings) -> None:
        self.check_limits(top_logprobs=settings.max_logprobs)
        if self.top_logprobs and self.num_logprobs is None:
            message = f"top_logprobs is given, but include has no {LOGPROBS!r}"
            raise ApiError(400, message, param="top_logprobs")
        if self.background and (self.store is False or self.stream):
            message = "background is true; such a response is stored, to be retrieved, and cannot be a stream"
            raise ApiError(400, message, param="background")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is given, but stream is not true", param="stream_options")

    def sent_options(self, vocab_size: int) -> dict[str, Any]:
        check("max_output_tokens", self.max_output_tokens, Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None)
        sent = {"min_tokens": 0, **super().sent_options(vocab_size), "n": 1, "max_tokens": self.max_output_tokens}
        stop = {} if self.stop is None else {"stop": self.stop}
        return {**sent, **stop, "logprobs": self.num_logprobs, "structured_output": self.structured_output}

    def for_template(self, settings: ServerSettings) -> dict[str, Any]:
        """Return the parts of an `AsyncLLM` prompt other than the messages."""
        variables = template_variables(self.chat_template_kwargs)
        return {"add_generation_prompt": True, **variables, **self.tool_fields.template_tools}

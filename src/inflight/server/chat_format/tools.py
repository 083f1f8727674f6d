"""Tools: the request fields about them, in OpenAI's form, and calls and results as chat templates expect them.

Refuses combinations that are invalid for any model. `answer_form` checks the model at hand.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import Many, StrictModel, by_type, leaving_out

MAX_TOOLS = 256

NO_OTHER_TOOLS = leaving_out("tools", "function")
"""Tools that are not functions are left out of the prompt, so the model never calls them. (If `tool_choice` demands
one, the request is refused.)"""


class FunctionDefinition(StrictModel):
    """A function that the client provides.

    Attributes:
        parameters: the JSON schema of its arguments, an object; null: it has none.
        strict: whether arguments must always follow the schema; null: only if the request requires a tool call.
    """

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool: a function is the only kind."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool for templates, without `strict`."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",  # some templates fail without one
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class FunctionName(StrictModel):
    """The name of a function."""

    name: str


class NamedTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """The callable tools; the prompt has all, so that it stays the same.

    Attributes:
        mode: "required": at least one of them is called.
    """

    mode: Literal["auto", "required"]
    tools: Annotated[Many[NamedTool], Field(max_length=MAX_TOOLS)]

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.tools]


class AllowedToolsChoice(StrictModel):
    """`AllowedTools` as a choice."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[NamedTool, Tag("#function")] | Annotated[AllowedToolsChoice, Tag("#allowed_tools")], by_type("function")
]


class ToolFields(StrictModel):
    """Tools, and how they may be used.

    Attributes:
        tool_choice: "none": the model neither sees nor calls tools; "auto" (null): the model decides; "required": at
            least one is called; or the one tool that must be called, or the tools that may be.
        parallel_tool_calls: whether there may be several calls; null: yes.
    """

    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS), NO_OTHER_TOOLS] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools in the prompt."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def template_tools(self) -> dict[str, Any]:
        """The template variables with the tools; empty without any."""
        tools = [tool.for_template() for tool in self.usable_tools]
        return {"tools": tools} if tools else {}

    @property
    def callable_tools(self) -> list[Tool]:
        """The usable tools that may be called."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.usable_tools if tool.function.name == self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedToolsChoice):
            names = self.tool_choice.allowed_tools.names
            return [tool for tool in self.usable_tools if tool.function.name in names]
        return self.usable_tools

    @property
    def is_call_required(self) -> bool:
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def may_call_several(self) -> bool:
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    def check_tools(self) -> None:
        """Raise `ApiError` for fields that contradict each other."""
        names = [tool.function.name for tool in self.tools or []]
        for name in names:
            if names.count(name) > 1:
                raise ApiError(400, f"tools has {name!r} more than once; names must differ", param="tools")
        if isinstance(self.tool_choice, AllowedToolsChoice):
            for name in self.tool_choice.allowed_tools.names:
                if name not in names:
                    raise ApiError(400, f"{name!r} is allowed, but it is not in tools", param="tool_choice")
        if self.is_call_required and not self.callable_tools:
            wanted = "a tool must be called"
            if isinstance(self.tool_choice, NamedTool):
                wanted = f"{self.tool_choice.function.name!r} must be called"
            known = f"only {', '.join(map(repr, names))}" if names else "no tools"
            raise ApiError(400, f"{wanted}, but tools has {known}", param="tool_choice")


def call_for_template(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    """Return a member of a message's `tool_calls`. Invalid JSON arguments stay text: a truncated call comes back with
    its tool's error, and refusing it would stop the agent."""
    try:
        parsed = json.loads(arguments or "{}")
        json.dumps(parsed, ensure_ascii=False).encode()  # half of a surrogate pair is no text for a tokenizer
    except (ValueError, RecursionError):
        parsed = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def with_calls_joined(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages; the assistant's consecutive calls, the text before them, and the reasoning before all
    become one message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined and joined[-1]["role"] == message["role"] == "assistant" else None
        if last is not None and "tool_calls" in message:
            joined[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        elif last is not None and last.keys() == {"role", "content", "reasoning_content"} and not last["content"]:
            reasoning = (last["reasoning_content"], message.get("reasoning_content"))
            joined[-1] = {**message, "reasoning_content": "\n\n".join(filter(None, reasoning))}
        else:
            joined.append(dict(message))
    return joined


def with_names(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages; tool results get the name of the called tool, which some templates need."""
    called: dict[str, str] = {}
    named = []
    for message in messages:
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = called.get(message.get("tool_call_id", ""))
        is_named = message["role"] == "tool" and name is not None and "name" not in message
        named.append({**message, "name": name} if is_named else dict(message))
    return named

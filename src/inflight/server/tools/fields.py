"""What a request may say of tools: which there are, and whether and which the model has to call.

Decides what is refused by itself. Whether the model can do it is `tool_use`'s to say.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import Many, StrictModel

MAX_TOOLS = 256


class FunctionDefinition(StrictModel):
    """A function of the client's.

    Attributes:
        parameters: the JSON schema of its arguments, an object; null: it has none.
        strict: whether arguments must follow it wherever the function is called; null: if it was asked for that some
            function be called.
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
        """As templates take it. `strict` is nothing that the model has to know."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",  # some templates fail without one
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class FunctionName(StrictModel):
    """Which function."""

    name: str


class NamedTool(StrictModel):
    """The tool that is to be called."""

    NOT_SUPPORTED: ClassVar = {"allowed_tools": ()}

    type: Literal["function"]
    function: FunctionName


class ToolFields(StrictModel):
    """Tools, and what to do with them.

    Attributes:
        tool_choice: "none": no tool is called, nor told of; "auto" (null): the model decides; "required": one is called
            at least; or the one that is called.
        parallel_tool_calls: whether there may be several calls; null: there may.
    """

    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """Those of them that may be called."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.usable_tools if tool.function.name == self.tool_choice.function.name]
        return self.usable_tools

    @property
    def is_call_required(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def may_call_several(self) -> bool:
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    def check_tools(self) -> None:
        """Raise `ApiError` for what does not go together."""
        names = [tool.function.name for tool in self.tools or []]
        for name in names:
            if names.count(name) > 1:
                raise ApiError(400, f"tools has {name!r} more than once; names must differ", param="tools")
        if self.is_call_required and not self.callable_tools:
            wanted = "a tool is to be called"
            if isinstance(self.tool_choice, NamedTool):
                wanted = f"{self.tool_choice.function.name!r} is to be called"
            known = f"only {', '.join(map(repr, names))}" if names else "no tools"
            raise ApiError(400, f"{wanted}, but tools has {known}", param="tool_choice")

"""`ToolUse`: what one request needs so that its model can call tools.

Decides which form calls have, when a grammar guarantees them, and what a model that does not know tools can still do.
Knows neither messages nor answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.contracts.errors import InvalidRequestError
from inflight.contracts.structured_output import StructuredOutput
from inflight.grammar.json_schema import checked_schema
from inflight.server.tools.call_format import CALL_FORMATS, PLAIN, CallFormat, format_of_template
from inflight.server.tools.call_parser import CallParser
from inflight.server.tools.fields import Tool, ToolFields
from inflight.server.tools.grammar import Schema, any_object, calls_grammar, schema_of
from inflight.server.wire.api_errors import ApiError
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request's texts are written and read.

    Attributes:
        names: of the tools that may be called.
        is_parallel: whether several calls may be made.
        structured_output: what the text has to be, calls included; None: it is free.
        is_guaranteed: whether that is what makes calls valid.
        shows_special_tokens: whether markers are special tokens, so that those must not be left out of the text.
    """

    call_format: CallFormat
    names: tuple[str, ...]
    is_parallel: bool
    structured_output: StructuredOutput | None
    shows_special_tokens: bool

    @property
    def is_guaranteed(self) -> bool:
        return self.structured_output is not None

    @property
    def sampling_options(self) -> dict[str, Any]:
        """What `SamplingParams` must say."""
        shown = {"skip_special_tokens": False} if self.shows_special_tokens else {}
        return {"structured_output": self.structured_output, **shown}

    def parser(self) -> CallParser:
        """For one text."""
        return CallParser(self.call_format, self.names, is_guaranteed=self.is_guaranteed, is_parallel=self.is_parallel)


def tool_use(
    asked: ToolFields,
    content: StructuredOutput | None,
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    parser_name: str | None = None,
) -> ToolUse | None:
    """What a request with these fields needs; None if no tool can be called.

    Args:
        content: what the request wants its text to be, if it is no call.
        chat_template: the request's own, instead of the tokenizer's.
        parser_name: the operator's word for how the model writes calls, one of `CALL_FORMATS`.

    Raises:
        ApiError: this model can't do it, or the schemas are no good.
    """
    asked.check_tools()
    if not asked.callable_tools:
        return None
    template = _template(tokenizer, chat_template)
    call_format = format_of_template(template) if parser_name is None else CALL_FORMATS[parser_name]
    if call_format is None:
        call_format = PLAIN
    if not asked.is_call_required:
        _refuse_what_is_not_told(template, call_format)
    tokens = _tokens(tokenizer, call_format)
    opaque = {marker: token_id for marker, token_id in tokens.items() if _is_opaque(marker, token_id, tokenizer)}
    return ToolUse(
        call_format,
        tuple(tool.function.name for tool in asked.callable_tools),
        asked.may_call_several,
        _structured(asked, content, call_format, opaque),
        not all(map(tokenizer.has_text, tokens.values())),
    )


def _template(tokenizer: Tokenizer, chat_template: str | None) -> str:
    if chat_template is not None:
        return chat_template
    template = tokenizer.inner.chat_template or ""
    if isinstance(template, dict):  # several by name, and the one for tools is called so
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def _refuse_what_is_not_told(template: str, call_format: CallFormat) -> None:
    """Whether to call is up to the model: it has to know of tools, and we have to know its calls."""
    if "tools" not in template:
        why = "this model's chat template does not tell the model of tools"
    elif call_format is PLAIN:
        why = "it is not known how this model writes calls (an operator can say it with --tool-call-parser)"
    else:
        return
    message = f"tools are given, but {why}; tool_choice can be 'none', 'required' or a function's name only"
    raise ApiError(400, message, param="tools", code="unsupported_field")


def _tokens(tokenizer: Tokenizer, call_format: CallFormat) -> Mapping[str, int]:
    """The ids of markers that were added to the vocabulary."""
    markers = (call_format.begin, call_format.end)
    return {
        token.content: token_id
        for token_id, token in tokenizer.inner.added_tokens_decoder.items()
        if token.content in markers
    }


def _is_opaque(marker: str, token_id: int, tokenizer: Tokenizer) -> bool:
    """Whether grammars take the token for one that has no text: special ones, and all that look like `<this>`."""
    return not tokenizer.has_text(token_id) or (marker.startswith("<") and marker.endswith(">"))


def _structured(
    asked: ToolFields, content: StructuredOutput | None, call_format: CallFormat, tokens: Mapping[str, int]
) -> StructuredOutput | None:
    """What the text has to be. Free text in which calls are recognised is not constrained, unless a tool is strict."""
    tools = asked.callable_tools
    if not asked.is_call_required and content is None and not any(tool.function.strict for tool in tools):
        return None
    content_schema = None
    if content is not None and not asked.is_call_required:  # else there is no content
        content_schema = _schema_of_content(content)
    schemas = {tool.function.name: _schema(tool, asked.is_call_required) for tool in tools}
    try:
        return calls_grammar(
            call_format,
            schemas,
            tokens,
            is_required=asked.is_call_required,
            is_parallel=asked.may_call_several,
            content_schema=content_schema,
        )
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"tools: {error}", param="tools") from error


def _schema(tool: Tool, is_call_required: bool) -> Schema:
    """Of the arguments that a tool may get; `strict` decides whether it is its own."""
    function = tool.function
    is_strict = is_call_required if function.strict is None else function.strict
    try:
        return schema_of(function.parameters) if is_strict else any_object()
    except (ValueError, RecursionError) as error:
        hint = "" if function.strict else "; with 'strict': false any object is taken"
        raise ApiError(400, f"the tool {function.name!r}: {error}{hint}", param="tools") from error


def _schema_of_content(content: StructuredOutput) -> Schema:
    if content.json_object:
        return any_object()
    if content.json_schema is None:
        message = f"{content.kind} is asked for, and tools may be called; beside calls there can be text or JSON only"
        raise ApiError(400, message, param="tools")
    try:
        return checked_schema(content.json_schema)
    except InvalidRequestError as error:
        raise ApiError(400, str(error)) from error

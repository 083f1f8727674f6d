"""`ToolUse`: what one request needs so that its model can call tools.

Decides in which notation calls are written, when a grammar guarantees them, and what a model that does not know tools
can still do. Knows neither messages nor answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        names: the names of the tools that may be called.
        is_parallel: whether several calls may be made.
        structured_output: the form that the text must have, calls included; None: it is free.
        is_guaranteed: whether `structured_output` guarantees that calls are valid.
        shows_special_tokens: whether markers are special tokens, so that the text must include special tokens.
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
        """The `SamplingParams` options that the request needs."""
        shown = {"skip_special_tokens": False} if self.shows_special_tokens else {}
        return {"structured_output": self.structured_output, **shown}

    def parser(self) -> CallParser:
        """Return a parser for one text."""
        return CallParser(self.call_format, self.names, is_guaranteed=self.is_guaranteed, is_parallel=self.is_parallel)


def tool_use(
    fields: ToolFields,
    content: StructuredOutput | None,
    tokenizer: Tokenizer,
    chat_template: str | None = None,
    parser_name: str | None = None,
) -> ToolUse | None:
    """Return what a request with these fields needs; None if no tool can be called.

    Args:
        content: the form that the request wants for text that is not a call.
        chat_template: the request's own, instead of the tokenizer's.
        parser_name: the notation that the operator chose, one of `CALL_FORMATS`.

    Raises:
        ApiError: this model cannot do it, or a schema is invalid.
        InvalidRequestError: the schema of `content` is invalid.
    """
    fields.check_tools()
    if not fields.callable_tools:
        return None
    template = _template(tokenizer, chat_template)
    call_format = format_of_template(template) if parser_name is None else CALL_FORMATS[parser_name]
    if call_format is None:
        call_format = PLAIN
    if not fields.is_call_required:
        _refuse_free_choice(template, call_format)
    tokens = _tokens(tokenizer, call_format)
    opaque = {marker: token_id for marker, token_id in tokens.items() if _is_opaque(marker, token_id, tokenizer)}
    return ToolUse(
        call_format,
        tuple(tool.function.name for tool in fields.callable_tools),
        fields.may_call_several,
        _structured(fields, content, call_format, opaque),
        not all(map(tokenizer.has_text, tokens.values())),
    )


def _template(tokenizer: Tokenizer, chat_template: str | None) -> str:
    if chat_template is not None:
        return chat_template
    template = tokenizer.inner.chat_template or ""
    if isinstance(template, dict):  # several by name; "tool_use" is the one for tools
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def _refuse_free_choice(template: str, call_format: CallFormat) -> None:
    """Raise `ApiError` if the model cannot choose whether to call: it must know the tools, and we its notation."""
    if "tools" not in template:
        why = "this model's chat template does not tell the model about tools"
    elif call_format is PLAIN:
        why = "it is not known how this model writes calls (an operator can set it with --tool-call-parser)"
    else:
        return
    message = f"tools are given, but {why}; tool_choice can be 'none', 'required' or a function's name only"
    raise ApiError(400, message, param="tools", code="unsupported_field")


def _tokens(tokenizer: Tokenizer, call_format: CallFormat) -> Mapping[str, int]:
    """Return the ids of markers that were added to the vocabulary."""
    markers = (call_format.begin, call_format.end)
    return {
        token.content: token_id
        for token_id, token in tokenizer.inner.added_tokens_decoder.items()
        if token.content in markers
    }


def _is_opaque(marker: str, token_id: int, tokenizer: Tokenizer) -> bool:
    """Whether grammars treat the token as one without text: special tokens, and all that look like `<this>`."""
    return not tokenizer.has_text(token_id) or (marker.startswith("<") and marker.endswith(">"))


def _structured(
    fields: ToolFields, content: StructuredOutput | None, call_format: CallFormat, tokens: Mapping[str, int]
) -> StructuredOutput | None:
    """Return the form that the text must have; None for free text in which calls are recognised (no strict tools)."""
    tools = fields.callable_tools
    if not fields.is_call_required and content is None and not any(tool.function.strict for tool in tools):
        return None
    content_schema = None
    if content is not None and not fields.is_call_required:  # otherwise there is no content
        content_schema = _schema_of_content(content)
    schemas = {tool.function.name: _schema(tool, fields.is_call_required) for tool in tools}
    try:
        return calls_grammar(
            call_format,
            schemas,
            tokens,
            is_required=fields.is_call_required,
            is_parallel=fields.may_call_several,
            content_schema=content_schema,
        )
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"tools: {error}", param="tools") from error


def _schema(tool: Tool, is_call_required: bool) -> Schema:
    """Return the schema of a tool's arguments: its own, or any object's, as `strict` decides."""
    function = tool.function
    is_strict = is_call_required if function.strict is None else function.strict
    try:
        return schema_of(function.parameters) if is_strict else any_object()
    except (ValueError, RecursionError) as error:
        hint = "" if function.strict else "; with 'strict': false any object is accepted"
        raise ApiError(400, f"the tool {function.name!r}: {error}{hint}", param="tools") from error


def _schema_of_content(content: StructuredOutput) -> Schema:
    if content.json_object:
        return any_object()
    if content.json_schema is None:
        message = f"{content.kind} is given, and tools may be called; besides calls there can only be text or JSON"
        raise ApiError(400, message, param="tools")
    return checked_schema(content.json_schema, is_exact=content.exact_schema)

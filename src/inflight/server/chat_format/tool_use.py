"""What a request's tools demand of its model's text: the form that guarantees valid calls, or nothing.

Decides when a grammar guarantees calls, and what a model that does not know tools can still do. Knows neither messages
nor answers.
"""

from inflight.contracts.structured_output import StructuredOutput
from inflight.grammar.json_schema import checked_schema
from inflight.grammar.marks import opaque_tokens
from inflight.server.chat_format.call_format import CallFormat
from inflight.server.chat_format.fields import Tool, ToolFields
from inflight.server.chat_format.grammar import Schema, any_object, calls_grammar, schema_of
from inflight.server.wire.api_errors import ApiError
from inflight.text.tokenizer import Tokenizer


def check_free_choice(chat_template: str, *, is_known: bool) -> None:
    """Raise `ApiError` if the model cannot choose whether to call: it must know the tools, and we its notation.

    Args:
        is_known: whether it is known how the model writes calls.
    """
    if "tools" not in chat_template:
        why = "this model's chat template does not tell the model about tools"
    elif not is_known:
        why = "it is not known how this model writes calls (an operator can set it with --tool-call-parser)"
    else:
        return
    message = f"tools are given, but {why}; tool_choice can be 'none', 'required' or a function's name only"
    raise ApiError(400, message, param="tools", code="unsupported_field")


def form_of_calls(
    fields: ToolFields,
    content: StructuredOutput | None,
    call_format: CallFormat,
    tokenizer: Tokenizer,
    content_begin: str = "",
) -> StructuredOutput | None:
    """Return the form that the text must have; None for free text in which calls are recognised (no strict tools).

    Args:
        content: the form that the request wants for text that is not a call.
        content_begin: the mark before such text.

    Raises:
        ApiError: a schema is invalid, or the forms cannot be combined.
        InvalidRequestError: the schema of `content` is invalid.
    """
    tools = fields.callable_tools
    if not fields.is_call_required and content is None and not any(tool.function.strict for tool in tools):
        return None
    content_schema = None
    if content is not None and not fields.is_call_required:  # otherwise there is no content
        content_schema = _schema_of_content(content)
    tokens = opaque_tokens(tokenizer)
    schemas = {tool.function.name: _schema(tool, fields.is_call_required) for tool in tools}
    try:
        return calls_grammar(
            call_format,
            schemas,
            tokens,
            is_required=fields.is_call_required,
            is_parallel=fields.may_call_several,
            content_schema=content_schema,
            content_begin=content_begin,
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

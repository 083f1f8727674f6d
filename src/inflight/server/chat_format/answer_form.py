"""`AnswerForm`: how one request's answers are constrained and read.

Reasoning and calls are found by the model's answer template, by the notation chosen by an operator, or by that of a
grammar that guarantees calls. Knows no API.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from inflight.contracts.api.structured_output import Reasoning, StructuredOutput
from inflight.grammar.json_schema import checked_schema
from inflight.grammar.marks import opaque_tokens, pieces_of
from inflight.server.chat_format.answer_template import (
    PLAIN_TEXT,
    AnswerTemplate,
    answer_template_of,
    call_format_of,
    chat_template_of,
)
from inflight.server.chat_format.call_grammar import Schema, calls_grammar, schema_of
from inflight.server.chat_format.chat_template import DEFAULT_REASONING, ReasoningOptions
from inflight.server.chat_format.families import CALL_FORMATS, PLAIN, CallFormat
from inflight.server.chat_format.template_reader import TemplateReader
from inflight.server.chat_format.tools import Tool, ToolFields
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import READING
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The formats of a request's prompt and answer.

    Attributes:
        make_reader: makes a reader for one text.
        structured_output: the required form of the text, calls included; None: free.
        shows_special_tokens: whether markers are special tokens, which the text must then include.
        reasoning: leading reasoning, in which stop strings do not count; None: unknown.
    """

    make_reader: Callable[[], TemplateReader]
    structured_output: StructuredOutput | None
    shows_special_tokens: bool
    reasoning: Reasoning | None

    @property
    def sampling_options(self) -> dict[str, Any]:
        """The `SamplingParams` options that the request needs."""
        shown = {"skip_special_tokens": False} if self.shows_special_tokens else {}
        return {"structured_output": self.structured_output, "reasoning": self.reasoning, **shown}


def answer_form(
    fields: ToolFields,
    content: StructuredOutput | None,
    tokenizer: Tokenizer,
    prompt: str,
    chat_template: str | None = None,
    parser_name: str | None = None,
    reasoning_options: ReasoningOptions = DEFAULT_REASONING,
) -> AnswerForm | None:
    """Return the form for a request with these fields; None if its text is plain content.

    Args:
        content: the requested form of text that is not a call.
        prompt: the chat as text.
        chat_template: the request's own, instead of the tokenizer's.
        parser_name: the notation of calls that the operator chose, one of `CALL_FORMATS`.
        reasoning_options: limits the model's reasoning.

    Raises:
        ApiError: the model does not support it, or a schema is invalid.
        InvalidRequestError: the schema of `content` is invalid.
    """
    fields.check_tools()
    written = chat_template_of(tokenizer) if chat_template is None else chat_template
    reading = answer_template_of(tokenizer, written) or PLAIN_TEXT
    if fields.callable_tools:
        reading, form, is_guaranteed = _with_calls(fields, content, tokenizer, reading, written, parser_name)
        tools = [tool.for_template() for tool in fields.usable_tools]
        names = [tool.function.name for tool in fields.callable_tools]
        options = {"is_parallel": fields.may_call_several, "is_guaranteed": is_guaranteed}
        make_reader, mark = partial(reading.reader, prompt, tools, names, **options), ""
    elif reading.has_reasoning:
        form, mark = content, reading.content_begin if content else ""
        make_reader = partial(reading.reader, prompt, None, ())
    else:
        return None
    return AnswerForm(
        make_reader,
        _after_reasoning(form, reading, prompt, _budget(reasoning_options, written, reading, prompt, tokenizer), mark),
        bool(reading.special_token_ids(tokenizer)),
        reading.leading_reasoning(prompt),
    )


def _with_calls(
    fields: ToolFields,
    content: StructuredOutput | None,
    tokenizer: Tokenizer,
    reading: AnswerTemplate,
    chat_template: str,
    parser_name: str | None,
) -> tuple[AnswerTemplate, StructuredOutput | None, bool]:
    """Return how calls are read; the required form of the text, if any; and whether that guarantees calls, so that
    arguments in JSON can be streamed."""
    reads_calls = parser_name is None and reading.has_calls
    call_format = call_format_of(chat_template) if parser_name is None else CALL_FORMATS[parser_name]
    content_begin = ""
    if reads_calls:
        call_format, content_begin = reading.call_format or call_format, reading.content_begin
    elif call_format is not None and call_format.head:
        call_format = None  # the checkpoint's own response template has no calls, so only objects could be read
    if not fields.is_call_required:
        _check_free_choice(chat_template, is_known=reads_calls or call_format is not None)
    form = _form_of_calls(fields, content, call_format or PLAIN, tokenizer, content_begin)
    are_objects = form is not None and (call_format is None or not call_format.head)
    if are_objects or not reads_calls:
        reading = reading.with_calls(call_format or PLAIN)
    return reading, form, form is not None


def _budget(
    options: ReasoningOptions, chat_template: str, template: AnswerTemplate, prompt: str, tokenizer: Tokenizer
) -> int | None:
    """Return the most reasoning tokens. Without a token that ends reasoning there is no limit; one that the request
    names is reported, and in strict mode refused when it is compiled."""
    most = options.most_tokens(chat_template)
    if most is None or (reasoning := template.leading_reasoning(prompt)) is None:
        return most
    has_end = isinstance(pieces_of(reasoning.end, opaque_tokens(tokenizer))[0], int)
    if has_end or (options.max_tokens is not None and READING.get().is_strict):
        return most
    if options.max_tokens is not None:
        READING.get().ignore(options.param)
    return None


def _after_reasoning(
    form: StructuredOutput | None,
    template: AnswerTemplate,
    prompt: str,
    max_tokens: int | None,
    mark: str = "",
) -> StructuredOutput | None:
    """Return a form that the model keeps to after its reasoning; None: free text, and reasoning of any length.

    Args:
        max_tokens: how many tokens reasoning may have.
        mark: what must stand before the text of this form.
    """
    if form is None and max_tokens is None:
        return None
    reasoning = template.leading_reasoning(prompt, max_tokens)
    if reasoning is not None and mark:
        reasoning = replace(reasoning, end=reasoning.end + mark, otherwise=mark)
    if form is not None:
        return replace(form, reasoning=reasoning)
    return None if reasoning is None else StructuredOutput(reasoning=reasoning)


def _check_free_choice(chat_template: str, *, is_known: bool) -> None:
    """Raise `ApiError` if calls cannot be optional: the model must see the tools, and its notation must be known.

    Args:
        is_known: whether it is known how the model writes calls.
    """
    if "tools" not in chat_template:
        why = "this model's chat template does not tell the model about tools"
    elif not is_known:
        why = "this model's notation of calls is unknown (an operator can set it with --tool-call-parser)"
    else:
        return
    message = f"tools are given, but {why}; tool_choice can be 'none', 'required' or a function's name only"
    raise ApiError(400, message, param="tools", code="unsupported_field")


def _form_of_calls(
    fields: ToolFields,
    content: StructuredOutput | None,
    call_format: CallFormat,
    tokenizer: Tokenizer,
    content_begin: str = "",
) -> StructuredOutput | None:
    """Return the required form of the text; None for free text in which calls are recognised (no strict tools).

    Args:
        content: the requested form of text that is not a call.
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
    schemas = {tool.function.name: _schema(tool, fields.is_call_required) for tool in tools}
    try:
        return calls_grammar(
            call_format,
            schemas,
            opaque_tokens(tokenizer),
            is_required=fields.is_call_required,
            is_parallel=fields.may_call_several,
            content_schema=content_schema,
            content_begin=content_begin,
        )
    except ValueError as error:
        raise ApiError(400, f"tools: {error}", param="tools") from error


def _schema(tool: Tool, is_call_required: bool) -> Schema:
    """Return the schema of a tool's arguments: its own, or any object's, as `strict` decides."""
    function = tool.function
    is_strict = is_call_required if function.strict is None else function.strict
    try:
        return schema_of(function.parameters if is_strict else {})
    except ValueError as error:
        hint = "" if function.strict else "; with 'strict': false any object is accepted"
        raise ApiError(400, f"the tool {function.name!r}: {error}{hint}", param="tools") from error


def _schema_of_content(content: StructuredOutput) -> Schema:
    if content.json_object:
        return schema_of({})
    if content.json_schema is None:
        message = f"{content.kind} is given, and tools may be called; besides calls there can only be text or JSON"
        raise ApiError(400, message, param="tools")
    return checked_schema(content.json_schema, is_exact=content.exact_schema)

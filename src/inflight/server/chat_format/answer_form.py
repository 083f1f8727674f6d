"""`AnswerForm`: what one request needs so that its model's answers can be written and read as it asks.

Decides how thoughts and calls are found in a text: by the model's answer template; by the notation that an operator
chose, or that is all that is known; and by that of a grammar, where one guarantees calls. Knows no API.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from inflight.contracts.structured_output import StructuredOutput, Thoughts
from inflight.server.chat_format.answer_template import PLAIN_TEXT, AnswerTemplate, answer_template_of, chat_template_of
from inflight.server.chat_format.call_format import CALL_FORMATS, PLAIN, format_of_template
from inflight.server.chat_format.fields import ToolFields
from inflight.server.chat_format.template_reader import TemplateReader
from inflight.server.chat_format.thinking import AS_THE_MODEL_WANTS, Thinking
from inflight.server.chat_format.tool_use import check_free_choice, form_of_calls
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a request's texts are written and read.

    Attributes:
        make_reader: makes a reader for one text.
        structured_output: the form that the text must have, calls included; None: it is free.
        shows_special_tokens: whether marks are special tokens, so that the text must include special tokens.
        thoughts: what the text may begin with, and where stop strings do not count; None: nothing that is known.
    """

    make_reader: Callable[[], TemplateReader]
    structured_output: StructuredOutput | None
    shows_special_tokens: bool
    thoughts: Thoughts | None

    @property
    def sampling_options(self) -> dict[str, Any]:
        """The `SamplingParams` options that the request needs."""
        shown = {"skip_special_tokens": False} if self.shows_special_tokens else {}
        return {"structured_output": self.structured_output, "thoughts": self.thoughts, **shown}


def answer_form(
    fields: ToolFields,
    content: StructuredOutput | None,
    tokenizer: Tokenizer,
    prompt: str,
    chat_template: str | None = None,
    parser_name: str | None = None,
    thinking: Thinking = AS_THE_MODEL_WANTS,
) -> AnswerForm | None:
    """Return what a request with these fields needs; None if its text is content as it is.

    Args:
        content: the form that the request wants for text that is not a call.
        prompt: the chat as text.
        chat_template: the request's own, instead of the tokenizer's.
        parser_name: the notation of calls that the operator chose, one of `CALL_FORMATS`.
        thinking: limits the model's thoughts.

    Raises:
        ApiError: this model cannot do it, or a schema is invalid.
        InvalidRequestError: the schema of `content` is invalid.
    """
    fields.check_tools()
    written = chat_template_of(tokenizer) if chat_template is None else chat_template
    reading = answer_template_of(tokenizer, written) or PLAIN_TEXT
    if not fields.callable_tools:
        if not reading.has_thoughts:
            return None
        return AnswerForm(
            partial(reading.reader, prompt, None, ()),
            _after_thoughts(content, reading, prompt, thinking, reading.content_begin if content else ""),
            bool(reading.special_token_ids(tokenizer)),
            reading.thoughts_first(prompt),
        )
    reads_calls = parser_name is None and reading.has_calls
    call_format = format_of_template(written) if parser_name is None else CALL_FORMATS[parser_name]
    content_begin = ""
    if reads_calls:
        call_format, content_begin = reading.call_format or call_format, reading.content_begin
    if not fields.is_call_required:
        check_free_choice(written, is_known=reads_calls or call_format is not None)
    form = form_of_calls(fields, content, call_format or PLAIN, tokenizer, content_begin)
    is_streamed = form is not None and (call_format is None or not call_format.head)
    if is_streamed or not reads_calls:
        reading = reading.with_calls(call_format or PLAIN)
    tools = [tool.for_template() for tool in fields.usable_tools]
    names = [tool.function.name for tool in fields.callable_tools]
    options = {"is_parallel": fields.may_call_several, "is_guaranteed": is_streamed}
    return AnswerForm(
        partial(reading.reader, prompt, tools, names, **options),
        _after_thoughts(form, reading, prompt, thinking),
        bool(reading.special_token_ids(tokenizer)),
        reading.thoughts_first(prompt),
    )


def _after_thoughts(
    form: StructuredOutput | None, template: AnswerTemplate, prompt: str, thinking: Thinking, mark: str = ""
) -> StructuredOutput | None:
    """Return a form to which the model keeps after it has thought; None: free text, and thoughts of any length.

    Args:
        mark: what must stand before the text of this form.
    """
    if form is None and thinking.most_tokens is None:
        return None
    thoughts = template.thoughts_first(prompt, thinking.most_tokens)
    if thoughts is not None and mark:
        thoughts = replace(thoughts, end=thoughts.end + mark, otherwise=mark)
    if form is not None:
        return replace(form, thoughts=thoughts)
    return None if thoughts is None else StructuredOutput(thoughts=thoughts)

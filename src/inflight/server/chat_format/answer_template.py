"""`AnswerTemplate`: the structure of a model's answers, and their reader.

It comes from the tokenizer's response template, else from the family of its chat template.
"""

import json
import logging
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import regex
from transformers.utils.chat_parsing import response_templates as hf

from inflight.contracts.api.structured_output import Reasoning
from inflight.server.chat_format.blocks import CallBlock, ReasoningBlock
from inflight.server.chat_format.call_text import CallText, SearchBudget
from inflight.server.chat_format.families import (
    FALLBACKS,
    FAMILIES,
    NO_ANCHOR,
    THINKING,
    CallFormat,
    Family,
    MarkedArguments,
    ResponseTemplate,
    head_of,
)
from inflight.server.chat_format.learned import LEARNED, NAMES, TOOLS, Learned, learn, written_call
from inflight.server.chat_format.template_reader import TemplateReader
from inflight.server.wire.api_errors import ApiError
from inflight.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The names of a field of reasoning; the first is the one that chat templates read."""
CALLS = "tool_calls"
_LETTERS_AND_DIGITS = string.ascii_letters + string.digits
MOST_BEGUN = 2**14
"""Characters of the prompt's end that are read to find where the answer continues."""


class AnswerTemplate:
    """A response template of `transformers`.

    Args:
        template: see `transformers.utils.chat_parsing`.
        family: the family that it was taken from, or whose chat template it comes with.
        call_format: how calls are written, for grammars; None: as the family does.

    Attributes:
        call_format: how calls are written, for grammars; None: unknown.

    Raises:
        ValueError, regex.error: it is invalid.
    """

    def __init__(
        self, template: ResponseTemplate, family: Family | None = None, call_format: CallFormat | None = None
    ) -> None:
        self._template = dict(template)
        self._family = family
        self.call_format = call_format or (family.calls if family else None)
        self._exact = hf.load_response_template(self._template)
        if self.has_calls:
            CallText(self._exact.fields[CALLS], (), (), SearchBudget())  # its patterns are checked
        self._others: dict[CallFormat, AnswerTemplate] = {}
        self._special_token_ids: WeakKeyDictionary[Tokenizer, frozenset[int]] = WeakKeyDictionary()

    @property
    def has_reasoning(self) -> bool:
        """Whether its models may reason."""
        return any(name in self._exact.fields for name in REASONING_FIELDS)

    @property
    def has_calls(self) -> bool:
        """Whether it defines tool calls."""
        return CALLS in self._exact.fields

    def with_calls(self, call_format: CallFormat) -> "AnswerTemplate":
        """Return the same template with calls as JSON objects."""
        if call_format not in self._others:
            marks = {"open": call_format.begin} if call_format.begin else {"open_pattern": "(?!)"}
            if call_format.end:
                marks["close"] = call_format.end
            fields = {**self._template["fields"], CALLS: {**marks, "repeats": True, "content": "json"}}
            template = {**self._template, "fields": fields}
            self._others[call_format] = AnswerTemplate(template, self._family, call_format)
        return self._others[call_format]

    def special_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens among the marks of reasoning, content and calls."""
        if (known := self._special_token_ids.get(tokenizer)) is not None:
            return known
        marked = [(name, field) for name, field in self._exact.fields.items() if field.open_re is not None]
        patterns = [(name, mark) for name, field in marked for mark in (field.open_re, field.close_re) if mark]
        budget = SearchBudget()

        def may_begin(name: str, pattern: Any, text: str) -> bool:
            """Whether a mark is, or begins with, this text."""
            match = budget.search(name, pattern.search, text, partial=True)
            return match is not None and match.end() - match.start() == len(text)

        found = self._special_token_ids[tokenizer] = frozenset(
            token_id
            for token_id, token in tokenizer.inner.added_tokens_decoder.items()
            if token.special and any(may_begin(*pattern, token.content) for pattern in patterns)
        )
        return found

    def reader(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None,
        names: Collection[str],
        *,
        is_parallel: bool = True,
        is_guaranteed: bool = False,
    ) -> TemplateReader:
        """Return a reader for one answer.

        Args:
            prompt: the text that the answer continues; it may have begun the reasoning.
            tools: the tools shown to the model, in OpenAI's form; None: text that looks like a call is content.
            names: the names of callable tools; a call of another is content.
            is_parallel: whether there may be several calls; if not, all but the first are dropped.
            is_guaranteed: whether a grammar makes the model write calls in `call_format`.
        """
        fields, budget, form, calls = self._exact.fields, SearchBudget(), self.call_format, None
        if self.has_calls and tools is not None:
            is_bare = form is not None and form.is_begin_optional
            heads = {head_of(form, name): name for name in names} if is_guaranteed and form is not None else None
            calls = CallText(fields[CALLS], tools, names, budget, is_bare=is_bare, heads=heads)
        head = form.head.partition("{name}")[0] if form is not None else ""
        num_begun = prompt.count(head) if head else 0  # calls of the whole chat are counted
        return TemplateReader(
            [field for name, field in fields.items() if name != CALLS or tools is not None],
            self._begun(prompt),
            reasoning=REASONING_FIELDS,
            calls=calls,
            budget=budget,
            new_call_id=partial(new_call_id, None if form is None else form.call_id, begun=num_begun),
            is_parallel=is_parallel,
        )

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning."""
        grown = self.reader(prompt, None, ()).feed("x")  # where a next letter would belong
        return bool(grown) and isinstance(grown[-1].block, ReasoningBlock)

    def leading_reasoning(self, prompt: str, max_tokens: int | None = None) -> Reasoning | None:
        """The reasoning that may precede structured output; None: none.

        Args:
            prompt: the text that the answer continues.
            max_tokens: how many tokens reasoning may have.
        """
        if not self.has_reasoning or (marks := self._marks) is None:
            return None
        if self.begins_in_reasoning(prompt):
            return replace(marks, begin="", max_tokens=max_tokens)
        if marks.end in self._begun(prompt):  # it has reasoned, or is not to
            return None
        return replace(marks, max_tokens=max_tokens)

    @property
    def content_begin(self) -> str:
        """The mark before content. Raises `ApiError` if it is unknown."""
        content = self._exact.fields.get("content")
        if content is None or content.open_re is None:
            return ""
        if self._family is not None and self._family.content_begin:
            return self._family.content_begin
        if content.open_literals:
            return str(content.open_literals[0])
        message = "the beginning of this model's answers is unknown, so no form of them can be enforced"
        raise ApiError(400, message, code="unsupported_value")

    @property
    def _marks(self) -> Reasoning | None:
        """The marks around reasoning; None: they are patterns."""
        if self._family is not None and self._family.reasoning is not None:
            return self._family.reasoning
        field = next(field for name, field in self._exact.fields.items() if name in REASONING_FIELDS)
        if not field.open_literals or not field.close_literals:
            return None
        return Reasoning(begin=field.open_literals[0], end=field.close_literals[0])

    def empty_reasoning(self, prompt: str) -> str | None:
        """The text to append to a prompt so that the model does not reason; None: unknown."""
        if (marks := self._marks) is None or self.content_begin:
            return None
        begin = "" if self.begins_in_reasoning(prompt) else f"{marks.begin}\n"
        return f"{begin}\n{marks.end}\n\n"

    def _begun(self, prompt: str) -> str:
        """The part of the answer that is already in the prompt. If the family's beginning of answers is unknown, at
        most the mark of reasoning."""
        if anchors := SearchBudget().search("start_anchor", self._exact.start_anchor_re.finditer, prompt):
            return prompt[anchors[-1].end() :][-MOST_BEGUN:]
        end = prompt.rstrip()
        for name in REASONING_FIELDS:
            field = self._exact.fields.get(name)
            for mark in (field.open_literals or ()) if field is not None else ():
                if end.endswith(mark):
                    return str(mark)
        return ""


def new_call_id(form: int | str | None, name: str, index: int, begun: int = 0) -> str:
    """Return a call's id.

    Args:
        form: see `CallFormat.call_id`.
        name: of the tool.
        index: the number of calls before it in the answer.
        begun: the number of calls before the answer.
    """
    if form is None:
        return f"call_{secrets.token_hex(12)}"
    if isinstance(form, str):
        return form.format(name=name, index=begun + index)
    return "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(form))


PLAIN_TEXT = AnswerTemplate({**NO_ANCHOR, "fields": {"content": {}}})
"""An answer without reasoning and calls."""


def answer_template_of(tokenizer: Tokenizer, chat_template: str) -> AnswerTemplate | None:
    """Return a model's answer template; None: plain text.

    Args:
        chat_template: in Jinja; a request may have its own.
    """
    own = getattr(tokenizer.inner, "response_template", None)
    if own is not None and chat_template == chat_template_of(tokenizer):
        return _own_template(json.dumps(own, default=str), chat_template)
    return _template_of_family(chat_template)


def shown_notation(tokenizer: Tokenizer) -> str:
    """How a model writes calls and reasoning, for people, and how that is known; "": it is unknown."""
    template = chat_template_of(tokenizer)
    known, form = answer_template_of(tokenizer, template), call_format_of(template)
    if known is not None and known.has_calls:
        form = known.call_format or form
    shown = []
    if form is not None:
        head, behind = (form.head.replace("{name}", "NAME"), form.tail) if form.head else (head_of(form, "NAME"), "}")
        arguments = form.arguments.begin.format(key="KEY") if isinstance(form.arguments, MarkedArguments) else ""
        call = f"{form.begin}{form.opening}{head}{arguments}…{behind}{form.closing}{form.end}"
        shown.append(f"calls as {' '.join(call.split())}")
    if known is not None and known.has_reasoning and (marks := known._marks) is not None:
        shown.append(f"reasoning as {marks.begin}…{marks.end}")
    own = getattr(tokenizer.inner, "response_template", None)
    names = ["the tokenizer's response template"] if own is not None else [each.name for each in families_of(template)]
    return f"{', '.join(shown)} ({names[0]})" if shown else ""


def chat_template_of(tokenizer: Tokenizer) -> str:
    """A tokenizer's chat template; "" without one."""
    template = tokenizer.inner.chat_template or ""
    if isinstance(template, dict):  # several by name; "tool_use" is the one for tools
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


@lru_cache(maxsize=8)
def families_of(chat_template: str) -> Sequence[Family]:
    """Return what is known about the models of a chat template, what is certain first."""
    learned = learn(chat_template)
    own = [] if learned is None or not _reads(learned) else [learned.family]
    with_calls = [each for each in own if each.calls is not None]
    fixed, fallbacks = ([each for each in group if each.has(chat_template)] for group in (FAMILIES, FALLBACKS))
    written = None if with_calls else written_call(chat_template)
    fallbacks = [each for each in fallbacks if written is None or _may_have_written(each, written)]
    return [
        *fixed,
        *with_calls,
        *(each for each in fallbacks if each is not THINKING),
        *own,
        *(each for each in fallbacks if each is THINKING),
    ]


def _reads(learned: Learned) -> bool:
    """Whether a learned family's reader finds what its chat template wrote."""
    try:
        template = AnswerTemplate(learned.family.template or {}, learned.family)
        for prompt, text, parts in learned.probes:
            reader = template.reader(prompt, TOOLS, NAMES)
            reader.feed(text, is_last=True)
            read = [(e.name, json.loads(e.arguments)) if isinstance(e, CallBlock) else e.text for e in reader.blocks]
            if read != list(parts):
                logger.debug("what was learned from the chat template does not read %r", text)
                return False
    except (ValueError, regex.error, ApiError) as error:
        logger.debug("what was learned from the chat template cannot be used: %r", error)
        return False
    return True


def _may_have_written(family: Family, call: str) -> bool:
    """Whether a family's reader finds this call, if it has the family's mark."""
    if family.template is None or family.calls is None or family.calls.begin not in call:
        return True
    reader = AnswerTemplate(family.template, family).reader("", TOOLS, NAMES)
    reader.feed(call, is_last=True)
    return reader.num_calls > 0


def family_of(chat_template: str) -> Family | None:
    """Return the family of a chat template; None if unknown."""
    return next((each for each in families_of(chat_template) if each.template is not None), None)


def call_format_of(chat_template: str) -> CallFormat | None:
    """Return the call format of a chat template; None if unknown."""
    return next((each.calls for each in families_of(chat_template) if each.calls is not None), None)


@lru_cache(maxsize=8)
def _own_template(written: str, chat_template: str) -> AnswerTemplate | None:
    try:
        return AnswerTemplate(json.loads(written), family_of(chat_template))
    except (ValueError, TypeError, AttributeError, KeyError, regex.error) as error:
        logger.warning("the tokenizer's response template cannot be used, so answers are not parsed: %s", error)
        return None


@lru_cache(maxsize=8)
def _template_of_family(chat_template: str) -> AnswerTemplate | None:
    if (family := family_of(chat_template)) is None or family.template is None:
        return None
    fields = dict(family.template["fields"])
    thoughts = fields.get(REASONING_FIELDS[0], {})
    if family.name != LEARNED and "open" in thoughts and thoughts["open"].strip() not in chat_template:
        del fields[REASONING_FIELDS[0]]  # it does not think
    return AnswerTemplate({**family.template, "fields": fields}, family)

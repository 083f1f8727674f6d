"""`render_chat` turns a conversation into the prompt's text, by the chat template. `ReasoningOptions` are the request's
options for reasoning. `forms_of` rewrites a history that the template refuses. Accepted histories stay unchanged, so
that earlier turns keep their text and are found in the prefix cache. Independent of the APIs, each of which has its own
fields.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import product
from typing import Any, TypeAlias

from inflight.contracts.api.errors import InvalidRequestError
from inflight.entrypoints.inputs import rendered_chat
from inflight.server.chat_format.answer_template import answer_template_of, chat_template_of
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import READING
from inflight.text.tokenizer import Tokenizer

logger = logging.getLogger("inflight.server")

MAX_EFFORT = 64
"""Maximum characters of an effort."""

_SWITCHES = (
    ("enable_thinking", re.compile(r"\benable_thinking\b")),
    ("thinking", re.compile(r"\b(?:not thinking|thinking is (?:not )?defined)\b")),
)
"""The variables of chat templates that turn reasoning on or off: Qwen's and GLM's, and DeepSeek's."""

EFFORT_TOKENS = {"minimal": 256, "low": 1024, "medium": 4096}
"""The most reasoning tokens of an effort where the chat template has no such variable; others have no limit."""

_EFFORT = re.compile(r"\breasoning_effort\b")
_NO_EFFORT = re.compile(r"\breasoning_effort\b[^%}]{0,200}[\"']none[\"']")


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """A request's options for reasoning.

    Attributes:
        is_enabled: whether the model reasons; None: the chat template's default.
        effort: the effort in the model's terms, such as "low"; None: the chat template's default.
        max_tokens: the maximum number of reasoning tokens, if the markers are known; None: see `most_tokens`.
        param: the request's field, for error messages.
    """

    is_enabled: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None
    param: str = "reasoning_effort"

    def most_tokens(self, chat_template: str) -> int | None:
        """The maximum number of reasoning tokens; None: no limit."""
        if self.max_tokens is not None or self.effort is None or _EFFORT.search(chat_template):
            return self.max_tokens
        return EFFORT_TOKENS.get(self.effort)

    def variables(self, chat_template: str) -> Mapping[str, Any]:
        """Return the chat template's variables for these options, as far as it has any."""
        variables: dict[str, Any] = {}
        if self.effort is not None:
            mention = _NO_EFFORT if self.effort == "none" else _EFFORT
            if mention.search(chat_template):
                variables["reasoning_effort"] = self.effort
        switch = next((name for name, mention in _SWITCHES if mention.search(chat_template)), None)
        if self.is_enabled is not None and switch is not None:
            variables[switch] = self.is_enabled
        return variables


DEFAULT_REASONING = ReasoningOptions()


def reasoning_options_from(effort: str | None, param: str, budget: int | None) -> ReasoningOptions:
    """Convert OpenAI's effort ("none" turns reasoning off) and vLLM's `thinking_token_budget` (0 turns reasoning
    off)."""
    if budget == 0:
        return ReasoningOptions(is_enabled=False, param="thinking_token_budget")
    if effort is None and budget is None:
        return DEFAULT_REASONING
    param = param if budget is None else "thinking_token_budget"
    return ReasoningOptions(None if effort is None else effort != "none", effort, budget, param)


History: TypeAlias = Sequence[Mapping[str, Any]]

_CLIENT_LINE = re.compile(r"\Ax-anthropic-billing-header:.*\n?")
"""The first line of Claude Code's system prompt, which is not for the model and differs from turn to turn."""


def _with_system_first(history: History, *, is_one: bool) -> History:
    """Return a history whose later system messages are a user's text where they stand, in one message with the user's
    text next to it. If `is_one`, consecutive messages of one role are one, except calls and results."""
    groups: list[tuple[str, list[Mapping[str, Any]]]] = []
    for message in history:
        before, group = groups[-1] if groups else ("system", [])
        role = "user" if message["role"] == "system" != before else message["role"]
        last = group[-1] if group else {}
        is_text = role != "tool" and not last.get("tool_calls") and not message.get("tool_calls")
        has_system = role != "system" and "system" in (message["role"], last.get("role"))
        if group and role == before and (has_system or (is_one and is_text)):
            group.append(message)
        else:
            groups.append((role, [message]))
    return [
        {**group[0], "role": role, "content": "\n\n".join(filter(None, (each["content"] for each in group)))}
        for role, group in groups
    ]


def _with_calls(history: History, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> History:
    return [{**each, "tool_calls": [*map(change, c)]} if (c := each.get("tool_calls")) else each for each in history]


def _with_objects(history: History) -> History:
    """Return a history in which arguments that are no object, such as those of a call that was cut off, are the member
    `arguments` of one."""

    def mended(call: Mapping[str, Any]) -> Mapping[str, Any]:
        given = call["function"]["arguments"]
        is_object = isinstance(given, Mapping)
        return call if is_object else {**call, "function": {**call["function"], "arguments": {"arguments": given}}}

    return _with_calls(history, mended)


def _with_short_ids(history: History) -> History:
    """Return a history in which the ids of calls are nine letters and digits, as Mistral's templates need them."""

    def short(given: Any) -> str:
        return str(given) if re.fullmatch("[A-Za-z0-9]{9}", str(given)) else sha256(str(given).encode()).hexdigest()[:9]

    return [
        {**each, "tool_call_id": short(each.get("tool_call_id"))} if each["role"] == "tool" else each
        for each in _with_calls(history, lambda call: {**call, "id": short(call["id"])})
    ]


def _as_text(history: History) -> History:
    """Return a history in the form that every template takes: texts of a user and the assistant by turns, the user's
    first, behind at most one system message. Calls and results are written as text."""
    texts = []
    for each in history:
        text, role = each["content"], each["role"]
        if role == "tool":
            text, role = f"[result of {each.get('name') or 'a call'}: {text}]", "user"
        calls = [call["function"] for call in each.get("tool_calls") or ()]
        shown = [f"[call of {call['name']}: {json.dumps(call['arguments'], ensure_ascii=False)}]" for call in calls]
        texts.append({"role": role, "content": "\n".join(filter(None, (text, *shown)))})
    num_system = next((i for i, each in enumerate(texts) if each["role"] != "system"), len(texts))
    is_begun = [each["role"] for each in texts[num_system : num_system + 1]] == ["user"]
    begin = [] if is_begun else [{"role": "user", "content": ""}]
    return _with_system_first([*texts[:num_system], *begin, *texts[num_system:]], is_one=True)


def forms_of(history: History) -> Iterator[tuple[History, list[str]]]:
    """Yield a history without that line, then, unless reading is strict, in forms that more templates take, each with
    the names of the changes. A form changes a message by what is before it only: its text stays the same when the
    history grows, until that needs another form."""
    texts = [_CLIENT_LINE.sub("", each["content"]) if each["role"] == "system" else each["content"] for each in history]
    kept: History = [{**message, "content": text} for message, text in zip(history, texts, strict=True)]
    if kept != history:
        READING.get().ignore("x-anthropic-billing-header")
    yield kept, []
    if READING.get().is_strict:
        return
    tried: list[History] = [kept]
    for is_one, are_objects, are_short in product((None, False, True), (False, True), (False, True)):
        form = kept if is_one is None else _with_system_first(kept, is_one=is_one)
        form = _with_objects(form) if are_objects else form
        form = _with_short_ids(form) if are_short else form
        if form not in tried:
            tried.append(form)
            yield form, ["role"] * (is_one is not None) + ["arguments"] * are_objects + ["tool_call_id"] * are_short
    yield _as_text(kept), ["role", "tool_calls"]


@lru_cache(maxsize=64)
def _tell_of(changed: str) -> None:
    """Log once that a template refused a history: it may be the template's fault. (Its reason may quote the text.)"""
    logger.warning("the chat template refuses some histories, which are rewritten: %s", changed)


def render_chat(
    chat: Mapping[str, Any], tokenizer: Tokenizer | None, param: str, options: ReasoningOptions = DEFAULT_REASONING
) -> str:
    """Return a chat as text by its chat template. A history that the template refuses is rewritten to the first of
    `forms_of` that it accepts.

    Args:
        chat: a prompt of `AsyncLLM`. Its own template variables take precedence over `options`.
        param: the request field that holds the messages.

    Raises:
        ApiError: no form can be written (400).
    """
    refusal = None
    for form, changed in forms_of(chat["messages"]):
        try:
            text = _written({**chat, "messages": form}, tokenizer, options)
        except InvalidRequestError as error:
            refusal = refusal or error
            continue
        for name in changed:
            READING.get().ignore(name)
        if refusal is not None:
            _tell_of(", ".join(changed))
        return text
    raise ApiError(400, f"{param}: {refusal}", param=param) from refusal


def _written(chat: Mapping[str, Any], tokenizer: Tokenizer | None, options: ReasoningOptions) -> str:
    """Return the text. If reasoning is off, and the template has no switch, empty reasoning follows. A last message to
    continue whose text the template changes follows the prompt as it stands."""
    if chat.get("continue_final_message") and len(chat["messages"]) > 1 and not chat["messages"][-1].get("tool_calls"):
        with suppress(InvalidRequestError):
            return _rendered(chat, tokenizer, options)
        *before, last = chat["messages"]
        asked = {**chat, "messages": before, "add_generation_prompt": True, "continue_final_message": False}
        return _rendered(asked, tokenizer, options) + str(last["content"])
    return _rendered(chat, tokenizer, options)


def _rendered(chat: Mapping[str, Any], tokenizer: Tokenizer | None, options: ReasoningOptions) -> str:
    if options is DEFAULT_REASONING or tokenizer is None:
        return rendered_chat(chat, tokenizer)
    template = chat["chat_template"] if "chat_template" in chat else chat_template_of(tokenizer)
    variables = options.variables(template)
    text = rendered_chat(
        {**chat, "chat_template_kwargs": {**variables, **chat.get("chat_template_kwargs", {})}}, tokenizer
    )
    known = answer_template_of(tokenizer, template)
    if variables or options.is_enabled is not False or known is None or not known.has_reasoning:
        return text
    if (empty := known.empty_reasoning(text)) is None:
        message = f"{options.param} turns reasoning off, which is not supported for this model"
        raise ApiError(400, message, param=options.param, code="unsupported_value")
    return text + empty

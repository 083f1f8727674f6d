"""`render_chat`: a conversation becomes the text that the model reads, by its chat template.

`Thinking` is what the request says about reasoning. `forms_of` changes a history that the template refuses; one that it
takes stays as it was sent, so that the text of earlier turns does not change and is found in the prefix cache. Knows no
API: each has its own fields.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from inflight.contracts.errors import InvalidRequestError
from inflight.entrypoints.inputs import rendered_chat
from inflight.server.chat_format.answer_template import answer_template_of, chat_template_of
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import READING
from inflight.text.tokenizer import Tokenizer

MAX_EFFORT = 64
"""Characters of the word for an effort."""

_SWITCHES = (
    ("enable_thinking", re.compile(r"\benable_thinking\b")),
    ("thinking", re.compile(r"\b(?:not thinking|thinking is (?:not )?defined)\b")),
)
"""The variables by which chat templates are told whether the model thinks: Qwen's and GLM's, and DeepSeek's."""

_EFFORT = re.compile(r"\breasoning_effort\b")
_NO_EFFORT = re.compile(r"\breasoning_effort\b[^%}]{0,200}[\"']none[\"']")


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a request wants.

    Attributes:
        is_wanted: whether the model is to think; None: as its chat template has it.
        effort: how much, in the model's own words, such as "low"; None: as its chat template has it.
        most_tokens: how many tokens reasoning may have, where its marks are known; None: any number.
        param: the request's field, for error messages.
    """

    is_wanted: bool | None = None
    effort: str | None = None
    most_tokens: int | None = None
    param: str = "reasoning_effort"

    def variables(self, chat_template: str) -> Mapping[str, Any]:
        """Return what tells the chat template; nothing if it has no variable for it."""
        variables: dict[str, Any] = {}
        if self.effort is not None:
            mention = _NO_EFFORT if self.effort == "none" else _EFFORT
            if mention.search(chat_template):
                variables["reasoning_effort"] = self.effort
        switch = next((name for name, mention in _SWITCHES if mention.search(chat_template)), None)
        if self.is_wanted is not None and switch is not None:
            variables[switch] = self.is_wanted
        return variables


AS_THE_MODEL_WANTS = Thinking()


def thinking_of(effort: str | None, param: str, budget: int | None) -> Thinking:
    """Return what OpenAI's word for an effort means ("none": the model is not to think), and vLLM's
    `thinking_token_budget`: the most tokens of reasoning; 0: the model is not to think."""
    if budget == 0:
        return Thinking(is_wanted=False, param="thinking_token_budget")
    if effort is None and budget is None:
        return AS_THE_MODEL_WANTS
    return Thinking(None if effort is None else effort != "none", effort, budget, param)


History: TypeAlias = Sequence[Mapping[str, Any]]

_CLIENT_LINE = re.compile(r"\Ax-anthropic-billing-header:.*\n?")
"""The first line of Claude Code's system prompt, which is not for the model and differs from turn to turn."""


def _with_system_first(history: History, *, is_one: bool) -> History:
    """Return a history whose later system messages are a user's text where they stand, in one message with the user's
    text next to it; and whose leading ones are one message, if `is_one`."""
    groups: list[tuple[str, list[Mapping[str, Any]]]] = []
    for message in history:
        before, group = groups[-1] if groups else ("system", [])
        role = "user" if message["role"] == "system" != before else message["role"]
        is_next = bool(group) and role == before
        if is_next and (is_one if role == "system" else "system" in (message["role"], group[-1]["role"])):
            group.append(message)
        else:
            groups.append((role, [message]))
    return [
        {**group[0], "role": role, "content": "\n\n".join(filter(None, (each["content"] for each in group)))}
        for role, group in groups
    ]


def _with_objects(history: History) -> History:
    """Return a history in which arguments that are no object, such as those of a call that was cut off, are the member
    `arguments` of one."""

    def mended(call: Mapping[str, Any]) -> Mapping[str, Any]:
        given = call["function"]["arguments"]
        is_object = isinstance(given, Mapping)
        return call if is_object else {**call, "function": {**call["function"], "arguments": {"arguments": given}}}

    return [
        {**each, **({"tool_calls": [*map(mended, c)]} if (c := each.get("tool_calls")) else {})} for each in history
    ]


def forms_of(history: History) -> Iterator[tuple[History, list[str]]]:
    """Yield a history without that line, then, unless reading is strict, in forms that more templates take, each with
    the names of what was changed."""
    texts = [_CLIENT_LINE.sub("", each["content"]) if each["role"] == "system" else each["content"] for each in history]
    kept: History = [{**message, "content": text} for message, text in zip(history, texts, strict=True)]
    if kept != history:
        READING.get().ignore("x-anthropic-billing-header")
    tried: list[History] = []
    for is_one, are_objects in product((None, False, True), (False, True)):
        form = kept if is_one is None else _with_system_first(kept, is_one=is_one)
        form = _with_objects(form) if are_objects else form
        if form not in tried:
            tried.append(form)
            yield form, ["role"] * (is_one is not None) + ["arguments"] * are_objects
        if READING.get().is_strict:
            return


def render_chat(
    chat: Mapping[str, Any], tokenizer: Tokenizer | None, param: str, thinking: Thinking = AS_THE_MODEL_WANTS
) -> str:
    """Return a chat as its chat template writes it; a history that the template refuses, in the next of `forms_of`
    that it takes.

    Args:
        chat: a prompt of `AsyncLLM`. What it tells the chat template itself counts more than `thinking`.
        param: the request field that holds the messages.

    Raises:
        ApiError: no form can be written (400).
    """
    refusal = None
    for form, changed in forms_of(chat["messages"]):
        try:
            text = _written({**chat, "messages": form}, tokenizer, thinking)
        except InvalidRequestError as error:
            refusal = refusal or error
            continue
        for name in changed:
            READING.get().ignore(name)
        return text
    raise ApiError(400, f"{param}: {refusal}", param=param) from refusal


def _written(chat: Mapping[str, Any], tokenizer: Tokenizer | None, thinking: Thinking) -> str:
    """Return the text. If the model is not to think, and its template cannot be told so, empty reasoning follows."""
    if thinking is AS_THE_MODEL_WANTS or tokenizer is None:
        return rendered_chat(chat, tokenizer)
    template = chat["chat_template"] if "chat_template" in chat else chat_template_of(tokenizer)
    variables = thinking.variables(template)
    text = rendered_chat(
        {**chat, "chat_template_kwargs": {**variables, **chat.get("chat_template_kwargs", {})}}, tokenizer
    )
    known = answer_template_of(tokenizer, template)
    if variables or thinking.is_wanted is not False or known is None or not known.has_reasoning:
        return text
    if (empty := known.empty_reasoning(text)) is None:
        message = f"{thinking.param} says that this model is not to think, and there is no way to tell it"
        raise ApiError(400, message, param=thinking.param, code="unsupported_value")
    return text + empty

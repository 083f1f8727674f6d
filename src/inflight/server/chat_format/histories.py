"""Histories in forms that chat templates take, so that a conversation that has begun can go on. Knows no template.

What a template can write stays as it was sent, whatever comes after it: the text of earlier turns does not change, and
is found in the prefix cache.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from inflight.server.wire.strict_model import READING

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

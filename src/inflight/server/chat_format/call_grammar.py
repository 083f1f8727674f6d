"""The grammar that makes a model write tool calls in its family's notation, so that they are always valid.

Decides how calls are written, to the character; readers recognise them by that. Markers that are single tokens
are named by their ids, because in a grammar their text would stand for other tokens.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from inflight.contracts.structured_output import StructuredOutput
from inflight.grammar.json_schema import checked_schema
from inflight.grammar.marks import pieces_of, quoted, written_mark
from inflight.server.chat_format.argument_grammar import BareArguments, json_rule, marked_arguments
from inflight.server.chat_format.families import BareJson, CallFormat, MarkedArguments, head_of

Schema: TypeAlias = Mapping[str, Any]
"""A schema that was checked and, as far as the check shows, can be enforced."""


def schema_of(parameters: Mapping[str, Any] | None) -> Schema:
    """Return the schema of a tool's arguments; without a type, an object's.

    Raises ValueError if its type is not an object's, or it cannot be enforced."""
    if parameters is None:
        return checked_schema('{"type": "object", "additionalProperties": false}')
    schema = {"type": "object", **parameters}
    if schema["type"] != "object":
        raise ValueError(f"the type of its parameters is {schema['type']!r}; arguments must be an 'object'")
    return checked_schema(json.dumps(schema))


def calls_grammar(
    call_format: CallFormat,
    schemas: Mapping[str, Schema],
    tokens: Mapping[str, int],
    *,
    is_required: bool,
    is_parallel: bool,
    content_schema: Schema | None = None,
    content_begin: str = "",
) -> StructuredOutput:
    """Return the grammar of calls or, if no call is required, of content: JSON of a schema, or free text up to a call.

    Args:
        schemas: the schema of each tool's arguments, by the tool's name.
        tokens: the ids of markers that are single tokens to grammars.
        is_required: whether there must be a call.
        is_parallel: whether there may be several calls.
        content_schema: the schema of content that is not a call; None: free text.
        content_begin: the mark before content.

    Raises ValueError if the grammar is too large.
    """
    # A model that may omit the marker is never forced to write it.
    begin = "" if call_format.is_begin_optional else written_mark(call_format.begin, tokens)
    group = f"{begin} calls"
    may_repeat = call_format.between_objects is None and call_format.between_groups is not None
    is_repeated = is_parallel and may_repeat and not call_format.is_begin_optional
    groups = f"{group} ({quoted(call_format.between_groups or '')} {group})*" if is_repeated else group
    content = written_mark(content_begin, tokens)
    if is_required:
        first = [f"start: {groups}"]
    elif content_schema is not None:
        first = [f"start: {content} content | {groups}", f"content: {json_rule(content_schema)}"]
    elif content:
        first = [f"start: {content} (TEXT | <[*]>)* | {groups}", r"TEXT: /(.|\n)*/"]
    elif not begin:
        first = ["start: TEXT | calls", r"TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/"]
    else:
        first = _free_text(begin, pieces_of(call_format.begin, tokens)[0], "+" if is_repeated else "")
    return StructuredOutput(grammar="\n".join([*first, *_calls(call_format, schemas, tokens, is_parallel), ""]))


def _free_text(begin: str, first: str | int, repeated: str) -> list[str]:
    """Return rules for any text up to a marker. If the marker begins with a token, the text may contain any other token
    (such as those around thoughts)."""
    if isinstance(first, str):
        rules = ["start: TEXT | (opener calls)" + repeated, f"opener[lazy]: TEXT {begin}"]
    else:
        rules = [
            "start: text | (opener calls)" + repeated,
            f"opener: text {begin}",
            f"text: (TEXT | <[^{first}]>)*",
        ]
    return [*rules, r"TEXT: /(.|\n)*/"]


def _calls(
    call_format: CallFormat, schemas: Mapping[str, Schema], tokens: Mapping[str, int], is_parallel: bool
) -> list[str]:
    """Return the rules for what follows a marker."""
    calls = "call"
    if is_parallel and call_format.between_objects is not None:
        calls = f"call ({quoted(call_format.between_objects)} call)*"
    opening, closing = written_mark(call_format.opening, tokens), written_mark(call_format.closing, tokens)
    end = written_mark(call_format.end, tokens)
    rules = [
        f"calls: {opening} {calls} {closing} {end}",
        f"call: {' | '.join(f'call_{number}' for number in range(len(schemas)))}",
    ]
    for number, (name, schema) in enumerate(schemas.items()):
        head, tail = quoted(head_of(call_format, name)), '"}"'
        if call_format.head:
            before, _, behind = call_format.head.partition("{name}")
            head = f"{written_mark(before, tokens)} {quoted(name)} {written_mark(behind, tokens)}"
            tail = written_mark(call_format.tail, tokens)
        rules.append(f"call_{number}: {head} arguments_{number} {tail}")
        rules += _arguments(f"arguments_{number}", call_format, schema, tokens)
    return rules


def _arguments(rule: str, call_format: CallFormat, schema: Schema, tokens: Mapping[str, int]) -> Iterable[str]:
    match call_format.arguments:
        case MarkedArguments():
            return marked_arguments(rule, schema, call_format.arguments, tokens)
        case BareJson():
            return BareArguments(rule, schema, call_format.arguments.string_mark, tokens)
        case None:
            return [f"{rule}: {json_rule(schema)}"]

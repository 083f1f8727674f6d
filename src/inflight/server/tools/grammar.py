"""The grammar that makes a model write tool calls in its family's notation, so that they are always valid.

Decides how calls are written, to the character; `call_parser` recognises them by that. Markers that are single tokens
are named by their ids, because in a grammar their text would stand for other tokens.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from inflight.contracts.structured_output import StructuredOutput
from inflight.grammar.json_schema import checked_schema
from inflight.grammar.marks import quoted, written_mark
from inflight.server.answers.call_format import CallFormat
from inflight.server.answers.call_parser import head_of

Schema: TypeAlias = Mapping[str, Any]
"""A schema that was checked and, as far as the check shows, can be enforced."""


def any_object() -> Schema:
    return checked_schema('{"type": "object"}')


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
) -> StructuredOutput:
    """Return the grammar of calls or, if no call is required, of content: JSON of a schema, or free text up to a call.

    Args:
        schemas: the schema of each tool's arguments, by the tool's name.
        tokens: the ids of markers that are single tokens to grammars.
        is_required: whether there must be a call.
        is_parallel: whether there may be several calls.
        content_schema: the schema of content that is not a call; None: free text.

    Raises ValueError if the grammar is too large.
    """
    # A model that may omit the marker is never forced to write it.
    begin = "" if call_format.is_begin_optional else written_mark(call_format.begin, tokens)
    group = f"{begin} calls"
    is_repeated = is_parallel and call_format.between_objects is None and not call_format.is_begin_optional
    groups = f'{group} ("\\n" {group})*' if is_repeated else group
    if is_required:
        first = [f"start: {groups}"]
    elif content_schema is not None:
        first = [f"start: content | {groups}", f"content: {_json(content_schema)}"]
    elif not begin:
        first = ["start: TEXT | calls", r"TEXT: /[ \n\r\t]*([^{ \n\r\t](.|\n)*)?/"]
    else:
        first = _free_text(begin, tokens.get(call_format.begin), "+" if is_repeated else "")
    return StructuredOutput(grammar="\n".join([*first, *_calls(call_format, schemas, tokens, is_parallel), ""]))


def _free_text(begin: str, token_id: int | None, repeated: str) -> list[str]:
    """Return rules for any text up to a marker. If the marker is a token, the text may contain any other token (such
    as those around thoughts)."""
    if token_id is None:
        rules = ["start: TEXT | (opener calls)" + repeated, f"opener[lazy]: TEXT {begin}"]
    else:
        rules = [
            "start: text | (opener calls)" + repeated,
            f"opener: text {begin}",
            f"text: (TEXT | <[^{token_id}]>)*",
        ]
    return [*rules, r"TEXT: /(.|\n)*/"]


def _calls(
    call_format: CallFormat, schemas: Mapping[str, Schema], tokens: Mapping[str, int], is_parallel: bool
) -> list[str]:
    """Return the rules for what follows a marker."""
    calls = "call"
    if is_parallel and call_format.between_objects is not None:
        calls = f"call ({quoted(call_format.between_objects)} call)*"
    end = written_mark(call_format.end, tokens)
    rules = [
        f"calls: {quoted(call_format.opening)} {calls} {quoted(call_format.closing)} {end}",
        f"call: {' | '.join(f'call_{number}' for number in range(len(schemas)))}",
    ]
    for number, (name, schema) in enumerate(schemas.items()):
        rules.append(f'call_{number}: {quoted(head_of(call_format, name))} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: {_json(schema)}")
    return rules


def _json(schema: Schema) -> str:
    # "::=" would be taken to mean that the grammar is in another notation.
    return "%json " + json.dumps(schema, ensure_ascii=False).replace("::=", ":\\u003a=")

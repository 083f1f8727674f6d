"""`CallFormat`: how a family of models writes tool calls, and which family a chat template belongs to.

Decides what counts as the beginning of a call. Knows no tools, grammars or streams.
"""

import secrets
import string
from dataclasses import dataclass

_LETTERS_AND_DIGITS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A notation for calls. They come in groups: `begin`, `opening`, a JSON object for each call, `closing`, `end`.

    Attributes:
        name: the name that operators use.
        begin: the marker before a group.
        end: the marker after it; "" if there is none.
        opening, closing: the text between the markers and the objects.
        arguments_key: the key of a call's arguments, next to its "name".
        between_objects: the text between the objects of a group; None: each object has its own group or, if `begin` is
            optional, there is at most one.
        is_begin_optional: whether an object at the beginning of the text is a call, too. Models that may omit `begin`
            are never forced to write it.
        call_id_length: letters and digits of a call's id; None: ids in OpenAI's form.
    """

    name: str
    begin: str
    end: str = ""
    opening: str = ""
    closing: str = ""
    arguments_key: str = "arguments"
    between_objects: str | None = None
    is_begin_optional: bool = False
    call_id_length: int | None = None


def new_call_id(length: int | None) -> str:
    """Return so many letters and digits; None: an id in OpenAI's form."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(length))


HERMES = CallFormat(name="hermes", begin="<tool_call>", end="</tool_call>", opening="\n", closing="\n")
"""Nous Hermes 2 Pro and 3, Qwen 2.5 and 3."""

LLAMA3 = CallFormat(
    name="llama3",
    begin="<|python_tag|>",
    arguments_key="parameters",
    is_begin_optional=True,
)
"""Llama 3.1 to 3.3. Their templates refuse messages with more than one call, so the grammar never allows more."""

MISTRAL = CallFormat(
    name="mistral", begin="[TOOL_CALLS]", opening="[", closing="]", between_objects=", ", call_id_length=9
)
"""Mistral's third tokenizer, as in Mistral 7B v0.3. Its template refuses ids of any other length."""

PLAIN = CallFormat(name="plain", begin="", between_objects="\n", is_begin_optional=True)
"""For models without a known notation: bare objects, which only a grammar makes them write."""

CALL_FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL)}


def format_of_template(template: str) -> CallFormat | None:
    """Return how a model with this chat template (Jinja) writes calls; None if that is unknown."""
    if "<tool_call>" in template:
        # The same marker around something other than JSON: Qwen 3 Coder, GLM 4.5.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else MISTRAL  # later versions write the name before the object
    if "<|python_tag|>" in template or ("<|eot_id|>" in template and '"parameters":' in template):
        return LLAMA3
    return None

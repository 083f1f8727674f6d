"""`CallFormat`: how a family of models writes tool calls, and which family a chat template belongs to.

Decides what counts as the beginning of a call. Knows no tools, grammars or streams.
"""

import json
import secrets
import string
from dataclasses import dataclass

_LETTERS_AND_DIGITS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class MarkedArguments:
    """Arguments that are written one by one; in `begin`, "{key}" stands for an argument's name."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class BareJson:
    """Arguments in JSON without quotes around keys, without spaces, and with a mark around strings."""

    string_mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A notation for calls. They come in groups: `begin`, `opening`, the calls, `closing`, `end`. A call is a JSON
    object with a name and arguments; or `head`, its arguments, and `tail`.

    Attributes:
        name: the name that operators use.
        begin: the marker before a group.
        end: the marker after it; "" if there is none.
        opening, closing: the text between the markers and the calls.
        arguments_key: the key of a call's arguments, next to its "name", in an object.
        head: in it, "{name}" stands for the name of the tool; "": a call is an object.
        tail: what follows the arguments.
        arguments: how they are written; None: as JSON.
        between_objects: the text between the calls of a group; None: each call has its own group or, if `begin` is
            optional, there is at most one.
        between_groups: the text between groups; None: there is at most one.
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
    head: str = ""
    tail: str = ""
    arguments: MarkedArguments | BareJson | None = None
    between_objects: str | None = None
    between_groups: str | None = "\n"
    is_begin_optional: bool = False
    call_id_length: int | None = None


def head_of(call_format: CallFormat, name: str) -> str:
    """Return how a call begins that a grammar guarantees, up to its arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{call_format.arguments_key}": '


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

HARMONY = CallFormat(
    name="harmony",
    begin="<|channel|>commentary to=functions.",
    head="{name} <|constrain|>json<|message|>",
    between_groups=None,
)
"""gpt-oss. The token that ends a call ends the answer, too."""

GEMMA4 = CallFormat(
    name="gemma4",
    begin="<|tool_call>",
    head="call:{name}",
    arguments=BareJson('<|"|>'),
    end="<tool_call|>",
    between_groups="",
)

DEEPSEEK_R1 = CallFormat(
    name="deepseek-r1",
    begin="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    between_objects="\n",
    end="<｜tool▁calls▁end｜>",
)

DEEPSEEK = CallFormat(
    name="deepseek-v3.1",
    begin="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    between_objects="",
    end="<｜tool▁calls▁end｜>",
)

QWEN_XML = CallFormat(
    name="qwen3-coder",
    begin="<tool_call>",
    opening="\n",
    head="<function={name}>\n",
    arguments=MarkedArguments("<parameter={key}>\n", "\n</parameter>\n"),
    tail="</function>",
    closing="\n",
    end="</tool_call>",
)

GLM = CallFormat(
    name="glm-4.5",
    begin="<tool_call>",
    head="{name}\n",
    arguments=MarkedArguments("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    end="</tool_call>",
)

MISTRAL_ARGS = CallFormat(
    name="mistral-v11", begin="[TOOL_CALLS]", head="{name}[ARGS]", between_groups="", call_id_length=9
)
"""Mistral's tokenizers from the eleventh on."""

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

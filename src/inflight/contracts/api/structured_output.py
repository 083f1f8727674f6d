"""`StructuredOutput`: the required form of a request's text. Plain data, validated at construction.

`inflight.grammar` decides whether a schema, a regex or a grammar can be enforced.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from inflight.contracts.api.options import is_text, strict_options

MAX_CHARACTERS = 2**18
"""The longest accepted description. Compilation has its own limits."""

_TEXTS = ("json_schema", "regex", "grammar")
_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """Reasoning that a model may write before the structured output.

    Attributes:
        end: the text or token that ends the reasoning, such as "</think>".
        begin: the text or token that begins it; "": the prompt ends with it.
        otherwise: the text in its place if the model does not reason.
        max_tokens: its most tokens, after which the end is forced. `end` must begin with a single token.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    end: str
    begin: str = ""
    otherwise: str = ""
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    def __post_init__(self) -> None:
        for name in ("end", "begin", "otherwise"):
            _check_text(name, getattr(self, name))
        if not self.end:
            raise ValueError("end is ''; reasoning must have an end")


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form of a sequence's whole output. Give exactly one kind; or none, to limit only the reasoning.

    Attributes:
        json_schema: JSON that this JSON schema (its text) accepts.
        json_object: any JSON object.
        regex: text that this regular expression matches as a whole (syntax of Rust's `regex`: no look-around and no
            backreferences).
        choice: one of these strings.
        exact_schema: whether an object may have properties that its schema does not name, where `additionalProperties`
            is unset, as the standard says. By default it may not, as with other servers.
        grammar: text of this context-free grammar, in Lark's notation or GBNF's (`root ::= ...`).
        reasoning: reasoning that may come first.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    exact_schema: bool = False
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            raise ValueError(f"reasoning is {self.reasoning!r}; it must be Reasoning")
        if len(given) != 1 and (given or self.reasoning is None):
            raise ValueError(
                f"structured output needs exactly one of {', '.join(_KINDS)}; "
                f"{' and '.join(given) + ' are' if given else 'none is'} given"
            )
        if self.exact_schema and self.json_schema is None:
            raise ValueError(f"exact_schema is True; it goes with a json_schema, and {self.kind} is given")
        for name in _TEXTS:
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.choice is not None:
            self._check_choice()

    def _check_choice(self) -> None:
        if not isinstance(self.choice, list | tuple) or not self.choice:
            raise ValueError(f"choice is {self.choice!r}; it must be a list of at least one string")
        for text in self.choice:
            _check_text("a member of choice", text)
        if sum(map(len, self.choice)) > MAX_CHARACTERS:
            raise ValueError(f"choice has more than {MAX_CHARACTERS} characters in all, the most that are accepted")
        object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def kind(self) -> str:
        """The name of the given field; "reasoning" if the text after it is free."""
        return next((name for name in _KINDS if getattr(self, name) not in (None, False)), "reasoning")

    @property
    def num_characters(self) -> int:
        """The length of the description."""
        return len(self.json_schema or self.regex or self.grammar or "") + sum(map(len, self.choice or ()))


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} is {text!r}; it must be a string")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{name} has {len(text)} characters; at most {MAX_CHARACTERS} are accepted")
    if not is_text(text):
        raise ValueError(f"{name} has half of a surrogate pair in it; it must be text that UTF-8 can encode")

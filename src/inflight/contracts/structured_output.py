"""`StructuredOutput`: what a request's text must look like. Plain data, checked when made.

Decides nothing about grammars: `inflight.grammar` says whether a schema, a regex or a grammar can be enforced.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from inflight.contracts.options import is_text, strict_options

MAX_CHARACTERS = 2**18
"""The longest description that is accepted. The cost of compiling it has limits of its own."""

_TEXTS = ("json_schema", "regex", "grammar")
_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """What a model may write before what its output must be.

    Attributes:
        end: the text or token behind the reasoning, such as "</think>".
        begin: the text or token before it; "": the prompt has it already.
        otherwise: what stands in its place if the model does not think.
        max_tokens: how many tokens it may have; then the end comes. The end must begin with a single token.
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
    """What the whole output of a sequence must be. Exactly one kind is given; or none, if only reasoning is limited.

    Attributes:
        json_schema: JSON that this JSON schema (its text) accepts.
        json_object: any JSON object.
        regex: text that this regular expression matches as a whole (syntax of Rust's `regex`: no look-around and no
            backreferences).
        choice: one of these strings.
        exact_schema: whether an object whose schema says nothing about `additionalProperties` may have any, as the
            standard says. By default it has only the properties that are named, as with other servers.
        grammar: text of this context-free grammar, in Lark's notation or GBNF's (`root ::= ...`).
        reasoning: what may come before it.
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
        """The name of the field that is given; "reasoning" if what follows it is free."""
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

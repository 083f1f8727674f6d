"""`StrictModel`: what a request may say. A field that is not known, or not supported, is refused by name.

Decides what becomes of fields that this server does not implement: sent with the value that they have anyway, they
change nothing and are let through; any other value would change the answer, and is refused.
"""

import difflib
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list of which only the first wrong member is reported: a client may send a million of them."""


class StrictModel(BaseModel):
    """An object of a request: exact types, no unknown fields. Null is as good as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that clients know and this server does not implement, with the values that change nothing, beside null."""

    @model_validator(mode="before")
    @classmethod
    def _let_through_what_changes_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.keys() <= cls.model_fields.keys():
            return given
        return {name: value for name, value in given.items() if name in cls.model_fields or _checked(cls, name, value)}


def _checked(cls: type[StrictModel], name: str, value: Any) -> bool:
    """False: the field can be left out. Raises if it cannot."""
    if name not in cls.NOT_SUPPORTED:
        close = difflib.get_close_matches(name, [*cls.model_fields, *cls.NOT_SUPPORTED], n=1) if len(name) < 100 else []
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise refusal("unknown_field", name, f"there is no field {reprlib.repr(name)}{hint}")
    harmless = cls.NOT_SUPPORTED[name]
    if value is None or any(type(value) is type(each) and value == each for each in harmless):
        return False
    accepted = " or ".join(["null", *(repr(each) for each in harmless)])
    shown = reprlib.repr(value)
    raise refusal("unsupported_field", name, f"{name} is {shown}; this server does not support it, only {accepted}")


def of_type(what: str, *accepted: str, absent: str | None = None) -> BeforeValidator:
    """Refuses objects whose `type` is none of these, in a sentence; one without any is taken for one of `absent`."""

    def check(given: Any) -> Any:
        kind = _type_in(given, absent) if isinstance(given, dict) else accepted[0]
        if kind not in accepted:
            listed = " or ".join(map(repr, accepted))
            message = f"the type is {reprlib.repr(kind)}; this server takes {what} of type {listed} only"
            raise refusal("unsupported_content", "type", message)
        return given

    return BeforeValidator(check)


def by_type(otherwise: str) -> Discriminator:
    """Tells members of a union apart that are tagged with "#" and their `type`; what has none is `otherwise`.

    (The tag is part of pydantic's path to what is wrong; so it is not taken for a field's name.)"""
    return Discriminator(lambda given: f"#{_type_in(given, otherwise)}")


def _type_in(given: Any, otherwise: str | None) -> Any:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return otherwise if kind is None else kind


def refusal(kind: str, field: str, message: str) -> PydanticCustomError:
    """To be raised while a model is validated: a sentence that says all by itself; `kind` becomes the error's code."""
    # Through the context, for braces in a message would be taken for its variables.
    return PydanticCustomError(kind, "{message}", {"message": message, "field": field})

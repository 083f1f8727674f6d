"""`StrictModel`: the base of all request models. It refuses unknown and unsupported fields by name.

Decides what happens to fields that this server does not implement: a value that changes nothing is accepted and
ignored; any other value would change the answer, and is refused.
"""

import difflib
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from inflight.server.wire.api_errors import ApiError

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports only its first wrong member, because a client may send a million of them."""


class StrictModel(BaseModel):
    """An object in a request: exact types, no unknown fields. Null means the same as an absent field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that clients know but this server does not implement, with the values besides null that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _let_through_what_changes_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.keys() <= cls.model_fields.keys():
            return given
        return {name: value for name, value in given.items() if name in cls.model_fields or _checked(cls, name, value)}

    def check_limits(self, **limits: int) -> None:
        """Raise `ApiError` if one of these fields is above its limit."""
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and value > limit:
                raise ApiError(400, f"{name} is {value}; this server takes at most {limit}", param=name)


def _checked(cls: type[StrictModel], name: str, value: Any) -> bool:
    """Return False if the field can be dropped; raises if it cannot."""
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
    """Refuse objects whose `type` is not one of `accepted`; an object without a type counts as `absent`."""

    def check(given: Any) -> Any:
        kind = _type_in(given, absent) if isinstance(given, dict) else accepted[0]
        if kind not in accepted:
            listed = " or ".join(map(repr, accepted))
            message = f"the type is {reprlib.repr(kind)}; this server takes {what} of type {listed} only"
            raise refusal("unsupported_content", "type", message)
        return given

    return BeforeValidator(check)


def by_type(otherwise: str) -> Discriminator:
    """Choose the union member tagged with "#" and the object's `type`; an object without a type counts as `otherwise`.

    (Tags are part of pydantic's path to an error; the "#" keeps them from being taken for field names.)"""
    return Discriminator(lambda given: f"#{_type_in(given, otherwise)}")


def _type_in(given: Any, otherwise: str | None) -> Any:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return otherwise if kind is None else kind


def refusal(kind: str, field: str, message: str) -> PydanticCustomError:
    """Return an error to raise during validation; `message` is shown as it stands, `kind` becomes the error's code."""
    # Passed through the context, because braces in a message template would be taken for variables.
    return PydanticCustomError(kind, "{message}", {"message": message, "field": field})

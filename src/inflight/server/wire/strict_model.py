"""`StrictModel`: the base of all request models. It refuses unsupported fields by name.

Unsupported fields: a value without effect is accepted; a field that does not affect correctness (hints, the client's
own data, fields of newer clients) is ignored and reported; any other is refused, because ignoring it would silently
change the answer.

A history is different: a client sends it again with every turn, so that a refusal ends the conversation. In objects of
a history (`HistoryModel`) absent texts are empty, every unknown field is ignored, and what is of an unknown type is
replaced by a text (`of_type`), all reported. Wrong values are refused there, too, and strict mode does none of this.
"""

import difflib
import re
import reprlib
import secrets
from collections.abc import Callable, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from inflight.contracts.api.errors import InvalidRequestError
from inflight.server.wire.addresses import OPTIONS, Address, Addresses
from inflight.server.wire.api_errors import ApiError

MAX_IGNORED = 64
LIKENESS_WORTH_A_HINT = 0.6
LIKENESS_OF_MISSPELT = 0.85
"""The least similarity (`difflib`) at which an unknown field counts as a misspelt known one."""

ITEM_MARK = "\ufdd0"
"""A character that no text has."""
MARKED_ITEM = re.compile(f"\n?({ITEM_MARK}[0-9a-f]{{32}}{ITEM_MARK})\n?")
_DATA_URL = re.compile(r"data:(image|audio|video)/[\w.+-]+;base64,.")
_URLS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
"""Fields of parts that hold a URL, and the kinds of what is there."""
_SANE = re.compile(r"[\w.\[\]-]{1,60}", re.ASCII)

Item: TypeAlias = str | bytes | Address | InvalidRequestError
"""A data URL, a file's bytes, an address, or why one could not be fetched."""
NOWHERE = Addresses()
"""Allows nothing."""

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports only its first wrong member, because a client may send a million of them."""


@dataclass(slots=True)
class RequestParsing:
    """The state of parsing a request.

    Attributes:
        is_strict: whether fields that could be ignored or replaced are refused.
        addresses: what may be fetched.
        ignored: the names of ignored and replaced fields.
        items: images and sounds with their kinds, by the mark that stands in their place in a text.
    """

    is_strict: bool = False
    addresses: Addresses = NOWHERE
    ignored: list[str] = field(default_factory=list)
    items: dict[str, tuple[str, Item]] = field(default_factory=dict)

    @property
    def shown_ignored(self) -> str:
        """The names for a header, separated by commas."""
        names = [name if _SANE.fullmatch(name) else "(an odd name)" for name in self.ignored[:MAX_IGNORED]]
        return ", ".join([*names, *(["(others)"] if len(self.ignored) > MAX_IGNORED else [])])

    def mark(self, kind: str, item: Item) -> str:
        """Keep an image or sound; return a mark for its place, which no other text has."""
        mark = f"{ITEM_MARK}{secrets.token_hex(16)}{ITEM_MARK}"
        self.items[mark] = kind, item
        return mark

    def ignore(self, name: str) -> None:
        """Record an ignored field, once per name."""
        if len(self.ignored) <= MAX_IGNORED and name not in self.ignored:
            self.ignored.append(name)


READING: ContextVar[RequestParsing] = ContextVar("READING", default=RequestParsing(is_strict=True))  # noqa: B039
"""Of the request at hand."""


class StrictModel(BaseModel):
    """An object in a request: exact types, no unknown fields. Null means the same as an absent field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Unsupported fields that clients send, with the values besides null that have no effect."""

    IGNORED: ClassVar[Set[str]] = frozenset()
    """Fields that can be ignored, whatever their value."""

    MAY_HAVE_MORE: ClassVar[bool] = False
    """Whether unknown fields can be ignored: in whole bodies, to which newer clients add fields, and in the client's
    own data."""

    OF_OTHERS: ClassVar[Set[str]] = frozenset()
    """Fields of other APIs that would change an answer, and so are refused here."""

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.keys() <= cls.model_fields.keys():
            return given
        return {name: value for name, value in given.items() if name in cls.model_fields or _checked(cls, name, value)}

    def check_limits(self, **limits: int) -> None:
        """Raise `ApiError` if one of these fields is above its limit."""
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and value > limit:
                raise ApiError(400, f"{name} is {value}; this server takes at most {limit}", param=name)


class HistoryModel(StrictModel):
    """An object in a history, with what a conversation must survive."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_texts(cls, given: Any) -> Any:
        if not isinstance(given, dict) or READING.get().is_strict:
            return given
        needed = ((name, field.annotation) for name, field in cls.model_fields.items() if field.is_required())
        texts = (name for name, kind in needed if kind is str or str in get_args(kind))
        return {**given, **{name: "" for name in texts if given.get(name) is None}}


def _checked(cls: type[StrictModel], name: str, value: Any) -> bool:
    """Return False if the field can be dropped; raises if it cannot."""
    reading = READING.get()
    is_known = name in cls.NOT_SUPPORTED
    harmless = cls.NOT_SUPPORTED.get(name, ())
    if is_known and (value is None or any(type(value) is type(each) and value == each for each in harmless)):
        return False
    if (name in cls.IGNORED or issubclass(cls, HistoryModel)) and not reading.is_strict:
        reading.ignore(name)
        return False
    if not is_known:
        fields = [*cls.model_fields, *cls.NOT_SUPPORTED]
        may_be_ignored = cls.MAY_HAVE_MORE and not reading.is_strict and name not in cls.OF_OTHERS
        likeness = LIKENESS_OF_MISSPELT if may_be_ignored else LIKENESS_WORTH_A_HINT
        close = difflib.get_close_matches(name, fields, n=3, cutoff=likeness) if len(name) < 100 else []
        close.sort(key=lambda other: not set(name.split("_")) <= set(other.split("_")))  # max_output_tokens, not min_
        if may_be_ignored and not close:
            reading.ignore(name)
            return False
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise refusal("unknown_field", name, f"there is no field {reprlib.repr(name)}{hint}")
    accepted = " or ".join(["null", *(repr(each) for each in harmless)])
    shown = reprlib.repr(value)
    raise refusal("unsupported_field", name, f"{name} is {shown}; this server does not support it, only {accepted}")


def of_type(
    what: str,
    *accepted: str,
    absent: str | None = None,
    otherwise: Callable[[str, Mapping[str, Any]], dict[str, Any]] | None = None,
) -> BeforeValidator:
    """Refuse objects whose `type` is not one of `accepted`; an object without a type counts as `absent`.

    Args:
        otherwise: in a history, what replaces an object of an unknown type, which is reported: called with `shown_text`
            and the object. Strict mode refuses it.
    """

    def check(given: Any) -> Any:
        kind = _type_in(given, absent) if isinstance(given, dict) else accepted[0]
        if kind not in accepted:
            reading, (medium, url) = READING.get(), _item(given)
            item = url if _DATA_URL.match(url) else reading.addresses.allowed(medium, url)
            if otherwise is not None and item is not None:
                return otherwise(reading.mark(medium, item), given)
            if otherwise is not None and (kind is None or isinstance(kind, str)) and not reading.is_strict:
                reading.ignore(kind or "type")
                return otherwise(shown_text(kind or "", given), given)
            if otherwise is not None and (option := OPTIONS.get(url[:6].partition(":")[0].lower())) is not None:
                message = f"{reprlib.repr(kind)} has an address; this server fetches only what {option} allows"
                raise refusal("unsupported_content", "type", message)
            listed = " or ".join(map(repr, accepted))
            message = f"the type is {reprlib.repr(kind)}; this server takes {what} of type {listed} only"
            raise refusal("unsupported_content", "type", message)
        return given

    return BeforeValidator(check)


def _item(given: Mapping[str, Any]) -> tuple[str, str]:
    """The kind and URL of an image, sound or video, as a part of OpenAI's APIs or a block of Anthropic's; an empty URL:
    it is something else."""
    kind, url = next(((kind, given[name]) for name, kind in _URLS.items() if name in given), ("image", None))
    source, sound = given.get("source"), given.get("input_audio")
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif isinstance(source, dict) and source.get("type") == "url" and given.get("type") == "image":
        url = source
    if isinstance(sound, dict):
        url = f"data:audio/{sound.get('format')};base64,{sound.get('data')}"
    url = url.get("url") if isinstance(url, dict) else url
    url = url if isinstance(url, str) else ""
    return (found[1] if (found := _DATA_URL.match(url)) and kind != "video" else kind), url


def text_part(kind: str) -> Callable[[str, Mapping[str, Any]], dict[str, Any]]:
    """Return the replacement of parts of unknown types by one of type `kind`."""
    return lambda text, _: {"type": kind, "text": text}


def shown_text(kind: str, given: Mapping[str, Any]) -> str:
    """Return the text for an object of an unknown type: its own, or what names it. Thoughts that cannot be read have
    none."""
    for own in ("text", kind):
        if isinstance(text := given.get(own), str):
            return text
    if "thinking" in kind or "reasoning" in kind:
        return ""
    names = (given.get(key) for key in ("tool_name", "title", "filename", "name"))
    name = next((f" {name!r}" for name in names if isinstance(name, str)), "")
    shown = kind.removeprefix("input_").removesuffix("_url").replace("_", " ") + name
    texts = (given.get(key) for key in ("input", "output"))
    text = next((text for text in texts if isinstance(text, str)), None)
    return f"[{shown} omitted: it cannot be read here]" if text is None else f"[{shown}: {text}]"


def leaving_out(what: str, *kept: str, absent: str | None = None) -> BeforeValidator:
    """Drop the members of a list whose type is not in `kept`, and report it. Strict mode drops nothing.

    Args:
        absent: the type of an object without one.
    """

    def check(given: Any) -> Any:
        reading = READING.get()
        if not isinstance(given, list) or reading.is_strict:
            return given
        members = []
        for index, each in enumerate(given):
            kind = _type_in(each, absent) if isinstance(each, dict) else None
            if isinstance(kind, str) and kind not in kept:
                reading.ignore(f"{what}[{index}].{kind}")
            else:
                members.append(each)
        return members

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

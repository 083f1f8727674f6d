"""Classes of options: what the annotations of their fields accept, and the sentence that refuses anything else.

msgspec checks the values. Knows no option itself.
"""

import difflib
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from inflight.contracts.api.errors import UnknownOptionError
from inflight.contracts.api.foreign_names import hint

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
MAX_FLOAT = sys.float_info.max
MOST_SHOWN = 1000
"""The longest value that an error repeats, in characters."""
NotNegative: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_FLOAT, description="a number of seconds above 0")]


def _of_class(function: F) -> F:
    """A decorator: the function is called once for each class."""
    return functools.cache(function)  # type: ignore[return-value]


def refuse_unknown_options(names: Iterable[str], accepted: Iterable[str], owner: str) -> None:
    """Raise `UnknownOptionError` for the first of `names` that is not `accepted`, with what another engine's name means
    here, or the closest accepted name."""
    accepted = sorted(accepted)
    for name in names:
        if name not in accepted:
            close = difflib.get_close_matches(name, accepted, n=1)
            suggestion = f"did you mean {close[0]!r}?" if close else f"it accepts {', '.join(accepted)}."
            raise UnknownOptionError(f"{owner} has no option {name!r}; {hint(name) or suggestion}")


def strict_options(cls: type[T]) -> type[T]:
    """A decorator for dataclasses whose fields are options, or groups of options: classes of the same kind.

    An unknown keyword is refused by name (`UnknownOptionError`), and so is a number, text, switch or choice that the
    annotation of its field does not accept (`ValueError`); `__post_init__` then checks the rest. A group may be given
    as a dict, and its options flat, beside those of the class itself.
    """
    original, check_rest = cls.__init__, getattr(cls, "__post_init__", None)

    @functools.wraps(original)
    def __init__(self: T, *args: Any, **options: Any) -> None:
        refuse_unknown_options(options, option_names(cls), cls.__name__)
        original(self, *args, **_nested(cls, {name: _plain(value) for name, value in options.items()}))
        if check_rest is None:  # then a dataclass does not call `__post_init__`
            __post_init__(self)

    def __post_init__(self: T) -> None:
        try:
            msgspec.convert(self, _checker(cls), from_attributes=True)
        except msgspec.ValidationError:
            flat = {field.name: field.metadata.get("flat", field.name) for field in fields(cls)}  # type: ignore[arg-type]
            for name, kind in plain_fields(cls).items():
                check(flat[name], getattr(self, name), kind)
        if check_rest is not None:
            check_rest(self)

    cls.__init__ = __init__  # type: ignore[method-assign,assignment]
    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return cls


@_of_class
def plain_fields(cls: type[Any]) -> Mapping[str, Any]:
    """The annotations of a dataclass's fields that are numbers, texts, switches or choices, or may be None instead."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls) if _is_plain(hints[field.name])}


@_of_class
def _checker(cls: type[Any]) -> type[msgspec.Struct]:
    return msgspec.defstruct(cls.__name__, list(plain_fields(cls).items()), kw_only=True)


def check(name: str, value: object, kind: Any) -> None:
    """Raise `ValueError` unless `value` is what the annotation `kind` accepts: a plain type, constrained or not."""
    if isinstance(value, float) and base_of(kind)[0] is float:
        value = float(value)  # a scalar of numpy's
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        shown = repr(value) if len(repr(value)) <= MOST_SHOWN else f"a {type(value).__name__}"
        raise ValueError(f"{name} is {shown}; it must be {described(kind)}") from None


def check_members(name: str, values: Collection[object], kind: Any) -> None:
    """Raise `ValueError` for the first of `values` that `kind` does not accept."""
    if not values:
        return
    try:
        msgspec.convert(tuple(values), tuple[kind, ...])
    except msgspec.ValidationError:
        for value in values:
            check(name, value, kind)


def base_of(kind: Any) -> tuple[Any, Meta]:
    """A plain annotation's type, or its `Literal`, and its constraints."""
    arms = [arm for arm in get_args(kind) if arm is not NoneType] if NoneType in get_args(kind) else [kind]
    only = arms[0] if len(arms) == 1 else kind
    metadata = getattr(only, "__metadata__", None)
    return (only, Meta()) if metadata is None else (get_args(only)[0], metadata[0])


def _is_plain(kind: Any) -> bool:
    base, _ = base_of(kind)
    return base in (bool, int, float, str) or get_origin(base) is Literal


def described(kind: Any) -> str:
    """What an annotation accepts, in words."""
    base, meta = base_of(kind)
    least, most = meta.ge if meta.gt is None else meta.gt, meta.le
    if meta.description is not None:
        return meta.description
    if get_origin(base) is Literal:
        return f"one of {', '.join(map(repr, get_args(base)))}"
    if base in (bool, str):
        return "True or False" if base is bool else "text"
    noun = "an integer" if base is int else "a number"
    if meta.gt is not None:
        return f"{noun} above {least} and at most {most}"
    return f"{noun} of at least {least}" if most is None else f"{noun} from {least} to {most}"


@_of_class
def _groups(cls: type[Any]) -> Mapping[str, type[Any]]:
    """The fields of a class that are groups of options."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if is_dataclass(hints[field.name])}


class FlatOption(NamedTuple):
    """An option under the name that it has beside those of other groups.

    Attributes:
        group: the field that has its group; None: it is a field itself.
        field: its name there.
        default: its value if it is not given.
        kind: its annotation.
    """

    group: str | None
    field: str
    default: Any
    kind: Any


@_of_class
def flat_options(cls: type[Any]) -> Mapping[str, FlatOption]:
    """All options by their flat names."""
    options: dict[str, FlatOption] = {}
    owners: list[tuple[str | None, Any]] = [(None, cls), *_groups(cls).items()]
    for group, owner in owners:
        kinds = get_type_hints(owner, include_extras=True)
        for field in fields(owner):
            if owner is not cls or field.name not in _groups(cls):
                name = field.name if group is None else field.metadata.get("flat", field.name)
                options[name] = FlatOption(group, field.name, field.default, kinds[field.name])
    return options


def flat_values(options: Any, but: Mapping[str, Any] = {}) -> dict[str, Any]:
    """All values by their flat names, but for those of groups that `but` has."""
    groups = _groups(type(options))
    others = {name for name, value in but.items() if name in groups and isinstance(value, (groups[name], Mapping))}
    return {
        name: getattr(options if group is None else getattr(options, group), field)
        for name, (group, field, *_) in flat_options(type(options)).items()
        if group not in others
    }


def option_names(cls: type[Any]) -> set[str]:
    """What a class of options accepts: options by their flat names, and groups."""
    return flat_options(cls).keys() | _groups(cls).keys()


def _nested(cls: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Options with the flat ones in their groups."""
    groups, homes = _groups(cls), flat_options(cls)
    flat: dict[str, dict[str, Any]] = {}
    nested: dict[str, Any] = {}
    for name, value in options.items():
        if name in groups and isinstance(value, Mapping):
            nested[name] = groups[name](**value)
        elif name not in homes or (name in groups and isinstance(value, groups[name])):
            nested[name] = value
        else:
            group, field, *_ = homes[name]
            if group is None:
                nested[name] = value
            else:
                flat.setdefault(group, {})[field] = value
    for name in nested.keys() & groups.keys():
        if not isinstance(nested[name], groups[name]):
            raise ValueError(f"{name} is {nested[name]!r}; it must be a {groups[name].__name__}, or a dict")
    for name, given in flat.items():
        nested[name] = replace(nested[name], **given) if name in nested else groups[name](**given)
    return nested


def _plain(value: object) -> Any:
    """A path as text, and so a dtype or device of torch."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def is_text(value: object) -> bool:
    """Whether `value` is text that UTF-8 can encode: a string without half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_loaded_model(given: object) -> bool:
    """Whether this is a `PreTrainedModel`. Imports nothing: a caller that has one has imported its class, and torch."""
    return _is_instance(given, "transformers.modeling_utils", "PreTrainedModel")


def is_loaded_tokenizer(given: object) -> bool:
    """Whether this is a `PreTrainedTokenizerBase`; see `is_loaded_model`."""
    return _is_instance(given, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase")


def is_loaded_processor(given: object) -> bool:
    """Whether this is a `ProcessorMixin`; see `is_loaded_model`."""
    return _is_instance(given, "transformers.processing_utils", "ProcessorMixin")


def _is_instance(given: object, module: str, name: str) -> bool:
    return module in sys.modules and isinstance(given, getattr(sys.modules[module], name))

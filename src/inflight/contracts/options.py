"""Checks for option classes: by name, by type and by range, each with one clear sentence. Knows no option itself."""

import difflib
import functools
import sys
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

from inflight.contracts.errors import UnknownOptionError
from inflight.contracts.foreign_names import hint

T = TypeVar("T")
MAX_FLOAT = sys.float_info.max


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
    """A decorator for dataclasses: refuses an unknown keyword by name, and says what would be accepted."""
    accepted = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: T, *args: Any, **options: Any) -> None:
        refuse_unknown_options(options, accepted, cls.__name__)
        original(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[method-assign,assignment]
    return cls


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise `ValueError` unless `value` is an integer (not a bool) in [minimum, maximum]."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < minimum or (maximum is not None and value > maximum):  # type: ignore[operator]
        accepted = f"an integer of at least {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
        raise ValueError(f"{name} is {value!r}; it must be {accepted}")


def check_number(
    name: str, value: object, accepted: str, minimum: float, maximum: float, *, above: bool = False
) -> None:
    """Raise `ValueError` unless `value` is a finite number in [minimum, maximum], or (minimum, maximum] if `above`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not converted: an integer too large for a float is simply above every limit.
    if not number or not -MAX_FLOAT <= value <= MAX_FLOAT or not minimum <= value <= maximum:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}; it must be {accepted}")
    if above and value == minimum:
        raise ValueError(f"{name} is {value!r}; it must be {accepted}")


def check_switch(name: str, value: object) -> None:
    """Raise `ValueError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False")


def is_text(value: object) -> bool:
    """Whether `value` is text that UTF-8 can encode: a string without half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(repr(choice) for choice in choices)}")


def is_loaded_model(given: object) -> bool:
    """Whether this is a `PreTrainedModel`. Imports nothing: a caller that has one has imported its class, and torch."""
    return _is_instance(given, "transformers.modeling_utils", "PreTrainedModel")


def is_loaded_tokenizer(given: object) -> bool:
    """Whether this is a `PreTrainedTokenizerBase`; see `is_loaded_model`."""
    return _is_instance(given, "transformers.tokenization_utils_base", "PreTrainedTokenizerBase")


def _is_instance(given: object, module: str, name: str) -> bool:
    return module in sys.modules and isinstance(given, getattr(sys.modules[module], name))

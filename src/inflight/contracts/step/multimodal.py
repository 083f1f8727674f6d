"""Images, sounds and videos of a prompt, as plain data: what an encoder reads, and which tokens they stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

KINDS = {"image": "images", "audio": "sounds", "video": "videos"}
"""The kinds of items that a prompt may have, and what several are called."""
NOUNS = {"image": "an image", "audio": "a sound", "video": "a video"}
"""What one is called."""


class Array(msgspec.Struct, frozen=True):
    """An array as plain data, in the order of C.

    Attributes:
        dtype: in numpy's spelling, such as "<f4".
        is_list: whether the processor gave a list of numbers.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One image, sound or video.

    Attributes:
        kind: "image", "audio" or "video".
        digest: of its content and the processor's settings; equal ones are encoded once.
        places: its placeholder tokens, as indices into the prompt, ascending.
        arrays: arguments of the model's `get_image_features`, or of that for its kind.
    """

    kind: str
    digest: bytes
    places: Sequence[int]
    arrays: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class MultimodalInputs:
    """All images, sounds and videos of a prompt.

    Attributes:
        items: in the order of their placeholders.
        arrays: what the processor says of the prompt as a whole: sizes of images, types of tokens.
        encoder_arrays: what the encoders read of all items together; empty: there is one item, or none.
        whole: ranges `[start, end)` of tokens that see each other, so that no step may end within one.
        left_to_generate: whether the model's own `generate` runs the prompt, with these items as `arrays` alone.
    """

    items: Sequence[EncoderInput]
    arrays: Mapping[str, Array] = field(default_factory=dict)
    encoder_arrays: Mapping[str, Array] = field(default_factory=dict)
    whole: Sequence[tuple[int, int]] = ()
    left_to_generate: bool = False

    def generated(self) -> "MultimodalInputs":
        """The same, for the model's own `generate`."""
        of_one = {name: each for item in self.items for name, each in item.arrays.items()}
        return MultimodalInputs((), {**of_one, **self.encoder_arrays, **self.arrays}, left_to_generate=True)

    def items_between(self, start: int, end: int) -> list[EncoderInput]:
        """The items whose placeholders are among the tokens `[start, end)`."""
        return [item for item in self.items if item.places[0] < end and item.places[-1] >= start]

    def end_of_step(self, start: int, end: int, limit: int) -> int:
        """Where a step ends that begins at `start` and would end at `end`; at most at `limit`."""
        within = next((each for each in self.whole if each[0] < end < each[1]), None)
        if within is None:
            return end
        first, last = within
        return first if first > start else last if last <= limit else start

    def digest_between(self, start: int, end: int) -> bytes:
        """What tells the content of the tokens `[start, end)` from that of equal tokens: the digests of the items whose
        placeholders are among them."""
        return b"".join(item.digest for item in self.items_between(start, end))


def placeholder_id(config: Any, kind: str) -> int | None:
    """The token id that stands for a row of an encoder's output, in a model's configuration; None: there is none."""
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

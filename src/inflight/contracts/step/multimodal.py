"""Images and sounds of a prompt, as plain data: what a model's encoder reads, and which tokens they stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec


class Array(msgspec.Struct, frozen=True):
    """An array as plain data, in the order of C.

    Attributes:
        dtype: in numpy's spelling, such as "<f4".
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One image or sound.

    Attributes:
        kind: "image" or "audio".
        digest: of its content and the processor's settings; equal ones are encoded once.
        places: its placeholder tokens, as indices into the prompt, ascending.
        arrays: arguments of the model's `get_image_features` or `get_audio_features`.
    """

    kind: str
    digest: bytes
    places: Sequence[int]
    arrays: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class MultimodalInputs:
    """All images and sounds of a prompt.

    Attributes:
        items: in the order of their placeholders.
        arrays: what the processor says of the prompt as a whole: sizes of images, types of tokens.
    """

    items: Sequence[EncoderInput]
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def digest_between(self, start: int, end: int) -> bytes:
        """What tells the content of the tokens `[start, end)` from that of equal tokens: the digests of the items whose
        placeholders are among them."""
        return b"".join(item.digest for item in self.items if item.places[0] < end and item.places[-1] >= start)

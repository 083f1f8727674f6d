"""`open_image`, `open_sound`, `open_video`: open what a prompt has besides text.

Pillow, soundfile and soxr are imported with the first item that needs them.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from inflight.contracts.api.errors import InvalidRequestError
from inflight.text.tokenizer import one_line

if TYPE_CHECKING:
    from numpy import float32, uint8
    from numpy.typing import NDArray
    from PIL.Image import Image

ImageSource: TypeAlias = Any
"""A Pillow image, a path, a file's bytes, a data URL (`data:image/png;base64,…`), or an array `[height, width, 3]`
uint8."""
SoundSource: TypeAlias = Any
"""A path, a file's bytes, a data URL (`data:audio/wav;base64,…`), an array `[num_samples]` of floats at the processor's
sampling rate, or a tuple of one and its own sampling rate."""

VideoSource: TypeAlias = Any
"""The frames, as a list of images or an array `[num_frames, height, width, 3]` uint8; a data URL of them, separated by
commas (`data:video/jpeg;base64,…,…`); or the source of an animated image, such as a GIF."""

MAX_SAMPLES = 2**26
"""Of a sound, in all its channels, and once it is resampled: 70 minutes at 16 kHz."""
MAX_PIXELS = 2**26
"""Of all frames of a video."""
NEEDS_PILLOW = "images need Pillow (pip install pillow)"
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,")
_URL = re.compile(r"(https?|file)://", re.IGNORECASE)
_ERRORS = (binascii.Error, OSError, ValueError, TypeError, SyntaxError, AttributeError, EOFError, RuntimeError)


def _opened(source: Any) -> AbstractContextManager[BinaryIO | None]:
    """The file of a source; None: it is no file."""
    if isinstance(source, bytes | bytearray):
        return io.BytesIO(source)
    if isinstance(source, str) and (head := _DATA_URL.match(source)):
        return io.BytesIO(base64.b64decode(source[head.end() :], validate=True))
    if isinstance(source, str) and _URL.match(source):
        raise ValueError("URLs are not fetched here; download it, and give its path")
    if isinstance(source, str | os.PathLike):
        return open(os.path.expanduser(source), "rb")
    return nullcontext()


@contextmanager
def _reading(what: str, source: Any, library: str, unknown: type[Exception]) -> Iterator[None]:
    """Raise what is wrong with a source as `InvalidRequestError`, in one sentence.

    Args:
        unknown: the library's error for a file in no format that it knows.
    """
    try:
        yield
    except InvalidRequestError:
        raise
    except unknown as error:
        is_path = isinstance(source, os.PathLike) or (isinstance(source, str) and not _DATA_URL.match(source))
        named = repr(os.fspath(source)) if is_path else "it"
        raise InvalidRequestError(f"{what} cannot be read: {named} has no format that {library} knows") from error
    except _ERRORS as error:
        raise InvalidRequestError(f"{what} cannot be read: {one_line(error)}") from error


def open_image(source: ImageSource) -> Image:
    """An image in RGB, turned as its file says. Raises `InvalidRequestError`, in one sentence."""
    (image,) = _open_frames("an image", source)
    return image


def open_video(source: VideoSource) -> NDArray[uint8]:
    """The frames of a video in RGB, `[num_frames, height, width, 3]`. Raises `InvalidRequestError`, in one sentence."""
    if isinstance(source, str) and (head := _DATA_URL.match(source)) and "," in source[head.end() :]:
        source = [head[0] + frame for frame in source[head.end() :].split(",")]
    is_sequence = isinstance(source, list | tuple) or getattr(source, "ndim", 0) == 4
    parts = (_open_frames("a video", each, whole=not is_sequence) for each in (source if is_sequence else [source]))
    frames, num_pixels = [], 0
    for frame in chain.from_iterable(parts):
        frames.append(frame)
        num_pixels += frame.width * frame.height
        if num_pixels > MAX_PIXELS:
            raise InvalidRequestError(f"the frames of a video have more than {MAX_PIXELS} pixels; that is too large")
    if len({frame.size for frame in frames}) != 1:
        raise InvalidRequestError(f"a video has {'frames of several sizes' if frames else 'no frames'}")

    import numpy as np

    return np.stack([np.asarray(frame) for frame in frames])


def _open_frames(what: str, source: ImageSource, *, whole: bool = False) -> Iterator[Image]:
    """The image of a source, or all images of an animated one, as they are in turn."""
    try:
        import PIL.Image
        import PIL.ImageOps
        import PIL.ImageSequence
    except ImportError as error:
        raise InvalidRequestError(NEEDS_PILLOW) from error
    with _reading(what, source, "Pillow", PIL.UnidentifiedImageError), _opened(source) as file:
        try:
            if isinstance(source, PIL.Image.Image):
                image = source
            else:
                image = PIL.Image.fromarray(source) if file is None else PIL.Image.open(file)
            if image.width * image.height > (PIL.Image.MAX_IMAGE_PIXELS or 0):
                raise InvalidRequestError(f"{what} has {image.width} x {image.height} pixels; that is too large")
            for frame in PIL.ImageSequence.Iterator(image) if whole else [image]:
                yield PIL.ImageOps.exif_transpose(frame).convert("RGB")
        except PIL.Image.DecompressionBombError as error:
            raise InvalidRequestError(f"{what} is too large: {one_line(error)}") from error


def open_sound(source: SoundSource, sampling_rate: int) -> NDArray[float32]:
    """The samples of a sound at this rate, its channels mixed, `[num_samples]`. Raises `InvalidRequestError`, in one
    sentence."""
    try:
        import numpy as np
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # without libsndfile, too
        raise InvalidRequestError("sounds need soundfile and soxr (pip install soundfile soxr)") from error
    with _reading("a sound", source, "libsndfile", soundfile.LibsndfileError), _opened(source) as file:
        if file is None:
            given, rate = source if isinstance(source, tuple) else (source, sampling_rate)
            samples = np.asarray(given)
            if samples.ndim != 1 or samples.dtype.kind != "f":
                shown = f"{list(samples.shape)} of {samples.dtype}"
                raise InvalidRequestError(f"a sound is an array {shown}; it must be [num_samples] of floats")
            _check_length(len(samples), 1, rate, sampling_rate)
        else:
            with soundfile.SoundFile(file) as sound:
                rate = sound.samplerate
                _check_length(sound.frames, sound.channels, rate, sampling_rate)
                samples = sound.read(dtype="float32", always_2d=True).mean(axis=1)
        samples = samples if rate == sampling_rate else soxr.resample(samples, rate, sampling_rate)
    if not len(samples) or not np.isfinite(samples).all():
        raise InvalidRequestError(f"a sound has {'samples that are not finite' if len(samples) else 'no samples'}")
    return np.ascontiguousarray(samples, dtype=np.float32)


def _check_length(num_frames: int, num_channels: int, rate: int, sampling_rate: int) -> None:
    """Raise `InvalidRequestError` for a sound that would take too much memory."""
    if num_frames * max(num_channels * rate, sampling_rate) > MAX_SAMPLES * rate:
        raise InvalidRequestError(
            f"a sound has {num_frames} samples at {rate} Hz in {num_channels} channels; that is too long"
        )

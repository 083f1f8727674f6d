"""`Processor`: reads a prompt with images, by the checkpoint's own `AutoProcessor`.

That decides about sizes, tiles and placeholder tokens. Torch and Pillow are imported with the first image.
"""

from __future__ import annotations

import base64
import binascii
import copy
import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.step.multimodal import Array, EncoderInput, MultimodalInputs, placeholder_id
from inflight.text.tokenizer import one_line

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

ImageSource: TypeAlias = Any
"""A Pillow image, a path, a file's bytes, a data URL (`data:image/png;base64,…`), or an array `[height, width, 3]`
uint8."""

SAMPLE_SIDE = 64
MAX_BYTES = 2**26
"""Results of an image processor that are kept."""
IMAGE = "<image>"
BEFORE, AFTER = "Quixotic", "Zephyrus"
"""Words that no chat template contains."""
NEEDS = "images need Pillow (pip install 'inflight-llm[images]'), and many models' processors torchvision"
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,")
_OF_THE_PROMPT = ("input_ids", "attention_mask")
_OF_THE_ENCODER = ("pixel_", "image_patches", "input_features")
"""Beginnings of the names of what only an encoder reads."""


class Processor:
    """The processor of one checkpoint; thread-safe.

    Args:
        inner: a loaded one.
        token_id: the model's placeholder token; None: the one that the processor names.

    Attributes:
        most_images: the most images of a prompt; None: no limit.
    """

    most_images: int | None = None

    def __init__(self, inner: ProcessorMixin, token_id: int | None = None) -> None:
        self.inner = copy.copy(inner)
        self.inner.image_processor = _Remembering(inner.image_processor)
        self._given_token_id = token_id
        self._lock = threading.Lock()

    @classmethod
    def load(cls, source: str, *, trust_remote_code: bool = False, revision: str | None = None) -> Processor:
        """Read a checkpoint's processor. Raises `InvalidRequestError` if there is none that reads images."""
        from transformers import AutoConfig, AutoProcessor

        try:
            import PIL  # noqa: F401

            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision)
            inner = AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision)
        except ImportError as error:
            raise InvalidRequestError(f"{NEEDS} ({one_line(error)})") from error
        except Exception as error:  # a damaged file can raise anything
            raise InvalidRequestError(f"the processor of {source!r} cannot be read: {one_line(error)}") from error
        if getattr(inner, "image_processor", None) is None:
            raise InvalidRequestError(f"the model {source!r} reads no images")
        return cls(inner, placeholder_id(config, "image"))

    def read(
        self, text: str, images: Sequence[ImageSource], *, add_special_tokens: bool = True
    ) -> tuple[list[int], MultimodalInputs]:
        """The token ids of a text, with placeholders for its images, and what the model needs of these.

        Raises:
            InvalidRequestError: there are too many images, one cannot be read, or the text has not as many places.
        """
        if self.most_images is not None and len(images) > self.most_images:
            raise InvalidRequestError(
                f"the prompt has {len(images)} images; at most {self.most_images} are accepted (limit_mm_per_prompt)"
            )
        opened = [open_image(each) for each in images]
        with self._lock:
            whole = self._process(text, opened, add_special_tokens)
            token_ids: list[int] = whole["input_ids"][0].tolist()
            singles = [self._single(each) for each in opened]
        places = [place for place, token_id in enumerate(token_ids) if token_id == self.token_id]
        numbers = [number for number, _ in singles]
        if len(places) != sum(numbers):
            raise InvalidRequestError(
                f"the prompt has {len(places)} placeholder tokens, but its {len(images)} images have {sum(numbers)}"
            )
        items, first = [], 0
        for image, (number, arrays) in zip(opened, singles, strict=True):
            own = places[first : first + number]
            items.append(EncoderInput("image", self._digest(image), own, arrays))
            first += number
        return token_ids, MultimodalInputs(items, _arrays(whole, without=(*_OF_THE_PROMPT, *_OF_THE_ENCODER)))

    def _single(self, image: Image) -> tuple[int, Mapping[str, Array]]:
        """The number of an image's placeholder tokens, and what its encoder reads."""
        alone = self._process(self.placeholder, [image], add_special_tokens=False)
        number = int((alone["input_ids"] == self.token_id).sum())
        return number, _arrays(alone, without=_OF_THE_PROMPT)

    def _process(self, text: str, images: list[Image], add_special_tokens: bool) -> Mapping[str, Any]:
        try:
            processed: Mapping[str, Any] = self.inner(
                text=text,
                images=images,
                add_special_tokens=add_special_tokens,
                return_tensors="pt",
                return_mm_token_type_ids=True,
            )
        except Exception as error:  # it is a program, and can raise anything
            raise InvalidRequestError(f"the processor cannot read the images: {one_line(error)}") from error
        return processed

    @cached_property
    def token_id(self) -> int:
        """The placeholder token. Gemma 3's processor names another one, which begins an image."""
        if self._given_token_id is not None:
            return self._given_token_id
        named = (getattr(each, "image_token_id", None) for each in (self.inner, self.inner.tokenizer))
        token_ids = self._sample(self.placeholder)
        token_id = max((each for each in named if each is not None), key=token_ids.count, default=None)
        if token_id is None:
            raise InvalidRequestError("neither the model's configuration nor its processor names a token for images")
        return int(token_id)

    @cached_property
    def placeholder(self) -> str:
        """The text that stands for an image in a prompt: what the chat template writes between two texts, or else the
        first of the processor's tokens that it takes for an image."""
        if self.inner.chat_template:
            parts = [{"type": "text", "text": BEFORE}, {"type": "image"}, {"type": "text", "text": AFTER}]
            text = str(self.inner.apply_chat_template([{"role": "user", "content": parts}], tokenize=False))
            if written := text.partition(BEFORE)[2].partition(AFTER)[0].strip("\n"):
                return written
        tokens = [getattr(self.inner, name, None) for name in ("image_token", "boi_token")]
        return next((each for each in tokens if each and self._sample(each)), IMAGE)

    def _sample(self, placeholder: str) -> list[int]:
        """The token ids of one small image; empty: the processor does not take this text for one."""
        import PIL.Image

        sample = PIL.Image.new("RGB", (SAMPLE_SIDE, SAMPLE_SIDE))
        try:
            processed = self._process(placeholder, [sample], add_special_tokens=False)
        except InvalidRequestError:
            return []
        token_ids: list[int] = processed["input_ids"][0].tolist()
        return token_ids if self._given_token_id in (None, *token_ids) else []

    @cached_property
    def _settings(self) -> bytes:
        return str(self.inner.image_processor.to_json_string()).encode()

    def _digest(self, image: Image) -> bytes:
        digest = blake2b(self._settings, digest_size=32)
        _add(digest, image)
        return digest.digest()


class _Remembering:
    """An image processor that keeps its last results: each image of a prompt is read with the others and alone, and
    again with the next question about it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._kept: OrderedDict[bytes, tuple[int, Any]] = OrderedDict()  # bytes and results, the latest last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        digest = blake2b(repr((args, sorted(kwargs.items()))).encode(), digest_size=32)
        try:
            _add(digest, images)
        except AttributeError:  # a processor has made something else of them
            return self._inner(images, *args, **kwargs)
        key = digest.digest()
        if key not in self._kept:
            result = self._inner(images, *args, **kwargs)
            self._kept[key] = sum(getattr(each, "nbytes", 0) for each in result.values()), result
            while len(self._kept) > 1 and sum(size for size, _ in self._kept.values()) > MAX_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        result = copy.copy(self._kept[key][1])
        result.data = dict(result.data)  # processors take entries out
        return result


def _add(digest: blake2b, images: Any) -> None:
    """Add Pillow images, in lists of any depth, to a digest."""
    if isinstance(images, list | tuple):
        digest.update(f"{len(images)} of".encode())
        for each in images:
            _add(digest, each)
    else:
        digest.update(f"{images.mode} {images.size}".encode())
        digest.update(images.tobytes())


def open_image(source: ImageSource) -> Image:
    """An image in RGB, turned as its file says. Raises `InvalidRequestError`, in one sentence."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise InvalidRequestError(NEEDS) from error
    try:
        if isinstance(source, PIL.Image.Image):
            image = source
        elif isinstance(source, bytes | bytearray):
            image = PIL.Image.open(io.BytesIO(source))
        elif isinstance(source, str) and (head := _DATA_URL.match(source)):
            image = PIL.Image.open(io.BytesIO(base64.b64decode(source[head.end() :], validate=True)))
        elif isinstance(source, str | os.PathLike):
            image = PIL.Image.open(os.path.expanduser(source))
        else:
            image = PIL.Image.fromarray(source)
        if image.width * image.height > (PIL.Image.MAX_IMAGE_PIXELS or 0):
            raise InvalidRequestError(f"an image has {image.width} x {image.height} pixels; that is too large")
        turned = PIL.ImageOps.exif_transpose(image)
        return turned.convert("RGB")
    except InvalidRequestError:
        raise
    except PIL.UnidentifiedImageError as error:
        is_path = isinstance(source, os.PathLike) or (isinstance(source, str) and not _DATA_URL.match(source))
        what = repr(os.fspath(source)) if is_path else "it"
        raise InvalidRequestError(f"an image cannot be read: {what} has no format that Pillow knows") from error
    except (binascii.Error, OSError, ValueError, TypeError, SyntaxError, AttributeError, EOFError) as error:
        raise InvalidRequestError(f"an image cannot be read: {one_line(error)}") from error
    except PIL.Image.DecompressionBombError as error:
        raise InvalidRequestError(f"an image is too large: {one_line(error)}") from error


def _arrays(processed: Mapping[str, Any], without: Sequence[str]) -> dict[str, Array]:
    """The tensors of a processor's output whose names begin with none of these."""
    tensors = {name: each for name, each in processed.items() if hasattr(each, "numpy")}
    tensors = {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}
    arrays = {name: each.numpy() for name, each in tensors.items() if not name.startswith(tuple(without))}
    return {name: Array(each.dtype.str, each.shape, each.tobytes()) for name, each in arrays.items()}

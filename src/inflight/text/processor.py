"""`Processor`: reads a prompt with images, sounds and videos, by the checkpoint's own `AutoProcessor`.

That decides about sizes, tiles, chunks and placeholder tokens. Torch is imported with the first item.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.step.multimodal import KINDS, Array, EncoderInput, MultimodalInputs, placeholder_id
from inflight.text.media import ImageSource, SoundSource, VideoSource, open_image, open_sound, open_video
from inflight.text.tokenizer import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

Opened: TypeAlias = Mapping[str, Sequence[Any]]
"""Items as processors take them, by kind."""

SAMPLE_SIDE = 64
MAX_BYTES = 2**26
"""Results of one image processor, or feature extractor, that are kept."""
BEFORE, AFTER = "Quixotic", "Zephyrus"
"""Words that no chat template contains."""
_OF_THE_PROMPT = ("input_ids", "attention_mask")
_OF_THE_ENCODER = ("pixel_", "image_patches", "input_features", "input_values", "padding_mask", "audio_input_ids")
"""Beginnings of the names of what only an encoder reads."""
_ARGUMENTS = {"image": "images", "audio": "audio", "video": "videos"}
"""Of a processor's call, by kind of item."""
_PARTS = {
    "image": ("image_processor",),
    "audio": ("audio_processor", "feature_extractor"),
    "video": ("video_processor",),
}
"""A processor's attributes, of which one reads the items of a kind."""


class Processor:
    """The processor of one checkpoint; thread-safe.

    Args:
        inner: a loaded one.
        config: the model's, which names the placeholder tokens; None: those that the processor names.

    Attributes:
        limits: the most items of a prompt, by kind; without an entry: no limit.
        prompts_decoder: whether a prompt is the decoder's, of an encoder-decoder whose encoder reads an image or a
            sound alone: no placeholder stands for it.
    """

    def __init__(self, inner: ProcessorMixin, config: PreTrainedConfig | None = None) -> None:
        self.inner, self._config = reading_texts(inner), config
        self.limits: Mapping[str, int] = {}
        self._readers: dict[str, Reader] = {}
        self._lock = threading.Lock()
        tokenizer = getattr(inner, "tokenizer", None)  # without a processor, `AutoProcessor` returns the tokenizer
        first = (getattr(config, "decoder_start_token_id", None), getattr(tokenizer, "bos_token_id", None))
        of_config = [token_id for token_id in first if token_id is not None][:1]
        self._begins: list[int] = list(getattr(tokenizer, "prefix_tokens", of_config))
        named = any(placeholder_id(config, kind) is not None for kind in _PARTS)
        self.prompts_decoder = getattr(config, "is_encoder_decoder", False) and not named
        for kind, names in _PARTS.items():
            for name in names:
                if (part := getattr(inner, name, None)) is not None:
                    setattr(self.inner, name, remembering := _Remembering(part))
                    self._readers[kind] = reader = Reader(kind, self.inner, remembering, placeholder_id(config, kind))
                    reader.has_placeholder = not self.prompts_decoder

    @classmethod
    def load(
        cls,
        source: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> Processor:
        """Read a checkpoint's processor.

        Args:
            tokenizer: to take in place of one in Mistral's own format.

        Raises:
            InvalidRequestError: there is none that reads images or sounds.
        """
        from transformers import AutoConfig, AutoProcessor

        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision)
            inner = AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision)
            if has_mistrals_format(getattr(inner, "tokenizer", None)):
                inner.tokenizer = tokenizer
        except ImportError as error:
            needed = "the model's processor needs packages that are missing, such as Pillow, torchvision or torchaudio"
            raise InvalidRequestError(f"{needed}: {one_line(error)}") from error
        except Exception as error:  # a damaged file can raise anything
            raise InvalidRequestError(f"the processor of {source!r} cannot be read: {one_line(error)}") from error
        processor = cls(inner, config)
        if not processor._readers:
            raise InvalidRequestError(f"the model {source!r} reads no images and no sounds")
        return processor

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it reads."""
        return tuple(self._readers)

    def of(self, kind: str) -> Reader:
        """What reads items of this kind. Raises `InvalidRequestError` if nothing does."""
        if kind not in self._readers:
            raise InvalidRequestError(f"the model's processor reads no {KINDS[kind]}")
        return self._readers[kind]

    def read(
        self,
        text: str | list[int],
        images: Sequence[ImageSource] = (),
        sounds: Sequence[SoundSource] = (),
        videos: Sequence[VideoSource] = (),
        *,
        add_special_tokens: bool = True,
    ) -> tuple[list[int], MultimodalInputs]:
        """The token ids of a text, with placeholders for its images, sounds and videos, and what the model needs of
        these.

        Args:
            text: token ids only where `prompts_decoder`.

        Raises:
            InvalidRequestError: there are too many, one cannot be read, or the text has not as many places.
        """
        given = {kind: each for kind, each in zip(KINDS, (images, sounds, videos), strict=True) if len(each)}
        self.check_numbers({kind: len(each) for kind, each in given.items()})
        opened = {kind: [self.of(kind).open(source) for source in each] for kind, each in given.items()}
        if self.prompts_decoder:
            return self._read_apart(text, opened)
        assert isinstance(text, str)
        with self._lock:
            whole = _process(self.inner, text, opened, add_special_tokens)
            token_ids: list[int] = whole["input_ids"][0].tolist()
            items = [item for kind, each in opened.items() for item in self.of(kind).items(each, token_ids)]
        items.sort(key=lambda item: item.places[0])
        arrays, encoder_arrays = _arrays(whole, without=(*_OF_THE_PROMPT, *_OF_THE_ENCODER)), {}
        if len(items) > 1:
            encoder_arrays = _arrays(whole, without=(*_OF_THE_PROMPT, *arrays))
        return token_ids, MultimodalInputs(items, arrays, encoder_arrays)

    @property
    def vocab_size(self) -> int | None:
        """Of the model; None: unknown."""
        return getattr(self._config, "vocab_size", None)

    def _read_apart(self, text: str | list[int], opened: Opened) -> tuple[list[int], MultimodalInputs]:
        """As `read`, for the decoder. An empty text is how the model begins."""
        (kind, items), *others = opened.items()
        if others or len(items) > 1:
            raise InvalidRequestError("the model reads one image or one sound with each prompt")
        tokenizer = self.inner.tokenizer
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
        with self._lock:
            item = self.of(kind).item(items[0])
        return token_ids or self._begins, MultimodalInputs([item])

    def check_numbers(self, numbers: Mapping[str, int]) -> None:
        """Raise `InvalidRequestError` if these are too many items, by kind, for one prompt."""
        for kind, number in numbers.items():
            if number > self.limits.get(kind, number):
                raise InvalidRequestError(
                    f"the prompt has {number} {KINDS[kind]}; at most {self.limits[kind]} are accepted "
                    "(limit_mm_per_prompt)"
                )


class Reader:
    """Reads the items of one kind.

    Args:
        inner: the processor.
        part: what of it reads them.
        token_id: the model's placeholder token; None: the one that the processor names.

    Attributes:
        has_placeholder: whether a text stands for an item in a prompt.
    """

    has_placeholder = True

    def __init__(self, kind: str, inner: ProcessorMixin, part: _Remembering, token_id: int | None) -> None:
        self.kind = kind
        self._inner, self._part, self._given_token_id = inner, part, token_id

    @property
    def sampling_rate(self) -> int:
        """Of the sounds that the processor takes, in Hz."""
        return int(self._part.sampling_rate)

    @property
    def most_samples(self) -> int | None:
        """The longest sound that the processor takes whole, in samples; None: any."""
        return self._part.most_samples

    def open(self, source: ImageSource | SoundSource | VideoSource) -> Any:
        """An item as the processor takes it. Raises `InvalidRequestError`."""
        if self.kind == "audio":
            return open_sound(source, self.sampling_rate)
        return open_image(source) if self.kind == "image" else open_video(source)

    def items(self, opened: Sequence[Any], token_ids: Sequence[int]) -> list[EncoderInput]:
        """The items of a prompt, each read alone.

        Raises:
            InvalidRequestError: one has no placeholder tokens, or the prompt has another number of them.
        """
        singles = [_process(self._inner, self.placeholder, {self.kind: [each]}, False) for each in opened]
        numbers = [int((each["input_ids"] == self.token_id).sum()) for each in singles]
        places = [place for place, token_id in enumerate(token_ids) if token_id == self.token_id]
        if 0 in numbers:
            raise InvalidRequestError(f"the processor writes no placeholder tokens for one of the {KINDS[self.kind]}")
        if len(places) != sum(numbers):
            has = f"{len(opened)} {KINDS[self.kind]} have {sum(numbers)}"
            raise InvalidRequestError(f"the prompt has {len(places)} placeholder tokens, but its {has}")
        items, first = [], 0
        for each, number, alone in zip(opened, numbers, singles, strict=True):
            own = places[first : first + number]
            items.append(EncoderInput(self.kind, self._digest(each), own, _arrays(alone, without=_OF_THE_PROMPT)))
            first += number
        return items

    def item(self, opened: Any) -> EncoderInput:
        """An item without placeholder tokens: it comes before the first token. Raises `InvalidRequestError`."""
        named = {"sampling_rate": self.sampling_rate} if self.kind == "audio" else {}
        with _processing(KINDS[self.kind]):
            alone = self._part(opened, return_tensors="pt", **named)
        return EncoderInput(self.kind, self._digest(opened), (0,), _arrays(alone, without=()))

    def _digest(self, opened: Any) -> bytes:
        digest = blake2b(self._settings, digest_size=32)
        _add(digest, opened)
        return digest.digest()

    @cached_property
    def token_id(self) -> int:
        """The placeholder token. Gemma 3's processor names another one, which begins an image."""
        if self._given_token_id is not None:
            return self._given_token_id
        named = (getattr(each, f"{self.kind}_token_id", None) for each in (self._inner, self._inner.tokenizer))
        token_ids = self._sample(self.placeholder)
        token_id = max((each for each in named if each is not None), key=token_ids.count, default=None)
        if token_id is None:
            raise InvalidRequestError(
                f"neither the model's configuration nor its processor names a token for {KINDS[self.kind]}"
            )
        return int(token_id)

    @cached_property
    def placeholder(self) -> str:
        """The text that stands for an item in a prompt: what the chat template writes between two texts, or else the
        first of the processor's tokens that it takes for an item; empty: none does."""
        if not self.has_placeholder:
            return ""
        if self._inner.chat_template:
            parts = [{"type": "text", "text": BEFORE}, {"type": self.kind}, {"type": "text", "text": AFTER}]
            text = str(self._inner.apply_chat_template([{"role": "user", "content": parts}], tokenize=False))
            if written := text.partition(BEFORE)[2].partition(AFTER)[0].strip("\n"):
                return written
        tokens = [getattr(self._inner, name, None) for name in (f"{self.kind}_token", f"bo{self.kind[0]}_token")]
        return next((each for each in tokens if each and self._sample(each)), f"<{self.kind}>")

    def _sample(self, placeholder: str) -> list[int]:
        """The token ids of a small black image, of two as a video, or of a second of silence; empty: the processor does
        not take this text for one."""
        import numpy as np

        small: Any = np.zeros((SAMPLE_SIDE, SAMPLE_SIDE, 3), np.uint8)
        if self.kind != "image":
            small = np.zeros(self.sampling_rate, np.float32) if self.kind == "audio" else [small] * 2
        try:
            processed = _process(self._inner, placeholder, {self.kind: [self.open(small)]}, False)
        except InvalidRequestError:
            return []
        token_ids: list[int] = processed["input_ids"][0].tolist()
        return token_ids if self._given_token_id in (None, *token_ids) else []

    @cached_property
    def _settings(self) -> bytes:
        return str(self._part.to_json_string()).encode()


def has_mistrals_format(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether a tokenizer was read from Mistral's own format (`tekken.json`), or is mistral-common's."""
    is_its = type(tokenizer).__name__ == "MistralCommonBackend"
    return is_its or str(getattr(tokenizer, "vocab_file", None)).endswith("tekken.json")


def reading_texts(inner: ProcessorMixin) -> ProcessorMixin:
    """A copy that reads items in texts."""
    if type(inner).__name__ != "VoxtralProcessor":
        return copy.copy(inner)
    from inflight.text.voxtral import VoxtralTexts

    return VoxtralTexts.of(inner)


def _process(inner: ProcessorMixin, text: str, opened: Opened, add_special_tokens: bool) -> Mapping[str, Any]:
    """What a processor makes of a text and its items, by kind. Raises `InvalidRequestError`."""
    frames = {"do_sample_frames": False, "return_metadata": True} if "video" in opened else {}
    with _processing(" and ".join(KINDS[kind] for kind in opened)):
        processed: Mapping[str, Any] = inner(
            text=text,
            add_special_tokens=add_special_tokens,
            return_tensors="pt",
            return_mm_token_type_ids=True,
            **frames,
            **{_ARGUMENTS[kind]: list(items) for kind, items in opened.items()},
        )
    return processed


@contextmanager
def _processing(what: str) -> Iterator[None]:
    """Raise a processor's errors as `InvalidRequestError`."""
    try:
        yield
    except InvalidRequestError:
        raise
    except Exception as error:  # it is a program, and can raise anything
        raise InvalidRequestError(f"the processor cannot read the {what}: {one_line(error)}") from error


class _Remembering:
    """A part of a processor that keeps its last results: each item of a prompt is read with the others and alone, and
    again with the next question about it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._kept: OrderedDict[bytes, tuple[int, Any]] = OrderedDict()  # bytes and results, the latest last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _check_length(self, items: Any, options: Mapping[str, Any]) -> None:
        """Raise `InvalidRequestError` for a sound of which Whisper's feature extractor would leave out the end."""
        limit = self.most_samples if options.get("truncation", True) else None
        longest = 0 if limit is None else max(map(len, items if isinstance(items, list | tuple) else [items]))
        if limit is not None and longest > limit:
            longest, most = (number // self._inner.sampling_rate for number in (longest, limit))
            raise InvalidRequestError(f"a sound has {longest} seconds; the model hears {most} at a time")

    @property
    def most_samples(self) -> int | None:
        """The longest sound that it takes whole, in samples; None: any."""
        is_whispers = type(self._inner).__name__ == "WhisperFeatureExtractor"  # others cut it in windows
        return int(self._inner.n_samples) if is_whispers else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = next((name for name in ("images", "audio", "raw_speech", "videos") if name in kwargs), "")
        items = args[0] if args else kwargs.get(named)
        others = args[1:], sorted((name, each) for name, each in kwargs.items() if args or name != named)
        digest = blake2b(repr(others).encode(), digest_size=32)
        try:
            _add(digest, items)
            self._check_length(items, kwargs)
        except AttributeError:  # a processor has made something else of them
            return self._inner(*args, **kwargs)
        key = digest.digest()
        if key not in self._kept:
            result = self._inner(*args, **kwargs)
            self._kept[key] = sum(getattr(each, "nbytes", 0) for each in result.values()), result
            while len(self._kept) > 1 and sum(size for size, _ in self._kept.values()) > MAX_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        result = copy.copy(self._kept[key][1])
        result.data = dict(result.data)  # processors take entries out
        return result


def _add(digest: blake2b, items: Any) -> None:
    """Add Pillow images, or arrays of samples, in lists of any depth, to a digest."""
    if isinstance(items, list | tuple):
        digest.update(f"{len(items)} of".encode())
        for each in items:
            _add(digest, each)
    else:
        about = (items.mode, items.size) if hasattr(items, "mode") else (items.dtype, items.shape)
        digest.update(" ".join(map(str, about)).encode())
        digest.update(items.tobytes())


def _arrays(processed: Mapping[str, Any], without: Sequence[str]) -> dict[str, Array]:
    """The tensors, and lists of integers, of a processor's output whose names begin with none of these."""
    import numpy as np

    arrays = {}
    for name, value in processed.items():
        if not name.startswith(tuple(without)):
            if not (is_list := not hasattr(value, "numpy")):
                value = (value.float() if value.is_floating_point() else value).numpy()
            with suppress(ValueError):  # lists of several lengths
                array = np.asarray(value)
                if not is_list or array.dtype.kind == "i":
                    arrays[name] = Array(array.dtype.str, array.shape, array.tobytes(), is_list)
    return arrays

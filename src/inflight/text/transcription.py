"""Asks a model to write down what is said, as its own processor asks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from inflight.contracts.api.errors import InvalidRequestError
from inflight.text.media import SoundSource
from inflight.text.processor import Processor
from inflight.text.tokenizer import one_line

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

BEGIN = "<|startoftranscript|>"
"""Whisper's first token, which a language's follows."""
ENGLISH_ONLY = 51_864
"""The size of the vocabulary of Whisper models with one language."""
FRAME = 320
"""Samples, of which a sound is cut in the quietest."""


def transcription_prompt(processor: Processor, prompt: str | None, language: str | None) -> str | list[int] | None:
    """The text, or token ids, with which a model is asked about one sound; None: its processor writes none.

    Args:
        prompt, language: None: the processor's own, and as the model hears.

    Raises:
        InvalidRequestError: the processor takes none, or not this one.
    """
    inner, begins = copy.copy(processor.inner), processor.prompts_decoder
    inner.tokenizer = copy.copy(inner.tokenizer)  # Whisper's remembers what was asked
    ask = getattr(inner, "apply_transcription_request", None)
    if ask is not None and "tokenize" in (known := inspect.signature(ask).parameters):
        named = "source_language" if "source_language" in known else "language"
        texts = _called(ask, {"prompt": prompt, named: language}, audio="", tokenize=False)
        return str(texts[0])
    if (ask := getattr(inner, "get_decoder_prompt_ids", None)) is not None:
        given = _called(ask, {"language": language}, **({"task": "transcribe"} if languages(processor) else {}))
        token_ids = [each if isinstance(each, int) else each[1] for each in given]  # Whisper's have places
        if not isinstance(given[0], int):
            token_ids.insert(0, inner.tokenizer.convert_tokens_to_ids(BEGIN))
        before = [] if prompt is None else _called(getattr(inner, "get_prompt_ids", None), {"text": prompt})
        return [*map(int, before), *token_ids]
    _called(None, {"prompt": prompt, "language": language} if begins else {"language": language})
    return "" if begins else None


def languages(processor: Processor) -> dict[str, int]:
    """The languages among which Whisper finds that of a sound, each with the token that follows `BEGIN`."""
    known = processor.inner.tokenizer.get_vocab()
    if not processor.prompts_decoder or BEGIN not in known or processor.vocab_size == ENGLISH_ONLY:
        return {}
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return {code: known[token] for code in LANGUAGES if (token := f"<|{code}|>") in known}


def windows(processor: Processor, sound: SoundSource) -> list[NDArray[float32]]:
    """A sound in parts that the model hears at once, each cut where the last fifth of its time is quietest. Raises
    `InvalidRequestError`."""
    samples = processor.of("audio").open(sound)
    most = processor.of("audio").most_samples if processor.prompts_decoder else None
    return [samples] if most is None else list(_cut(samples, most))


def _cut(samples: NDArray[float32], most: int) -> Iterator[NDArray[float32]]:
    while len(samples) > most:
        first = most - most // 5
        frames = samples[first : first + most // 5 // FRAME * FRAME].reshape(-1, FRAME)
        end = first + FRAME * int(np.square(frames).sum(axis=1).argmin()) + FRAME // 2
        yield samples[:end]
        samples = samples[end:]
    yield samples


def _called(ask: Any, given: dict[str, str | None], **options: Any) -> Any:
    """What a processor's method returns, with what is given. Raises `InvalidRequestError`."""
    known = () if ask is None else inspect.signature(ask).parameters
    wanted = {name: each for name, each in given.items() if each is not None}
    for name in wanted:
        if name not in known:
            what = "a language" if "language" in name else "a prompt"
            raise InvalidRequestError(f"{what} is given, but the model's processor takes none")
    try:
        return ask and ask(**wanted, **options)
    except Exception as error:  # it is a program, and can raise anything
        raise InvalidRequestError(f"the processor cannot ask for it: {one_line(error)}") from error

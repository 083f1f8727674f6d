"""Voxtral's processor, made to read sounds in texts. `transformers` has it only write mistral-common's chats."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import BatchFeature, VoxtralProcessor

from inflight.contracts.api.errors import InvalidRequestError

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

FRAMES_PER_TOKEN = 8
"""The encoder halves the frames, the projector takes four of the rest at a time."""


class VoxtralTexts(VoxtralProcessor):  # type: ignore[misc]
    """Expands each `[AUDIO]` of a text to one sound's tokens, as mistral-common encodes them."""

    @classmethod
    def of(cls, inner: VoxtralProcessor) -> VoxtralTexts:
        """A processor with the parts of this one."""
        made = copy.copy(inner)
        made.__class__ = cls
        return made  # type: ignore[no-any-return]

    def __call__(
        self, text: str, audio: Sequence[NDArray[float32]] = (), add_special_tokens: bool = True, **_: Any
    ) -> BatchFeature:
        """The ids of one text, with its sounds' features, `[num_windows, num_mel_bins, num_frames]`.

        Args:
            audio: each `[num_samples]`, at the feature extractor's rate.
        """
        options = {name: value for name, value in self.audio_kwargs.items() if name != "max_source_positions"}
        frames = self.audio_kwargs["max_source_positions"]
        features = [self._retrieve_input_features([each], frames, **options) for each in audio]
        first, *others = text.split(self.audio_token)
        if len(others) != len(features):
            raise InvalidRequestError(f"the prompt has {len(others)} places for {len(features)} sounds")
        for each, after in zip(features, others, strict=True):
            first += "[BEGIN_AUDIO]" + self.audio_token * (len(each) * frames // FRAMES_PER_TOKEN) + after
        data = dict(self.tokenizer([first], add_special_tokens=add_special_tokens))
        return BatchFeature(data | ({"input_features": torch.cat(features)} if features else {}), tensor_type="pt")

    def apply_transcription_request(self, audio: str, language: str | None = None, tokenize: bool = False) -> list[str]:
        """The text that asks for a transcription of one sound."""
        said = "" if language is None else f"lang:{language}"
        return [f"{self.tokenizer.bos_token}[INST]{self.audio_token}[/INST]{said}[TRANSCRIBE]"]

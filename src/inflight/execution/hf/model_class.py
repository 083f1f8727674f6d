"""Multimodal models: the class of `transformers` that a configuration's model is made as, and its encoders."""

from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)


def auto_class_of(config: PreTrainedConfig) -> type[Any]:
    """The Auto class of this configuration: the one for models that also read images, sound or video, or that for
    encoder-decoders, if the configuration names its class or there is no other; and else the one for causal language
    models."""
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    for auto_class in (AutoModelForMultimodalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq):
        found = auto_class._model_mapping.get(type(config), None)
        if found is not None and (found.__name__ in (config.architectures or ()) or not is_causal):
            return auto_class  # type: ignore[no-any-return]
    return AutoModelForCausalLM  # type: ignore[no-any-return]


def encoders(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The modules that encode images, video and sound, which a text does not pass."""
    found = (model.get_encoder(modality=each) for each in ("image", "audio"))
    return tuple(each for each in found if each not in (None, model, model.base_model))


def encoder_parameters(model: PreTrainedModel) -> set[int]:
    """The ids of the parameters of a model's encoders."""
    return {id(parameter) for encoder in encoders(model) for parameter in encoder.parameters()}


def prompts_decoder(model: PreTrainedModel) -> bool:
    """Whether a prompt is the decoder's, of an encoder-decoder whose encoder reads an image or a sound alone (Whisper,
    Donut)."""
    return bool(model.config.is_encoder_decoder) and model.main_input_name != "input_ids"

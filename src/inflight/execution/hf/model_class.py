"""Multimodal models: the class of `transformers` that a configuration's model is made as, and its encoders."""

from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)


def auto_class_of(config: PreTrainedConfig) -> type[Any]:
    """The Auto class of this configuration: the one for models that also read images, sound or video, if there is no
    other or the configuration names its class; else, of an encoder-decoder, the one for texts from texts, and else the
    one for causal language models."""
    multimodal = AutoModelForMultimodalLM._model_mapping.get(type(config), None)
    is_named = multimodal is not None and multimodal.__name__ in (config.architectures or ())
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    is_multimodal = is_named or (multimodal is not None and not is_causal)
    is_translating = config.is_encoder_decoder and type(config) in AutoModelForSeq2SeqLM._model_mapping
    other: type[Any] = AutoModelForSeq2SeqLM if is_translating else AutoModelForCausalLM
    return AutoModelForMultimodalLM if is_multimodal else other


def encoders(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The modules that encode images, video and sound, which a text does not pass."""
    found = (model.get_encoder(modality=each) for each in ("image", "audio"))
    return tuple(each for each in found if each not in (None, model, model.base_model))


def encoder_parameters(model: PreTrainedModel) -> set[int]:
    """The ids of the parameters of a model's encoders."""
    return {id(parameter) for encoder in encoders(model) for parameter in encoder.parameters()}

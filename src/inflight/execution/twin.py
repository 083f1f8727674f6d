"""A model's twin: small, in float32, of the same class and configuration but for sizes, and sensitive to its context.

What can not be proved on the model itself, because its precision hides it, is proved on the twin. Decides what is made
smaller: the number of layers, as long as there is one of each kind, and the vocabulary.
"""

import copy
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.errors import ModelError
from inflight.execution.proof import PlainModel

VOCAB_SIZE = 512
MIN_LAYERS = 2
MAX_PARAMETERS = 400_000_000
FACTORS = (1.0, 4.0, 8.0, 16.0)
"""What matrices are multiplied with until the context matters."""
ENOUGH = 1e-2


def make_twin(model: PreTrainedModel) -> tuple[PreTrainedModel, PlainModel]:
    """The twin, and what it gives. Raises `ModelError` if none can be made."""
    reasons = []
    for config in _smaller(model.config):
        try:
            return _sensitive(model, config)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    raise ModelError(f"no small float32 copy of {type(model).__name__} can be made to prove it on ({reasons[0]})")


def _sensitive(model: PreTrainedModel, config: PreTrainedConfig) -> tuple[PreTrainedModel, PlainModel]:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        size = sum(weight.numel() for weight in type(model)(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ModelError(f"it has {size} parameters")
    for factor in FACTORS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = type(model)._from_config(copy.deepcopy(config), dtype=torch.float32).eval().requires_grad_(False)
        table = twin.get_input_embeddings().weight
        for weight in twin.parameters():
            if weight.dim() == 2 and weight is not table:
                weight.mul_(factor)
        plain = PlainModel.of(twin)
        if plain.effect >= ENOUGH:
            return twin, plain
    raise ModelError("its context does not matter")


def _smaller(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configuration made smaller, the smallest first; at last as it is."""
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or []
    least = next((n for n in range(MIN_LAYERS, len(kinds) + 1) if set(kinds[:n]) == set(kinds)), MIN_LAYERS)
    for vocab_size, layers in ((VOCAB_SIZE, least), (None, least), (None, num_layers)):
        smaller = copy.deepcopy(config)
        for each in (smaller, smaller.get_text_config()):
            if vocab_size is not None and getattr(each, "vocab_size", 0) > vocab_size:
                each.vocab_size = vocab_size
                for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
                    setattr(each, name, None)
            if layers < num_layers and hasattr(each, "num_hidden_layers"):
                for name, value in list(vars(each).items()):
                    if isinstance(value, list) and len(value) == num_layers:
                        setattr(each, name, value[:layers])
                each.num_hidden_layers = layers
        yield smaller

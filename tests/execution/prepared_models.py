"""Models of all kinds, and the preparation of a model as in an engine."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.execution.attention import make_backend
from inflight.execution.hf.load import load_model
from inflight.execution.preparation.packed_proof import MakeBackend, prepare_packed, prove_packed
from inflight.execution.preparation.report import PreparationReport
from tests import zoo

every_architecture = pytest.mark.parametrize("name", zoo.ARCHITECTURES)


def own_copy(model: PreTrainedModel) -> PreTrainedModel:
    return load_model(model, EngineConfig())


def report_of(model: PreTrainedModel, backend: str = "torch") -> PreparationReport:
    return prepare_own(own_copy(model), lambda block_size: make_backend(backend, model.device, model.dtype, block_size))


def prepare_own(model: PreTrainedModel, backend: MakeBackend) -> PreparationReport:
    """Prove a way on the model itself, and prepare the model."""
    prove_packed(model, backend)
    return prepare_packed(model, backend)


def default_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model as transformers initialises it: its next token barely depends on what it attends to."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A config with two or three layers, for a class that is not in the zoo."""
    common = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    special = {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(model_type, **(common | special | changes))


def tiny_gqa(model_type: str, **changes: Any) -> PreTrainedConfig:
    return tiny(model_type, **({"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96} | changes))


def plain_logits(model: PreTrainedModel) -> Tensor:
    """The logits of an ordinary call of the model, with its current attention."""
    with torch.no_grad():
        return model(torch.tensor(zoo.sample_sequences()[:1]), use_cache=False).logits

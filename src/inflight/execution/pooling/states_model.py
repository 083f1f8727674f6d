"""Splits a model into its head and its body, as a model whose logits are its last hidden states, so that bodies are
proved, prepared and run like other models."""

from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.features import Features
from inflight.contracts.api.pooling import NORMALIZE, PooledText, PoolingPlan
from inflight.execution.executors.counting import TYPE_SHIFT
from inflight.execution.hf.load import ModelSource, load_model
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.plain_linear import PlainLinears
from inflight.execution.pooling.heads import (
    AnswerHead,
    ClassificationHead,
    EmbeddingHead,
    Head,
    check_modes,
    read_dense,
)

CHECKED_LENGTH = 9
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-4, 3e-2
"""Tolerance of a head's relative rounding error, in float32 and in other dtypes."""


class PoolingParts(NamedTuple):
    """A split model.

    Attributes:
        name: of its class.
        body: without the head; its `logits` are its last hidden states `[1, T, hidden]`.
        head: computes a text's numbers from them.
        plan: completed by the head.
    """

    name: str
    body: PreTrainedModel
    head: Head
    plan: PoolingPlan


def load_parts(source: ModelSource, config: EngineConfig, plan: PoolingPlan, **options: Any) -> PoolingParts:
    """Load a model that pools, and split it.

    Args:
        options: of `load_model`.

    Raises:
        ModelError: it cannot be loaded, its head deviates from the whole model, or `config` has options for generation
            only.
    """
    Features(pools=True).require_all(config.asked_features())
    check_modes(plan.modes)
    auto_class = AutoModelForSequenceClassification if plan.answers is None else None
    if plan.task == "embed":
        auto_class = AutoModel
    spare = ("pooler.",) if plan.task == "embed" else ()
    model = load_model(source, config, auto_class=auto_class, spare=spare, **options)
    if plan.task == "embed":
        model = model.base_model  # a caller's model, or a quantized one, has its own head
    name, body = type(model).__name__, model.base_model
    if plan.answers is not None:
        head: Head = AnswerHead(model.get_output_embeddings().weight, plan.answers)
    elif plan.task == "embed":
        folders = [layer for layer in plan.layers if layer != NORMALIZE]
        head = EmbeddingHead(plan, read_dense(str(source), folders, config.revision) if folders else {})
    else:
        head = _classification_head(model)
    if getattr(body, "pooler", None) is not None:
        body.pooler = None  # the head has it
    text_config = body.config.get_text_config()
    reads_last, num_values = _what_shows(head, text_config.hidden_size, model.dtype)
    padding = getattr(text_config, "pad_token_id", None)
    give_states(body)
    return PoolingParts(
        name, body, head, replace(plan, reads_last_token=reads_last, num_values=num_values, padding_id=padding)
    )


def give_states(body: PreTrainedModel) -> None:
    """Make a body's forward pass return its last hidden states as `logits`; and, if its class has token types, take
    them with positions (`TYPE_SHIFT`)."""
    has_types = getattr(body.config, "type_vocab_size", None) is not None  # GPT-2 takes some, and has none of its own
    own: Any = type(body)
    body.__class__ = _states_class(own, has_types and "token_type_ids" in forward_parameters(body))


def gives_states(model: PreTrainedModel) -> bool:
    """Whether a model's `logits` are its last hidden states."""
    return bool(getattr(model, "inflight_gives_states", False))


@lru_cache
def _states_class(own: Any, takes_types: bool) -> type[PreTrainedModel]:
    @wraps(own.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> CausalLMOutput:
        positions = kwargs.get("position_ids")
        if positions is not None and takes_types:
            kwargs["token_type_ids"] = positions >> TYPE_SHIFT
            kwargs["position_ids"] = positions & ((1 << TYPE_SHIFT) - 1)
        return CausalLMOutput(logits=own.forward(self, *args, **kwargs).last_hidden_state)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "forward": forward}
    return type(own.__name__, (own,), names | {"inflight_gives_states": True})


@torch.inference_mode()
def _what_shows(head: Head, width: int, dtype: torch.dtype) -> tuple[bool, int]:
    """Whether a head needs only a text's last token; and its number of outputs."""
    generator = torch.Generator().manual_seed(0)
    for length in (CHECKED_LENGTH, CHECKED_LENGTH + 5):
        states, text = torch.randn(length, width, generator=generator).to(dtype), PooledText([1] * length)
        whole, last = head(text, states), head(PooledText(text.token_ids[-1:]), states[-1:])
        if _error(last, whole) > _tolerance(dtype):
            return False, len(whole)
    return True, len(whole)


@torch.inference_mode()
def _classification_head(model: PreTrainedModel) -> Head:
    """Extract a model's own head. Raises `ModelError` unless it gives, for the body's states, the numbers of the whole
    model."""
    states: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)
    num_ids = model.get_input_embeddings().weight.shape[0]
    prompt = torch.randint(num_ids, (1, CHECKED_LENGTH), generator=generator).to(model.device)
    hook = model.base_model.register_forward_hook(lambda *call: states.append(call[2].last_hidden_state[0]))
    try:
        with PlainLinears():
            expected = model(input_ids=prompt, return_dict=True).logits[0].float()
    finally:
        hook.remove()
    head = ClassificationHead(model)
    error, tolerance = _error(head(PooledText(prompt[0].tolist()), states[0]), expected), _tolerance(model.dtype)
    if not error <= tolerance:
        raise ModelError(
            f"the head of {type(model).__name__} does not give the plain model's results: they differ by {error:.1e} "
            f"of their size ({tolerance:.0e} is allowed)"
        )
    return head


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE if dtype == torch.float32 else LOW_PRECISION_TOLERANCE


def _error(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative difference of a text's numbers `[n]` float32."""
    return float((given - expected).norm() / expected.norm().clamp_min(1e-6))

"""Makes a `transformers` model from weights that we read; class and weight mapping are `transformers`'."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.weight import watch_expansions
from inflight.execution.hf.model_class import auto_class_of


def model_of_state(
    config: PreTrainedConfig,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype,
    source: str,
    generation_config: GenerationConfig | None = None,
) -> PreTrainedModel:
    """The model, in `dtype`, with the weights `state`, `[…]` by checkpoint names. Raises `ModelError` for missing
    weights or wrong shapes, naming `source`.

    Its `inflight_notes` list expanded grouped weights.
    """
    model_class = auto_class_of(config)._model_mapping[type(config)]
    with watch_expansions() as expanded:
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            generation_config=generation_config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    refuse_incomplete(report, source)
    model.inflight_notes = tuple(
        f"{number} weights in {kind} are expanded to {dtype}, because `transformers` changes them while it loads"
        for kind, number in expanded.items()
    )
    return model


def refuse_incomplete(report: Mapping[str, Any], source: str) -> None:
    """Raise `ModelError` if a report of `from_pretrained` says that weights are missing or have wrong shapes."""
    for kind, problem in (("missing_keys", "lacks"), ("mismatched_keys", "has wrong shapes for")):
        if keys := sorted(map(str, report.get(kind) or ())):
            raise ModelError(f"{source} {problem} some of the model's weights ({len(keys)}): {keys[0]} …")

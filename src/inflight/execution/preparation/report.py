"""`PreparationReport`: findings of preparation.

Limits that a short proof cannot find: a configuration's behaviour on long sequences.

Windows, chunks and LongRoPE's length come from the configuration or from what the model tells attention, and are proved
by the exactness suite, not at load. If a mechanism begins at some length and cannot be reproduced (Llama 4's
temperature tuning by position in the row), sequences are limited to that length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.attention import AttentionSpec
from inflight.execution.executors.counting import FROM_ZERO, Counting
from inflight.execution.executors.packed import MIN_PACKED_ROWS
from inflight.execution.hf.longrope import longrope_length
from inflight.execution.mixing import MixerSpec
from inflight.execution.weights.linear_calls import LinearCalls

UNNAMED_LIMIT = 32_768
"""The longest sequence, in tokens, of a model without a limit that does its own attention."""


def packed_limit(model: PreTrainedModel, specs: Sequence[AttentionSpec]) -> tuple[int, list[str]]:
    """The longest sequence, in tokens, that is exact in a packed row, with notes if this is less than the model's
    limit. Raises `ModelError` if the model implements its sliding window by a mask only.

    Args:
        specs: of the model's attention calls.
    """
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", None) or 2**20)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True) and (not layer_types or "sliding_attention" in layer_types)
    notes = []
    if window is not None and slides and window < limit and all(spec.window is None for spec in specs):
        raise ModelError(f"{type(model).__name__} does not tell attention its sliding window of {window}")
    longest_row = max_row_len(config)
    if longest_row is not None and longest_row < limit:
        limit = longest_row
        notes.append(f"sequences are limited to {limit} tokens: beyond, the model scales attention by place in the row")
    short = longrope_length(config)
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)  # a model without a head has none
    starts_over = prepare is not GenerationMixin.prepare_inputs_for_generation
    if short is not None and short < limit and not starts_over:
        notes.append(
            f"a sequence that outgrows {short} tokens is recomputed, as in one forward pass (LongRoPE); "
            "model.generate keeps its short keys"
        )
    return limit, notes


def max_row_len(config: PreTrainedConfig) -> int | None:
    """The longest row, in tokens, that is exact; None: any. Llama 4 scales attention by a token's place in the row
    instead of its position, from place `floor_scale` on."""
    tunes = getattr(config, "attn_temperature_tuning", False) and config.model_type == "llama4_text"
    return int(config.floor_scale) - 1 if tunes else None


def own_limit(config: PreTrainedConfig) -> tuple[int, list[str]]:
    """The longest sequence, in tokens, of a model that does its own attention, and a note if that is an estimate, or
    less than the model's own limit. (Doge keeps the best `keep_window_size` keys. Which are best among equals, and
    among those that rounding makes so, depends on the whole row.)"""
    names = ("max_position_embeddings", "max_target_positions", "keep_window_size")
    limit, of_decoder, window = (getattr(config, name, None) for name in names)
    limit = of_decoder if limit is None else limit
    if isinstance(window, int) and isinstance(limit, int) and 0 < window < limit:
        return window, [f"sequences are limited to {window} tokens: beyond, the model chooses among its keys by rank"]
    if isinstance(limit, int) and limit > 0:
        return limit, []
    return UNNAMED_LIMIT, [f"the model names no limit to its context; {UNNAMED_LIMIT} tokens are taken for one"]


def depends_on_row(config: PreTrainedConfig) -> str | None:
    """Why the model's results depend on a token's place in the row or on the longest sequence of a batch; None: not
    known to."""
    if longrope_length(config) is not None:
        return "its position embeddings depend on the longest sequence of a batch (LongRoPE)"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its chunks of attention are counted from the beginning of the row"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationReport:
    """Findings about a model.

    Attributes:
        specs: the attention calls of a forward pass, in order; empty where attention is left to the model.
        mixers: the operators of other sequence mixers, likewise.
        max_model_len: the longest sequence, in tokens, that the model runs exactly.
        logits_error: the largest relative error of the logits; where attention is ours, given the plain attention
            outputs.
        attention_error: the largest relative error of an attention module's output; None where attention is left to
            the model.
        vocab_size: the lesser of embedding rows and logit columns: token ids that can be fed and can come out.
        is_batch_invariant: whether logits had the same bits alone, in a batch, and in chunks.
        min_rows: the least rows of a step, for `PackedExecutor`.
        linear_calls: a forward pass's use of linear layers; None: not prepacked.
        max_row_len: the longest row, in tokens, that the model runs exactly; None: any.
        counting: computes position ids.
        notes: limits, with reasons.
    """

    specs: tuple[AttentionSpec, ...] = ()
    mixers: tuple[MixerSpec, ...] = ()
    max_model_len: int
    logits_error: float
    attention_error: float | None = None
    vocab_size: int
    is_batch_invariant: bool = False
    min_rows: int = MIN_PACKED_ROWS
    linear_calls: LinearCalls | None = None
    max_row_len: int | None = None
    counting: Counting = FROM_ZERO
    notes: tuple[str, ...]

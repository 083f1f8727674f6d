"""`PreparationReport`: findings of preparation."""

from dataclasses import dataclass

from inflight.execution.attention import AttentionSpec
from inflight.execution.executors.packed import FROM_ZERO, MIN_PACKED_ROWS, Counting
from inflight.execution.weights.experts import RouterRows
from inflight.execution.weights.linear_calls import LinearCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationReport:
    """Findings about a model.

    Attributes:
        specs: the attention calls of a forward pass, in order; empty where attention is left to the model.
        max_model_len: the longest sequence, in tokens, that the model runs exactly.
        logits_error: the largest relative error of the logits; where attention is ours, given the plain attention
            outputs.
        attention_error: the largest relative error of an attention module's output; None where attention is left to
            the model.
        vocab_size: the lesser of embedding rows and logit columns: token ids that can be fed and can come out.
        is_batch_invariant: whether logits had the same bits alone, in a batch, and in chunks.
        min_rows: the least rows of a step, for `PackedExecutor`.
        router_rows: the number of rows that routers run with; None: no routers, or not prepacked.
        linear_calls: a forward pass's use of linear layers; None: not prepacked.
        max_row_len: the longest row, in tokens, that the model runs exactly; None: any.
        counting: computes position ids.
        notes: limits, with reasons.
    """

    specs: tuple[AttentionSpec, ...] = ()
    max_model_len: int
    logits_error: float
    attention_error: float | None = None
    vocab_size: int
    is_batch_invariant: bool = False
    min_rows: int = MIN_PACKED_ROWS
    router_rows: RouterRows | None = None
    linear_calls: LinearCalls | None = None
    max_row_len: int | None = None
    counting: Counting = FROM_ZERO
    notes: tuple[str, ...]

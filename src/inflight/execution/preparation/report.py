"""`PreparationReport`: what preparation found out about a model."""

from dataclasses import dataclass

from inflight.execution.attention import AttentionSpec
from inflight.execution.executors.counting import FROM_ZERO, Counting
from inflight.execution.executors.packed import MIN_PACKED_ROWS
from inflight.execution.weights.experts import RouterRows
from inflight.execution.weights.linear_calls import LinearCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationReport:
    """What preparation found.

    Attributes:
        specs: the attention calls of a forward pass, in order; empty where attention is left to the model.
        max_model_len: the longest sequence, in tokens, that the model runs exactly.
        logits_error: the largest relative error of the logits; where attention is ours, given the plain attention
            outputs.
        attention_error: the largest relative error of an attention module's output; None where attention is left to
            the model.
        vocab_size: the lesser of embedding rows and logit columns: token ids that can be fed and can come out.
        is_batch_invariant: whether logits were the same bits alone, in a batch, and in chunks.
        min_rows: rows that a step has at least, as `PackedExecutor` takes it.
        router_rows: with how many rows routers run; None: there are none, or the model is not prepacked.
        linear_calls: what a forward pass did with linear layers; None: the model is not prepacked.
        max_row_len: the longest row, in tokens, that the model runs exactly; None: any.
        counting: how the model counts positions.
        notes: what was limited, and why.
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

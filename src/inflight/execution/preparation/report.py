"""`ProbeReport`: what the probe found out about a model."""

from dataclasses import dataclass

import torch

from inflight.execution.attention import AttentionSpec


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe found.

    Attributes:
        specs: the attention calls of a forward pass, in order.
        modules: the modules that make them, each once.
        max_model_len: the longest sequence that the model runs exactly.
        attention_error: the largest difference of an attention module's output to the plain module's, relative to it;
            None where attention is left to the model.
        logits_error: the same for the logits; where attention is ours, given the plain attention outputs.
        vocab_size: token ids that can be fed and can come out: the lesser of embedding rows and logit columns.
        is_batch_invariant: whether logits were the same bits alone, in company, and in chunks.
        max_row_len: the longest row that the model runs exactly; None: any.
        notes: what was limited, and why.
    """

    specs: tuple[AttentionSpec, ...]
    modules: tuple[torch.nn.Module, ...]
    max_model_len: int
    attention_error: float | None
    logits_error: float
    vocab_size: int
    is_batch_invariant: bool
    max_row_len: int | None
    notes: tuple[str, ...]

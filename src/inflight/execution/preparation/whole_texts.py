"""Experiments on a body whose texts may run whole; no architecture is special-cased."""

import numpy as np
import torch

from inflight.contracts.errors import ModelError
from inflight.execution.executors.packed import FROM_ZERO, Counting
from inflight.execution.preparation.agreement import precision_of, relative_error
from inflight.execution.preparation.attention_calls import num_embeddings
from inflight.execution.preparation.proof import PlainModel, plain_logits


def counting_of(plain: PlainModel) -> Counting:
    """Find how a model counts positions. Raises `ModelError` if a packed row cannot reproduce it."""
    model, prompt, tolerance = plain.model, plain.prompts[0], precision_of(plain.model).logits
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    after_padding = [Counting(padding)] if isinstance(padding, int) else []
    for counting in (FROM_ZERO, *after_padding):
        own = np.arange(len(prompt))
        if counting.padding is not None:
            own = counting.after_padding(np.array(prompt), np.array([len(prompt)]))
        (states,) = plain_logits(model, prompt, positions=torch.from_numpy(own))
        if relative_error(states, plain.logits[0]) <= tolerance:
            return counting
    raise ModelError(f"{type(model).__name__} counts positions in a way that a packed row cannot reproduce")


def is_causal(plain: PlainModel) -> bool:
    """Whether the last token of a text changes no states but its own."""
    prompt = plain.prompts[0]
    (changed,) = plain_logits(plain.model, (*prompt[:-1], (prompt[-1] + 1) % num_embeddings(plain.model)))
    return relative_error(changed[:-1], plain.logits[0][:-1]) <= precision_of(plain.model).isolation

"""`BodyProof`: what a body gives when `transformers` runs it, and comparisons of a row with that.

What is found out by trying, with no architecture known by name: whether later tokens change earlier states, so that a
query must see its whole text; and which positions the model counts for itself. Then two prompts run alone and in one
row, and three things must hold, as for models that generate: each attention module gives the plain one's output, the
hidden states agree, and a neighbour's tokens change nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from inflight.contracts.errors import ModelError
from inflight.contracts.pooling import PooledText
from inflight.execution.hf.hook import use_attention
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.pooling.row import Counting, Row
from inflight.execution.preparation.agreement import (
    NotFiniteError,
    Tolerance,
    precision_of,
    relative_error,
    worst,
)
from inflight.execution.preparation.attention_calls import (
    DRY_RUN_LENGTH,
    PlainAttention,
    find_attention_calls,
    num_embeddings,
)
from inflight.execution.preparation.proof import draw_prompts, with_padding
from inflight.execution.ragged_batch import IntArray, to_device
from inflight.execution.weights.linear_calls import watch_linears

PROOF_LENGTHS = (23, 12)


class BodyProof:
    """The proof of one body.

    Args:
        model: it is left calling our attention function.

    Attributes:
        specs: its attention calls.
        linear_calls: its linear layers.
        counting: how it counts positions.

    Raises:
        ModelError: its signature or its attention calls rule a row out, or its states are not finite.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if "position_ids" not in forward_parameters(model):
            raise ModelError(
                f"{type(model).__name__} takes no position_ids, which a packed row needs to keep texts apart"
            )
        self.model = model
        max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or DRY_RUN_LENGTH
        length = min(DRY_RUN_LENGTH, max_positions)
        use_attention(model, "inflight")
        with watch_linears(model) as self.linear_calls:
            specs, modules = find_attention_calls(model, length)
        lengths = [min(each, length // 2) for each in PROOF_LENGTHS]
        self.prompts = [with_padding(model, each) for each in draw_prompts(num_embeddings(model), lengths)]
        use_attention(model, "eager")
        self._attention = PlainAttention(modules)
        with self._attention.recording(len(self.prompts)):
            self.states = [self._plain(prompt) for prompt in self.prompts]
        if not all(torch.isfinite(each).all() for each in self.states):
            raise NotFiniteError(model)
        self.counting = self._counting()
        is_causal = self._is_causal()
        self.specs = tuple(replace(spec, is_causal=is_causal) for spec in specs)
        use_attention(model, "inflight")

    @torch.inference_mode()
    def _plain(self, prompt: Sequence[int], positions: IntArray | None = None) -> torch.Tensor:
        """The states `[L, H]` of a call as anybody would make it; or with these positions."""
        tokens = torch.tensor([list(prompt)], device=self.model.device)
        options = {} if positions is None else {"position_ids": to_device(positions, self.model.device)[None]}
        states: torch.Tensor = self.model(
            input_ids=tokens, use_cache=False, return_dict=True, **options
        ).last_hidden_state
        return states[0]

    def _counting(self) -> Counting:
        """The model's own way to count positions, found by trying. Raises `ModelError` if it is none that we know."""
        prompt, tolerance = self.prompts[0], precision_of(self.model).logits
        padding = getattr(self.model.config.get_text_config(), "pad_token_id", None)
        for counting in (Counting(), *([Counting(padding)] if isinstance(padding, int) else [])):
            positions = counting.positions(np.array(prompt), np.array([len(prompt)]), np.array([0]))
            if relative_error(self._plain(prompt, positions), self.states[0]) <= tolerance:
                return counting
        raise ModelError(f"{type(self.model).__name__} counts positions in a way that a packed row cannot give it")

    def _is_causal(self) -> bool:
        """Whether the last token changes no states but its own."""
        prompt = self.prompts[0]
        changed = self._plain((*prompt[:-1], (prompt[-1] + 1) % num_embeddings(self.model)))
        return relative_error(changed[:-1], self.states[0][:-1]) <= precision_of(self.model).isolation

    def require_agreement(self, row: Row, tolerance: Tolerance) -> tuple[float, float]:
        """The largest relative errors of an attention module's output and of a text's states. Raises `ModelError` if
        they are more than is tolerated."""
        texts = [PooledText(list(prompt)) for prompt in self.prompts]
        pieces = [(number, 0, len(prompt)) for number, prompt in enumerate(self.prompts)]
        with self._attention.in_row(pieces) as outputs:
            states = row.run(texts)
        attention = worst(self._attention.errors(outputs, pieces))
        error = worst(relative_error(own, plain) for own, plain in zip(states, self.states, strict=True))
        if not tolerance.allows(attention, error):
            raise ModelError(
                f"{type(self.model).__name__} does not give the plain model's results when it runs as a packed row: "
                f"its attention differs by {attention:.1e} of its size ({tolerance.attention:.0e} is allowed in this "
                f"dtype), its hidden states by {error:.1e} ({tolerance.logits:.0e} is allowed)"
            )
        return attention, error

    def check_neighbours(self, row: Row, tolerance: Tolerance) -> None:
        """Raise `ModelError` unless a text's states stay the same when the one before it in the row has other
        tokens."""
        changed, kept = (PooledText(list(prompt)) for prompt in self.prompts)
        other = PooledText(changed.token_ids[::-1])
        leak = relative_error(row.run([other, kept])[1], row.run([changed, kept])[1])
        if not leak <= tolerance.isolation:
            raise ModelError(
                f"{type(self.model).__name__} lets texts of a packed row see each other by other ways than attention: "
                f"a neighbour's tokens change the hidden states by {leak:.1e} of their size"
            )

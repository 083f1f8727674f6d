"""`Body`: a model below its head as a packed row, proved to give what it gives alone, and made fast.

A model that is large, or in low precision, which would hide errors, is proved on its *twin* first: a small float32 copy
of its class. Then the model itself is compared with its own plain results, its linear layers are prepacked, it is
compared once more, and its forward pass is recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from transformers import PreTrainedModel

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.contracts.pooling import PooledText
from inflight.execution.attention import AttentionSpec, make_backend
from inflight.execution.executors.packed import MIN_ROWS
from inflight.execution.pooling.body_proof import BodyProof
from inflight.execution.pooling.row import Row
from inflight.execution.pooling.step_prefixes import StepPrefixes
from inflight.execution.preparation.agreement import FULL_PRECISION, ROUNDED_ANEW, as_model_error, precision_of
from inflight.execution.preparation.attention_calls import num_embeddings
from inflight.execution.preparation.choice import ITSELF, LARGE, TWIN
from inflight.execution.preparation.limits import packed_limit
from inflight.execution.preparation.proof import NUM_PROOF_BLOCKS, PROOF_BLOCK_SIZE, draw_prompts
from inflight.execution.preparation.recording_proof import prove_recording
from inflight.execution.preparation.twin import make_body_twin
from inflight.execution.threads import num_threads, torch_threads
from inflight.execution.weights.linears import LetGo, prepack_linears
from inflight.execution.weights.onednn import OneDnnLinear
from inflight.execution.weights.prepacked_linear import can_prepack

INVARIANCE_LENGTHS = (24, 9, 1, 24)


@dataclass(frozen=True, slots=True)
class BodyReport:
    """What was found out about a body.

    Attributes:
        proved_on: what the proof was done on.
        attention_error, states_error: relative errors against the plain model.
        max_tokens: the longest text.
    """

    specs: tuple[AttentionSpec, ...]
    proved_on: str
    attention_backend: str
    attention_error: float
    states_error: float
    is_batch_invariant: bool
    is_recorded: bool
    max_tokens: int
    notes: tuple[str, ...]


class Body:
    """A model without a head that runs whole texts in one row.

    Args:
        model: ours alone, in evaluation mode, on its device. It has no head.
        let_go: called with each weight as soon as it is prepacked.

    Raises:
        ModelError: it does not run as a packed row.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig, let_go: LetGo | None = None) -> None:
        self.model = model
        tolerance = precision_of(model)
        is_proved_itself = tolerance is FULL_PRECISION and sum(each.numel() for each in model.parameters()) <= LARGE
        with as_model_error(f"{type(model).__name__} cannot run as a packed row: "):
            if not is_proved_itself:
                _prove(make_body_twin(model), config)
            proof = BodyProof(model)
            longest, notes = _limit(model, proof, config)
            num_blocks = max(config.max_num_batched_tokens, -(-longest // config.block_size))
            backend = make_backend(config.attention_backend, model.device, model.dtype, config.block_size)
            self._row = Row(model, proof.specs, proof.counting, backend, num_blocks)
            errors = proof.require_agreement(self._row, tolerance)
            proof.check_neighbours(self._row, tolerance)
        if can_prepack(model):
            try:
                prepack_linears(model, proof.linear_calls, let_go=let_go)
                afterwards = FULL_PRECISION if tolerance is FULL_PRECISION else ROUNDED_ANEW
                errors = proof.require_agreement(self._row, afterwards)
            except Exception as error:
                raise RuntimeError(f"the weights of {type(model).__name__} could not be prepacked") from error
        self._is_causal = all(spec.is_causal for spec in proof.specs)
        is_invariant = self._make_batch_invariant([min(each, longest) for each in INVARIANCE_LENGTHS])
        reason: str | None = "it is turned off"
        if config.record_forward and model.device.type == "cpu":
            longest_row = max(config.max_num_batched_tokens, longest)
            recorded = replace(config, max_num_batched_tokens=longest_row)
            reason = prove_recording(self._row.executor, recorded, num_blocks)
            notes += [] if reason is None else [f"every step runs in Python: {reason}"]
        self.report = BodyReport(
            specs=proof.specs,
            proved_on=ITSELF if is_proved_itself else TWIN,
            attention_backend=backend.name,
            attention_error=errors[0],
            states_error=errors[1],
            is_batch_invariant=is_invariant,
            is_recorded=reason is None,
            max_tokens=longest,
            notes=tuple(notes),
        )

    @property
    def needs_torch_threads(self) -> bool:
        """Whether torch's operators have work for several threads in a step."""
        return self._row.executor.needs_torch_threads

    def run(self, texts: Sequence[PooledText]) -> list[torch.Tensor]:
        """See `Row.run`."""
        return self._row.run(texts)

    def share_prefixes(self) -> bool:
        """Compute once from now on what several texts of a step begin with, where the body lets them; only the last
        token's states may be used. Returns whether it does."""
        self._row.shares_prefixes = self._is_causal and self._row.counts_from_zero
        return self._row.shares_prefixes

    def prefixes(self) -> StepPrefixes:
        """Where the texts of a step will lie."""
        return self._row.prefixes()

    def _make_batch_invariant(self, lengths: Sequence[int]) -> bool:
        """Find the fewest rows with which a text has the same bits alone and in company. Returns whether there are
        any."""
        executor = self._row.executor
        if not executor.backend.is_batch_invariant:
            return False
        texts = [PooledText(list(each)) for each in draw_prompts(num_embeddings(self.model), lengths)]
        has_rows_of_its_own = any(isinstance(module, OneDnnLinear) for module in self.model.modules())
        for executor.min_rows in (MIN_ROWS,) if has_rows_of_its_own else (1, MIN_ROWS):
            if self._is_batch_invariant(texts):
                return True
        return False

    def _is_batch_invariant(self, texts: Sequence[PooledText]) -> bool:
        threads = cycle((1, num_threads()))

        def states(company: Sequence[PooledText]) -> list[torch.Tensor]:
            with torch_threads(next(threads)):
                return self.run(company)

        alone = [states([text])[0] for text in texts]
        together, reversed_ = states(texts), states(texts[::-1])[::-1]
        return all(
            torch.equal(first, own) and torch.equal(first, other)
            for first, own, other in zip(alone, together, reversed_, strict=True)
        )


def _prove(model: PreTrainedModel, config: EngineConfig) -> None:
    """Raise `ModelError` unless a body gives its plain results in a row."""
    proof = BodyProof(model)
    backend = make_backend(config.attention_backend, model.device, model.dtype, PROOF_BLOCK_SIZE)
    row = Row(model, proof.specs, proof.counting, backend, NUM_PROOF_BLOCKS)
    proof.require_agreement(row, precision_of(model))
    proof.check_neighbours(row, precision_of(model))


def _limit(model: PreTrainedModel, proof: BodyProof, config: EngineConfig) -> tuple[int, list[str]]:
    """The longest text, in tokens, and notes on it. Raises `ModelError` if the configuration asks for longer ones."""
    longest, notes = packed_limit(model, proof.specs)
    longest -= proof.counting.first
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ModelError(f"max_model_len is {config.max_model_len}; this model accepts at most {longest}")
    return min(longest, config.max_model_len or longest), notes

"""`Body`: a model below its head as a packed row, proved to give what it gives alone, and made fast.

What is found out by trying, with no architecture known by name: whether later tokens change earlier states, so that a
query must see its whole text; and which positions the model counts for itself. Then two prompts run alone and in one
row, and three things must hold, as for models that generate: each attention module gives the plain one's output, the
hidden states agree, and a neighbour's tokens change nothing. Its linear layers are prepacked, it is compared once more,
and its forward pass is recorded.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import torch
from transformers import PreTrainedModel

from inflight.contracts.cache_layout import ALL_TOKENS
from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.contracts.plan import Span, StepPlan
from inflight.contracts.pooling import PooledText
from inflight.execution.attention import AttentionSpec, make_backend
from inflight.execution.attention.grouping import BlockPart, Grouping
from inflight.execution.executors import PackedExecutor
from inflight.execution.executors.packed import MIN_ROWS
from inflight.execution.hf.hook import use_attention
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.preparation.agreement import (
    FULL_PRECISION,
    ROUNDED_ANEW,
    NotFiniteError,
    Tolerance,
    as_model_error,
    precision_of,
    relative_error,
    worst,
)
from inflight.execution.preparation.attention_calls import (
    DRY_RUN_LENGTH,
    find_attention_calls,
    num_embeddings,
    watch_outputs,
)
from inflight.execution.preparation.limits import packed_limit
from inflight.execution.preparation.proof import draw_prompts, with_padding
from inflight.execution.preparation.recording_proof import prove_recording
from inflight.execution.ragged_batch import IntArray, RaggedBatch, ragged_arange, to_device
from inflight.execution.weights.linear_calls import watch_linears
from inflight.execution.weights.linears import LetGo, prepack_linears
from inflight.execution.weights.onednn import OneDnnLinear
from inflight.execution.weights.prepacked_linear import can_prepack

PROOF_LENGTHS = (23, 12)
TYPE_SHIFT = 20
"""A recorded forward pass takes token ids and positions. A token's type goes with its position, in the bits from here
on."""


@dataclass(frozen=True, slots=True)
class Counting:
    """The positions that a model gives its tokens.

    Attributes:
        padding: the padding token, from whose id on others are counted, and to which all padding tokens go (RoBERTa);
            None: positions are counted from 0.
    """

    padding: int | None = None

    @property
    def first(self) -> int:
        """The position of a text's first token."""
        return 0 if self.padding is None else self.padding + 1

    def positions(self, input_ids: IntArray, lengths: IntArray) -> IntArray:
        """The position of each token, `[T]`, from all texts' token ids end to end and their lengths `[S]`."""
        if self.padding is None:
            return ragged_arange(lengths)
        counts = input_ids != self.padding
        so_far = np.cumsum(counts)
        before = np.concatenate([[0], so_far])[np.cumsum(lengths) - lengths]
        positions: IntArray = (so_far - np.repeat(before, lengths)) * counts + self.padding
        return positions


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
        self.model, self._config = model, config
        self._block_size = config.block_size
        with as_model_error(f"{type(model).__name__} cannot run as a packed row: "):
            proof = _Proof(model)
            self._counting = proof.counting
            self._num_types = int(getattr(model.config, "type_vocab_size", None) or 1)
            longest, notes = packed_limit(model, proof.specs)
            longest -= self._counting.first
            if config.max_model_len is not None and config.max_model_len > longest:
                raise ModelError(f"max_model_len is {config.max_model_len}; this model accepts at most {longest}")
            longest = min(longest, config.max_model_len or longest)
            max_rows = max(config.max_num_batched_tokens, longest)
            self._num_blocks = max(config.max_num_batched_tokens, -(-longest // config.block_size))
            backend = make_backend(config.attention_backend, model.device, model.dtype, config.block_size)
            self._executor = PackedExecutor(model, backend, _one_storage(proof.specs), MIN_ROWS, _states_forward(model))
            self._executor.allocate(self._num_blocks)
            tolerance = precision_of(model)
            errors = proof.require_agreement(self, tolerance)
            proof.check_neighbours(self, tolerance)
        if can_prepack(model):
            try:
                prepack_linears(model, proof.linear_calls, let_go=let_go)
                errors = proof.require_agreement(self, FULL_PRECISION if tolerance is FULL_PRECISION else ROUNDED_ANEW)
            except Exception as error:
                raise RuntimeError(f"the weights of {type(model).__name__} could not be prepacked") from error
        is_invariant = self._make_batch_invariant()
        reason: str | None = "it is turned off"
        if config.record_forward and model.device.type == "cpu":
            reason = prove_recording(self._executor, replace(config, max_num_batched_tokens=max_rows), self._num_blocks)
            notes = [*notes, *([] if reason is None else [f"every step runs in Python: {reason}"])]
        self.report = BodyReport(
            proof.specs, "itself", backend.name, *errors, is_invariant, reason is None, longest, tuple(notes)
        )

    @property
    def needs_torch_threads(self) -> bool:
        """Whether torch's operators have work for several threads in a step."""
        return self._executor.needs_torch_threads

    def run(self, texts: Sequence[PooledText]) -> list[torch.Tensor]:
        """The last hidden states `[L, H]` of each of several texts, which run in one row."""
        states = self._executor.forward(self._batch(texts))
        return list(states.split([len(text.token_ids) for text in texts]))  # type: ignore[no-untyped-call]

    def _batch(self, texts: Sequence[PooledText]) -> RaggedBatch:
        """All texts whole. The cache lasts for one attention call, so every step has all blocks."""
        spans, tables, first = [], [], 0
        for number, text in enumerate(texts):
            length = len(text.token_ids)
            spans.append(Span(number, number, 0, text.token_ids, length, length))
            num_blocks = -(-length // self._block_size)
            tables.append(array("i", range(first, first + num_blocks)))
            first += num_blocks
        batch = RaggedBatch.from_plan(StepPlan(tuple(spans), (tuple(tables),)), self._block_size, self.model.device)
        positions = self._counting.positions(batch.logit_token_ids_host, batch.query_lens_host)
        if self._num_types > 1 and any(text.token_types is not None for text in texts):
            types = [text.token_types or [0] * len(text.token_ids) for text in texts]
            positions = positions + (np.concatenate(types).astype(np.int64) << TYPE_SHIFT)
        groups = batch.groups * len(self._executor.cache_groups)
        return replace(batch, positions=to_device(positions, self.model.device), groups=groups)

    def _make_batch_invariant(self) -> bool:
        """Find the fewest rows with which a text has the same bits alone and in company. Returns whether there are
        any."""
        if not self._executor.backend.is_batch_invariant:
            return False
        has_rows_of_its_own = any(isinstance(module, OneDnnLinear) for module in self.model.modules())
        for self._executor.min_rows in (MIN_ROWS,) if has_rows_of_its_own else (1, MIN_ROWS):
            if self._is_batch_invariant():
                return True
        return False

    def _is_batch_invariant(self) -> bool:
        texts = [PooledText(list(each)) for each in draw_prompts(num_embeddings(self.model), (24, 9, 1, 24))]
        in_use = torch.get_num_threads()
        threads = cycle((1, in_use))

        def states(*company: PooledText) -> list[torch.Tensor]:
            torch.set_num_threads(next(threads))
            return self.run(company)

        try:
            alone = [states(text)[0] for text in texts]
            for order in (texts, texts[::-1]):
                together = states(*order)
                if not all(
                    torch.equal(alone[texts.index(text)], own) for text, own in zip(order, together, strict=True)
                ):
                    return False
            return True
        finally:
            torch.set_num_threads(in_use)


def _one_storage(specs: Sequence[AttentionSpec]) -> Grouping:
    """All attention calls in the same memory, one after the other: a group for each, and all of them with the same
    blocks. Calls that read what an earlier one has kept, or differ in shape, have memory of their own."""
    shapes = {(spec.num_kv_heads, spec.head_size, spec.value_head_size) for spec in specs}
    if len(shapes) > 1 or any(spec.shares_cache_with is not None for spec in specs):
        return Grouping(tuple(specs))
    number = len(specs)
    own = tuple(replace(spec, cache_group=group) for group, spec in enumerate(specs))
    return Grouping(own, (ALL_TOKENS,) * number, tuple(BlockPart(group) for group in range(number)))


def _states_forward(model: PreTrainedModel) -> Callable[..., torch.Tensor]:
    """A body's forward pass over one row: token ids `[T]`, positions with types `[T]` and rows `[R]` to the hidden
    states `[R, H]` of these rows."""
    takes_types = "token_type_ids" in forward_parameters(model)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        options = {"token_type_ids": (positions >> TYPE_SHIFT)[None]} if takes_types else {}
        position_ids = (positions & ((1 << TYPE_SHIFT) - 1))[None]
        outputs = model(
            input_ids=input_ids[None], position_ids=position_ids, use_cache=False, return_dict=True, **options
        )
        states: torch.Tensor = outputs.last_hidden_state[0]
        return states[rows]

    return forward


class _Proof:
    """What a body gives when `transformers` runs it, and comparisons with that.

    Args:
        model: it is left calling our attention function.
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
            specs, self.modules = find_attention_calls(model, length)
        lengths = [min(each, length // 2) for each in PROOF_LENGTHS]
        self.prompts = [with_padding(model, each) for each in draw_prompts(num_embeddings(model), lengths)]
        use_attention(model, "eager")
        with watch_outputs(self.modules) as seen:
            self.states = [self._plain(prompt) for prompt in self.prompts]
        if not all(torch.isfinite(each).all() for each in self.states):
            raise NotFiniteError(model)
        num_calls = len(seen) // len(self.prompts)
        self._outputs = [torch.cat([row[0] for row in seen[number::num_calls]]) for number in range(num_calls)]
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
            positions = counting.positions(np.array(prompt), np.array([len(prompt)]))
            if relative_error(self._plain(prompt, positions), self.states[0]) <= tolerance:
                return counting
        raise ModelError(f"{type(self.model).__name__} counts positions in a way that a packed row cannot give it")

    def _is_causal(self) -> bool:
        """Whether the last token changes no states but its own."""
        prompt = self.prompts[0]
        changed = self._plain((*prompt[:-1], (prompt[-1] + 1) % num_embeddings(self.model)))
        return relative_error(changed[:-1], self.states[0][:-1]) <= precision_of(self.model).isolation

    def require_agreement(self, body: Body, tolerance: Tolerance) -> tuple[float, float]:
        """The largest relative errors of an attention module's output and of a text's states. Raises `ModelError` if
        they are more than is tolerated."""
        texts = [PooledText(list(prompt)) for prompt in self.prompts]
        with watch_outputs(self.modules, self._outputs) as seen:
            states = body.run(texts)
        attention = worst(relative_error(own[0], plain) for own, plain in zip(seen, self._outputs, strict=True))
        error = worst(relative_error(own, plain) for own, plain in zip(states, self.states, strict=True))
        if not (attention <= tolerance.attention and error <= tolerance.logits):
            raise ModelError(
                f"{type(self.model).__name__} does not give the plain model's results when it runs as a packed row: "
                f"its attention differs by {attention:.1e} of its size ({tolerance.attention:.0e} is allowed in this "
                f"dtype), its hidden states by {error:.1e} ({tolerance.logits:.0e} is allowed)"
            )
        return attention, error

    def check_neighbours(self, body: Body, tolerance: Tolerance) -> None:
        """Raise `ModelError` unless a text's states stay the same when the one before it in the row has other
        tokens."""
        changed, kept = (PooledText(list(prompt)) for prompt in self.prompts)
        other = PooledText(changed.token_ids[::-1])
        leak = relative_error(body.run([other, kept])[1], body.run([changed, kept])[1])
        if not leak <= tolerance.isolation:
            raise ModelError(
                f"{type(self.model).__name__} lets texts of a packed row see each other by other ways than attention: "
                f"a neighbour's tokens change the hidden states by {leak:.1e} of their size"
            )

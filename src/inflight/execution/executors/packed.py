"""`PackedExecutor`: runs the ragged row through an unchanged `transformers` model; only attention separates
sequences."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from inflight.contracts.api.features import INSPECTION, Features
from inflight.contracts.step.cache_layout import CacheGroup
from inflight.execution.attention import AttentionBackend, CpuAttention, ReferenceAttention
from inflight.execution.attention.compared import ComparedAttention
from inflight.execution.attention.cpu_backend import CpuCache
from inflight.execution.attention.grouping import BlockPart, Grouping, allocate_storages
from inflight.execution.attention.interface import AttentionSpec, KVStorage
from inflight.execution.executors.counting import FROM_ZERO, Counting, Positions
from inflight.execution.executors.interface import Capabilities, Executor
from inflight.execution.executors.kept_states import KeptStates, put_last_states
from inflight.execution.graph.encode import CompiledGraph, EncodedProgram
from inflight.execution.graph.graph import Graph
from inflight.execution.graph.trace import UntraceableError, trace_forward
from inflight.execution.hf.hook import attend_with, attention_sinks
from inflight.execution.hf.longrope import length_of_its_own, longrope_length
from inflight.execution.hf.mixer_hook import hook_mixers, run_mixers
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.hf.own_positions import at_positions, hook_positions
from inflight.execution.mixing import MixingBackend
from inflight.execution.multimodal import EncoderOutputs
from inflight.execution.ragged_batch import CacheGroupBatch, RaggedBatch
from inflight.execution.weights.linear_calls import is_watched

logger = logging.getLogger(__name__)

MIN_PACKED_ROWS = 4
"""On a CPU oneDNN computes a single row differently, with other bits; and fewer than four rows are not faster."""


class StepAdapters(Protocol):
    """Assigns adapters to the rows of a step."""

    def in_step(self, batch: RaggedBatch, num_rows: int, num_logit_rows: int) -> AbstractContextManager[None]:
        """A context in which layers apply each row's adapter.

        Args:
            num_rows, num_logit_rows: of the step, padding included.
        """
        ...


class PackedExecutor:
    """Runs a `RaggedBatch` as one batch row of T tokens. Every attention call keeps its keys and values in blocks;
    calls of different cache groups share memory, in different blocks. Sequence mixers keep states beside them.

    Args:
        model: ours alone, in evaluation mode, with "inflight" for its attention implementation.
        backend: for the model's device and dtype.
        grouping: the attention calls of one forward pass in order, as found by `find_calls`, and their layout in the
            cache (`group_calls`).
        min_rows: the least rows of a step on a CPU.
        counting: computes position ids.
        mixing: runs what mixes tokens besides attention; None: nothing does.
    """

    name = "packed"
    bytes_per_slot = 0

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        grouping: Grouping,
        min_rows: int = MIN_PACKED_ROWS,
        counting: Counting = FROM_ZERO,
        mixing: MixingBackend | None = None,
    ) -> None:
        self.model = model
        self.mixing = mixing
        if mixing is not None:
            hook_mixers(model)
        self.min_rows = min_rows
        self.backend = backend
        self.grouping = grouping
        self._longrope_length = longrope_length(model.config.get_text_config())
        self._forward = plain_forward(model)
        self.counting = counting
        self._positions = Positions(counting)
        self._compiled: CompiledGraph | None = None
        self._kept: KeptStates | None = None
        self.adapters: StepAdapters | None = None
        """Assigns adapters to the rows of each step."""
        self.encoder_outputs: EncoderOutputs | None = None
        """Those of running sequences; None: the model reads text only."""
        self._calls: list[tuple[AttentionSpec, KVStorage]] = []  # of a forward pass, in order
        self._storages: list[KVStorage] = []  # those with their own memory
        self._num_blocks = self._num_states = 0
        self._num_calls = self._num_tokens = 0  # in the running forward pass

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The attention calls of one forward pass, in order."""
        return self.grouping.specs

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """See `Executor`."""
        return self.grouping.groups

    @property
    def capabilities(self) -> Capabilities:
        """See `Executor`."""
        is_causal = all(spec.is_causal for spec in self.specs)
        return Capabilities(shares_prefixes=is_causal, chunks_prompts=is_causal)

    @property
    def bytes_per_state(self) -> int:
        """See `Executor`."""
        return 0 if self.mixing is None else self.mixing.bytes_per_state

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`."""
        return sum(self.backend.bytes_per_block(self.specs[calls[0]]) for calls in self.grouping.storages())

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See `Executor`."""
        self._num_blocks, self._num_states = num_blocks, num_states
        if self.mixing is not None:
            self.mixing.allocate(num_states)
        caches, self._storages = allocate_storages(self.backend, self.grouping, num_blocks)
        self._calls = list(zip(self.specs, caches, strict=True))

    def rows_of_block(self, block: int) -> list[memoryview]:
        """The memory of a block, in a few pieces: keys and values of every call, and kept hidden states. Numbers after
        those of blocks are of recurrent states. CPU only."""
        if block >= self._num_blocks and self.mixing is not None:
            states = self.mixing.memory_of(block - self._num_blocks)
            return [state.view(-1).view(torch.uint8).numpy().data for state in states]
        tensors = [each for storage in self._storages for each in self.backend.memory_of(storage)]
        if self._kept is not None:
            tensors.append(self._kept.memory)
        return [each[block].flatten().view(torch.uint8).numpy().data for each in tensors]

    def release(self, slots: Iterable[int]) -> None:
        """See `Executor`. A sequence that begins in a slot reads no state of the one before."""

    @property
    def needs_torch_threads(self) -> bool:
        """Whether torch's operators have work for several threads in a step."""
        return self._compiled is None or self._compiled.program.needs_torch_threads

    def keep_states(self, kept: KeptStates) -> None:
        """Start keeping every token's last hidden state. The model then runs eagerly."""
        self._kept = kept
        self.run_eagerly()

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Executor`."""
        logits, *states = self.outputs(batch)
        if self._kept is not None:
            self._kept.copy_blocks(batch.plan.copies)
            self._kept.write(batch, states[0])
        return logits

    @torch.inference_mode()
    def outputs(self, batch: RaggedBatch) -> list[torch.Tensor]:
        """The logits `[R, V]` of a step, and the last hidden states `[T, hidden]`, if they are kept; in the model's
        dtype."""
        if self.grouping.has_parts:
            groups = tuple(_in_part(batch, part, self.backend.block_size) for part in self.grouping.parts)
            batch = replace(batch, groups=groups)
        images = self.encoder_outputs
        self.backend.begin_step(batch if images is None else images.apart(batch))
        if self.mixing is not None:
            self.mixing.begin_step(batch)
        if copies := batch.plan.copies:
            for storage in self._storages:
                self.backend.copy_blocks(storage, copies)
        rows = batch.input_ids, self._positions.of(batch), batch.logit_rows
        if batch.input_ids.is_cpu:
            number = self.min_rows
            rows = _at_least(number, rows[0]), _at_least(number, rows[1]), _at_least(number, rows[2])
        if images is not None:
            rows = rows[0], images.positions(batch, rows[1]), rows[2]
        if self.adapters is None:
            return self._run(batch, *rows)
        with self.adapters.in_step(batch, len(rows[0]), len(rows[2])):
            return self._run(batch, *rows)

    def _run(
        self,
        batch: RaggedBatch,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
    ) -> list[torch.Tensor]:
        """A step's outputs, without padding rows; see `outputs`.

        Args:
            input_ids: `[n]` int64, padded; n is at least T.
            positions: `[n]` int64, or `[k, n]` for positions in k dimensions.
            logit_rows: `[n]` int64, padded; n is at least R.
        """
        rows = input_ids, positions, logit_rows
        if self._compiled is not None:
            return _without_padding(batch, self._compiled(input_ids, positions.view(-1), logit_rows))
        limit = self._longrope_length
        embeddings = nullcontext() if limit is None else length_of_its_own(self.model, batch, len(rows[0]), limit)
        with embeddings:
            return _without_padding(batch, self._run_eagerly(*rows, batch.num_tokens))

    def _run_eagerly(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        num_tokens: int,
    ) -> list[torch.Tensor]:
        """Run rows, of which `num_tokens` are tokens, through the model's own Python. Arguments as for `_run`; returns
        logits `[n, V]` and, if they are kept, states `[n, hidden]`, in the model's dtype, with padding rows. Raises
        `RuntimeError` if the model does not make the calls that it made at load."""
        self._num_calls, self._num_tokens = 0, num_tokens
        states: list[torch.Tensor] = []
        kept = nullcontext() if self._kept is None else put_last_states(self.model, states)
        mixed = nullcontext() if self.mixing is None else run_mixers(self.mixing)
        with attend_with(self._attend), kept, mixed:
            logits: torch.Tensor = self._forward(input_ids, positions, logit_rows)
        if self._num_calls != len(self._calls):
            raise RuntimeError(f"the model made {self._num_calls} attention calls, not {len(self._calls)} as at load")
        if len(logits) != len(logit_rows):
            raise RuntimeError(f"the model gave {len(logits)} rows of logits where {len(logit_rows)} were asked")
        return [logits, *states]

    @torch.inference_mode()
    def trace(self, max_tokens: int) -> Graph:
        """Trace the forward pass, for `run_program`. Raises `UntraceableError` if that is impossible.

        Args:
            max_tokens: the most tokens that a step may have.
        """
        if not isinstance(self.backend, CpuAttention):
            raise UntraceableError("it needs the attention backend 'cpu'")
        if self._longrope_length is not None:
            raise UntraceableError("its position embeddings depend on each sequence's length (LongRoPE)")
        if self.encoder_outputs is not None and not self.encoder_outputs.placing.handles:
            raise UntraceableError("only kernels can place encoder outputs in a graph, and there are none")
        if any(is_watched(module) for module in self.model.modules()):
            raise UntraceableError("there are hooks on its modules")
        nothing = RaggedBatch.empty(len(self.grouping.parts), self.model.device)
        self.backend.begin_step(nothing)
        if self.mixing is not None:
            self.mixing.begin_step(nothing)

        def run(input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> list[torch.Tensor]:
            return self._run_eagerly(input_ids, positions, logit_rows, len(input_ids))

        return trace_forward(run, max_tokens, self._num_dimensions)

    @property
    def _num_dimensions(self) -> int:
        """Of positions in a graph."""
        return 1 if self.encoder_outputs is None else self.encoder_outputs.num_dimensions

    def run_program(self, program: EncodedProgram) -> None:
        """Run a compiled graph in every step from now on."""
        self._compiled = CompiledGraph(program)

    @property
    def program(self) -> EncodedProgram | None:
        """The program that runs; None: the model's own Python runs."""
        return None if self._compiled is None else self._compiled.program

    @property
    def attention_calls(self) -> list[int]:
        """The kernels' handles of the attention calls, in order; empty with any other backend."""
        return [cache.call for _, cache in self._calls if isinstance(cache, CpuCache)]

    def run_eagerly(self) -> None:
        """Run the model's own Python in every forward pass from now on."""
        self._compiled = None

    def compare_attention(self) -> ComparedAttention:
        """Start comparing the backend with reference attention, with a new cache; call before anything has run. The
        model then runs eagerly: a graph's attention calls bypass the backend."""
        definition = ReferenceAttention(self.model.device, self.model.dtype, self.backend.block_size)
        comparison = ComparedAttention(self.backend, definition, self.grouping.parts[0].num_parts)
        self.backend = comparison
        self.run_eagerly()
        self.allocate(self._num_blocks, self._num_states)
        return comparison

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Handle the model's next attention call. Its ordinal in the forward pass identifies its cache, because a layer
        may attend twice (DiffLlama) or run twice (HRM). See `AttentionHandler` for shapes."""
        spec, cache = self._calls[self._num_calls]
        self._num_calls += 1
        num_rows, num_tokens = query.shape[2], self._num_tokens
        query, key, value = (states[0].transpose(0, 1)[:num_tokens] for states in (query, key, value))
        if spec.shares_cache_with is None:
            self.backend.write(cache, key, value, spec)
        output = self.backend.attend(query, cache, spec, attention_sinks(module, kwargs))
        if num_rows > num_tokens:
            output = torch.cat([output, output.new_zeros(num_rows - num_tokens, *output.shape[1:])])
        return output[None]


def plain_forward(model: PreTrainedModel) -> Callable[..., torch.Tensor]:
    """The model's own forward pass over one row: token ids `[T]`, positions `[T]` and logit rows `[R]`, all int64, to
    logits `[R, V]` in the model's dtype."""

    parameters = forward_parameters(model)
    takes_logit_rows, takes_positions = "logits_to_keep" in parameters, "position_ids" in parameters
    hook_positions(model)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {}
        if takes_logit_rows:
            options["logits_to_keep"] = logit_rows
        if takes_positions:
            options["position_ids"] = positions.unsqueeze(-2)
        with at_positions(positions):
            logits: torch.Tensor = model(
                input_ids=input_ids[None],
                attention_mask=None,
                use_cache=False,
                return_dict=True,
                **options,
            ).logits[0]
        return logits if takes_logit_rows else logits[logit_rows]

    return forward


def require_packed(executor: Executor) -> PackedExecutor:
    """Return the executor if it is packed. Raises `ModelError` if attention is the model's own, which cannot be
    inspected."""
    Features(executor=executor.name).require(INSPECTION)
    assert isinstance(executor, PackedExecutor)
    return executor


def _without_padding(batch: RaggedBatch, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits `[n, V]`, and states `[n, hidden]` if they are kept, without padding rows: `[R, V]` and `[T, hidden]`."""
    logits, *states = outputs
    return [logits[: batch.num_logit_rows], *(each[: batch.num_tokens] for each in states)]


def _in_part(batch: RaggedBatch, part: BlockPart, block_size: int) -> CacheGroupBatch:
    """The keys and values of calls that use a part of each block. Parts are numbered like blocks."""
    group = batch.groups[part.group]
    if part.num_parts == 1:
        return group
    blocks, offsets = group.cache_indices // block_size, group.cache_indices % block_size
    return CacheGroupBatch(
        (blocks * part.num_parts + part.part) * block_size + offsets,
        group.block_tables * part.num_parts + part.part,
        group.block_tables_host * part.num_parts + part.part,
    )


def _at_least(number: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows `[n]` int64, the last one repeated until there are `number`; zeros if there are none."""
    if rows.shape[0] >= number:
        return rows
    last = rows[-1:] if rows.shape[0] else rows.new_zeros(1)
    return torch.cat([rows, last.repeat(number - rows.shape[0])])

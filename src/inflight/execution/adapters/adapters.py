"""`Adapters`: keeps adapters in memory, and assigns them to a step's rows.

Adapters of running sequences stay in memory. Others are evicted, least recently used first, beyond a limit, and
reloaded from their open files.

`PackedAdapter`: an adapter's matrices in the kernels' layout, in the dtypes of the rows.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn

from inflight.contracts.api.errors import AdapterError, ModelError
from inflight.contracts.api.features import ADAPTERS, Features
from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.adapters.checkpoint import AdapterCheckpoint, LowRankUpdate, Scaling
from inflight.execution.adapters.layers import AdaptableLayers, AdapterTarget
from inflight.execution.executors import Executor, PackedExecutor
from inflight.execution.kernels import delete_with
from inflight.execution.mapped_memory import untouched_memory
from inflight.execution.ragged_batch import IntArray, RaggedBatch
from inflight.execution.weights.panels import PanelLinear, panels_of

MULTIPLE, TOGETHER = 32, 8
"""Inputs and rows that the kernels multiply at a time (`kernels/adapters.h`)."""
LINE = 64
"""Bytes of a line of the processor's cache."""


class PackedAdapter:
    """An adapter in memory.

    Attributes:
        number: the kernels' handle.
        num_bytes: of its matrices.

    Raises:
        AdapterError: the model has no such layer, or it has another shape.
    """

    def __init__(self, checkpoint: AdapterCheckpoint, layers: AdaptableLayers) -> None:
        parts = [
            (target, _down_of(target, down), panels_of(up.to(target.dtype)))
            for update in checkpoint.updates
            for target, down, up in matrices_of(update, checkpoint.scaling, layers)
        ]
        parts.sort(key=lambda part: (part[0].place, part[0].first_output))
        targets = [target for target, _, _ in parts]
        together = _in_one_piece([matrix for _, down, up in parts for matrix in (down, up)])
        downs, ups = together[::2], together[1::2]
        self.num_bytes = sum(each.nbytes for each in together)
        self.number: int = torch.ops.inflight.new_adapter(
            layers.num_places,
            [target.place for target in targets],
            [target.first_output for target in targets],
            [target.out_features for target in targets],
            downs,
            ups,
        )
        delete_with(self, torch.ops.inflight.delete_adapter, self.number)


def matrices_of(
    update: LowRankUpdate, scaling: Scaling, layers: AdaptableLayers
) -> Iterator[tuple[AdapterTarget, torch.Tensor, torch.Tensor]]:
    """The targets of an update, with `[rank, in]` and `[out, rank]` of each, float, scaled. Raises `AdapterError` if
    the model has no such weight, or one of another shape."""
    module, down, up = update.module, update.down, update.up.float()
    sizes = down.shape[1], up.shape[0]
    if (target := layers.weights.get(module)) is not None:
        if update.is_embedding is not target.is_embedding:
            raise AdapterError(
                f"the matrices of {module} are for {'an embedding' if update.is_embedding else 'a linear layer'}"
            )
        if sizes != (target.in_features, target.out_features):
            raise AdapterError(f"the adapter changes a weight {_shape(*sizes)} of {module}; the model's is {target}")
        yield target, down, up * scaling.factor(len(down), module, f"{module}.weight")
        return
    while module not in layers.experts and module.endswith(".base_layer"):  # PEFT wraps one parameter after the other
        module = module.removesuffix(".base_layer")
    if module not in layers.experts:
        raise AdapterError(f"{module} is no layer of the model that an adapter can change")
    parameters = layers.experts[module]
    for name, experts in parameters.items():
        if sizes == (experts[0].in_features, experts[0].out_features) and len(down) % len(experts) == 0:
            rank = len(down) // len(experts)
            factor = scaling.factor(rank, f"{module}.{name}")
            for number, expert in enumerate(experts):
                yield (
                    expert,
                    down.view(-1, rank, sizes[0])[number],
                    up.view(-1, rank, len(experts))[..., number] * factor,
                )
            return
    has = ", ".join(f"{name}, {len(experts)} times {experts[0]}" for name, experts in parameters.items())
    raise AdapterError(f"the adapter changes weights {_shape(*sizes)} of {module}, which has {has}")


def _shape(in_features: int, out_features: int) -> str:
    return f"[{out_features}, {in_features}]"


def _down_of(target: AdapterTarget, down: torch.Tensor) -> torch.Tensor:
    """`[rank, in]`, float, in the target's dtype, zero-padded to a multiple of inputs, in the kernels' order; of an
    embedding, `[vocabulary, rank]`."""
    if target.is_embedding:
        return down.to(target.dtype).T.contiguous()
    filled = nn.functional.pad(down.to(target.dtype), (0, -target.in_features % MULTIPLE))
    rank, num_inputs = filled.shape
    num_whole = rank // TOGETHER * TOGETHER
    whole = filled[:num_whole].view(-1, TOGETHER, num_inputs // MULTIPLE, MULTIPLE).transpose(1, 2)
    return torch.cat([whole.reshape(num_whole, num_inputs), filled[num_whole:]])


def _in_one_piece(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """The matrices `[…]`, each with its shape and dtype, consecutively in huge pages, in the order in which a step
    reads them."""
    sizes = [-(-each.nbytes // LINE) * LINE for each in matrices]
    memory, copies, first = untouched_memory(sum(sizes)), [], 0
    for matrix, size in zip(matrices, sizes, strict=True):
        copy = memory[first : first + matrix.nbytes].view(matrix.dtype).view(matrix.shape)
        copies.append(copy.copy_(matrix))
        first += size
    return copies


MAX_OPEN = 1024
"""Unused adapters whose files stay open."""


class Adapters:
    """The adapters of one model. Any thread may open them; all else is for the thread that runs steps.

    Args:
        executor: with a prepacked, untraced model, and an allocated, unused cache.
        block_size: of the cache.
        max_bytes: the most memory of adapters without running sequences.

    Raises:
        ModelError: the model cannot have adapters.
    """

    def __init__(self, executor: Executor, block_size: int, max_bytes: int) -> None:
        Features(executor.name, executor.model.device.type).require(ADAPTERS)
        assert isinstance(executor, PackedExecutor)
        if not any(isinstance(module, PanelLinear) for module in executor.model.modules()):
            raise ModelError("adapters need our kernels, on a CPU with AVX2, and a model in float32 or bfloat16")
        self.layers = AdaptableLayers(executor.model, partial(_run, executor, block_size))
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of all adapters in memory."""
        self._lock = threading.RLock()
        self._of_source: OrderedDict[str, AdapterCheckpoint] = OrderedDict()
        self._opened: WeakValueDictionary[str, AdapterCheckpoint] = WeakValueDictionary()  # by digest
        self._packed: OrderedDict[str, PackedAdapter] = OrderedDict()  # by digest
        self._of_slot: dict[int, str] = {}
        executor.adapters = self

    # ------------------------------------------------------------------------------------- opening

    def known(self, source: str) -> AdapterCheckpoint | None:
        """The open adapter of a folder or a hub repository, if any."""
        with self._lock:
            if source in self._of_source:
                self._of_source.move_to_end(source)
            return self._of_source.get(source)

    def get(self, source: str) -> AdapterCheckpoint:
        """The same, opening it if necessary; see `open`."""
        return self.known(source) or self.open(source)

    def open(self, source: str) -> AdapterCheckpoint:
        """Load an adapter from a folder or a hub repository. Sequences can use it, by its digest, while the caller
        keeps the returned object. Raises `AdapterError`."""
        checkpoint = AdapterCheckpoint.read(source)
        packed = PackedAdapter(checkpoint, self.layers)
        with self._lock:
            checkpoint = self._opened.setdefault(checkpoint.digest, checkpoint)
            self._keep(checkpoint.digest, packed)
            self._of_source[source] = checkpoint
            self._of_source.move_to_end(source)
            if len(self._of_source) > MAX_OPEN:
                self._of_source.popitem(last=False)
        return checkpoint

    def close(self, source: str) -> None:
        """Close the adapter of a folder or a repository; running sequences keep it."""
        with self._lock:
            closed = self._of_source.pop(source, None)
            if closed is not None and closed.digest not in self._of_slot.values():
                packed = self._packed.pop(closed.digest, None)
                self.num_bytes -= 0 if packed is None else packed.num_bytes

    # ------------------------------------------------------------------------------------- steps

    def take(self, plan: StepPlan) -> None:
        """Track slot assignments and releases."""
        with self._lock:
            for slot in plan.released_slots:
                self._of_slot.pop(slot, None)
            for assignment in plan.assignments:
                self._of_slot.pop(assignment.slot, None)
                if assignment.adapter is not None:
                    self._of_slot[assignment.slot] = assignment.adapter

    @contextmanager
    def in_step(self, batch: RaggedBatch, num_rows: int, num_logit_rows: int) -> Iterator[None]:
        """See `StepAdapters`."""
        of_slot = {span.slot: self._of_slot[span.slot] for span in batch.spans if span.slot in self._of_slot}
        if not of_slot:
            yield
            return
        numbers = {digest: number for number, digest in enumerate(dict.fromkeys(of_slot.values()))}
        packed = [self._in_memory(digest) for digest in numbers]

        def numbers_of(slots: list[int]) -> IntArray:
            return np.array([numbers[of_slot[slot]] if slot in of_slot else -1 for slot in slots])

        of_tokens = np.repeat(numbers_of([span.slot for span in batch.spans]), batch.query_lens_host)
        of_logits = numbers_of(batch.logit_slots_host.tolist())
        torch.ops.inflight.begin_adapted_step(
            self.layers.step,
            [each.number for each in packed],
            _filled_up(of_tokens, num_rows),
            _filled_up(of_logits, num_logit_rows),
        )
        try:
            yield
        finally:
            torch.ops.inflight.begin_adapted_step(self.layers.step, [], [], [])

    # ------------------------------------------------------------------------------------- memory

    def _in_memory(self, digest: str) -> PackedAdapter:
        with self._lock:
            packed = self._packed.get(digest) or PackedAdapter(self._opened[digest], self.layers)
            return self._keep(digest, packed)

    def _keep(self, digest: str, packed: PackedAdapter) -> PackedAdapter:
        """Load one into memory, evicting others beyond the limit."""
        if digest not in self._packed:
            self._packed[digest] = packed
            self.num_bytes += packed.num_bytes
        self._packed.move_to_end(digest)
        if self.num_bytes > self.max_bytes:
            in_use = {digest, *self._of_slot.values()}
            for each in [each for each in self._packed if each not in in_use]:
                if self.num_bytes <= self.max_bytes:
                    break
                self.num_bytes -= self._packed.pop(each).num_bytes
        return self._packed[digest]


def _run(executor: PackedExecutor, block_size: int, num_tokens: int, num_logit_rows: int) -> None:
    """Run a step of one sequence with arbitrary tokens."""
    tables = tuple((array("i", [0] * -(-num_tokens // block_size)),) for _ in executor.cache_groups)
    token_ids = [number % executor.model.get_input_embeddings().weight.shape[0] for number in range(num_tokens)]
    plan = StepPlan((Span(0, 0, 0, token_ids, num_logit_rows, num_tokens),), tables)
    executor.outputs(RaggedBatch.from_plan(plan, block_size, executor.model.device))


def _filled_up(numbers: IntArray, size: int) -> list[int]:
    """Numbers `[n]` int64, padded to `size` with the last one, like a step's rows; -1 if there are none."""
    if not len(numbers):
        return [-1] * size
    return np.pad(numbers, (0, size - len(numbers)), mode="edge").tolist()  # type: ignore[no-any-return]

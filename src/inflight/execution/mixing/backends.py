"""Backends of sequence mixers: `ReferenceMixing`, the definition, and `CpuMixing`, the kernels.

`execution/kernels/mixers.h` has the arithmetic. States advance token by token, in float32, so a token's result has the
same bits in any batch and chunking. That costs little: a head's state stays in a core's cache while a span's tokens
pass.
"""

from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from inflight.contracts.step.plan import NO_STATE
from inflight.execution.kernels import delete_with, kernels_available
from inflight.execution.mapped_memory import untouched_memory
from inflight.execution.mixing.interface import MixerSpec, Operators, Recurrence
from inflight.execution.ragged_batch import IntArray, RaggedBatch

FROM_SPAN_BEFORE = -2
"""In place of a state: that of the span before."""
_COLUMNS = 32
"""Columns of a state that kernels compute together."""


def mixed_spans(batch: RaggedBatch) -> IntArray:
    """What advances which state in a step, `[n, 4]` int64: first row and end, and states before and after."""
    spans: list[tuple[int, int, int, int]] = []
    first = 0
    for span in batch.spans:
        row, before = first, NO_STATE if span.start == 0 else span.state if span.states else span.slot
        first += span.length
        for length, after in span.states or ((span.length, span.slot),):
            end = first - span.length + length
            spans.append((row, end, before, after))
            row, before = end, FROM_SPAN_BEFORE
    return np.array(spans, dtype=np.int64).reshape(-1, 4)


class MixingBackend(Operators, Protocol):
    """Keeps states, and runs the operators of a forward pass in order."""

    @property
    def handles(self) -> Sequence[int]:
        """The kernels' handles of the operators, in order; empty without kernels."""
        ...

    @property
    def bytes_per_state(self) -> int:
        """Memory that a sequence's states take in all operators."""
        ...

    def allocate(self, num_states: int) -> None:
        """Allocate memory for states."""
        ...

    def memory_of(self, state: int) -> list[torch.Tensor]:
        """A state in every operator, float32."""
        ...

    def begin_step(self, batch: RaggedBatch) -> None:
        """Prepare for a step."""
        ...

    def begin_pass(self) -> None:
        """Begin a forward pass: the next operator is the first."""
        ...

    @property
    def num_missing(self) -> int:
        """How many operators have not run in this pass."""
        ...


def _size(spec: MixerSpec) -> int:
    """Floats of a state in memory: a head's columns are padded."""
    *others, columns = spec.state
    return prod(others) * (-(-columns // _COLUMNS) * _COLUMNS if spec.is_recurrence else columns)


class _InOrder:
    """Counts the operators of a pass.

    Args:
        specs: of the operators, in order.
    """

    def __init__(self, specs: Sequence[MixerSpec]) -> None:
        self._specs = specs
        self._num_run = 0
        self._states: list[torch.Tensor] = []  # of each operator, float32

    @property
    def bytes_per_state(self) -> int:
        """See `MixingBackend`."""
        return sum(4 * _size(spec) for spec in self._specs)

    def memory_of(self, state: int) -> list[torch.Tensor]:
        """See `MixingBackend`."""
        return [states[state] for states in self._states]

    @property
    def num_missing(self) -> int:
        """See `MixingBackend`."""
        return len(self._specs) - self._num_run

    def begin_pass(self) -> None:
        """See `MixingBackend`."""
        self._num_run = 0

    def _next(self, spec: MixerSpec) -> int:
        """The ordinal of the operator that runs now. Raises `RuntimeError` if it is not as at load."""
        number = self._num_run
        if number >= len(self._specs) or self._specs[number] != spec:
            raise RuntimeError("the model mixes tokens in another way than at load")
        self._num_run += 1
        return number


class CpuMixing(_InOrder):
    """The kernels' backend. Needs `kernels_available()`."""

    def __init__(self, specs: Sequence[MixerSpec]) -> None:
        super().__init__(specs)
        self._step = torch.ops.inflight.new_mixer_step()
        delete_with(self, torch.ops.inflight.delete_mixer_step, self._step)
        self.handles: list[int] = []

    def allocate(self, num_states: int) -> None:
        """See `MixingBackend`."""
        self._states, self.handles = [], []
        for spec in self._specs:
            memory = untouched_memory(4 * num_states * _size(spec)).view(torch.float32).view(num_states, -1)
            self._states.append(memory)
            self.handles.append(torch.ops.inflight.new_mixer(self._step, memory))
            delete_with(self, torch.ops.inflight.delete_mixer, self.handles[-1])

    def begin_step(self, batch: RaggedBatch) -> None:
        """See `MixingBackend`."""
        torch.ops.inflight.begin_mixing(self._step, torch.from_numpy(mixed_spans(batch)))

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """See `Operators`."""
        number = self._next(MixerSpec(False, (weight.shape[1] - 1, x.shape[1])))
        output: torch.Tensor = torch.ops.inflight.convolve(
            x, weight.contiguous(), bias, activation, self.handles[number]
        )
        return output

    def recur(self, given: Recurrence) -> torch.Tensor:
        """See `Operators`."""
        number = self._next(given.spec)
        tensors = given.query, given.key, given.value, given.decay, given.beta, given.skip, given.rates
        output: torch.Tensor = torch.ops.inflight.recur(
            *tensors, given.is_delta, given.normalizes, given.scale, given.dtype, self.handles[number]
        )
        return output


class ReferenceMixing(_InOrder):
    """The definition, in torch's operators, one token at a time. On any device."""

    handles: Sequence[int] = ()

    def __init__(self, specs: Sequence[MixerSpec], device: torch.device) -> None:
        super().__init__(specs)
        self._device = device
        self._spans: list[list[int]] = []

    def allocate(self, num_states: int) -> None:
        """See `MixingBackend`."""
        self._states = [torch.zeros(num_states, *spec.state, device=self._device) for spec in self._specs]

    def begin_step(self, batch: RaggedBatch) -> None:
        """See `MixingBackend`."""
        self._spans = mixed_spans(batch).tolist()

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """See `Operators`."""
        states = self._states[self._next(MixerSpec(False, (weight.shape[1] - 1, x.shape[1])))]
        output = torch.zeros_like(x)
        for row, end, before, after in self._spans:
            if before != FROM_SPAN_BEFORE:
                known = torch.zeros_like(states[0]) if before == NO_STATE else states[before]
            rows = torch.cat([known.to(x.dtype), x[row:end]])
            known = rows[-len(known) :]
            if after != NO_STATE:
                states[after] = known
            summed = functional.conv1d(rows.T[None], weight[:, None], bias, groups=x.shape[1])[0].T
            output[row:end] = _activated(summed, activation)
        return output

    def recur(self, given: Recurrence) -> torch.Tensor:
        """See `Operators`."""
        states = self._states[self._next(given.spec)]
        heads_of_key = given.value.shape[1] // given.key.shape[1]
        query, key = (each.float().repeat_interleave(heads_of_key, 1) for each in (given.query, given.key))
        if given.normalizes:
            query, key = (each * ((each * each).sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (query, key))
        query, value = query * given.scale, given.value.float()
        output = torch.zeros_like(value)
        for row, end, before, after in self._spans:
            if before != FROM_SPAN_BEFORE:
                state = torch.zeros_like(states[0]) if before == NO_STATE else states[before]
            for token in range(row, end):
                state = state * _decay(given, token)
                update = value[token]
                if given.is_delta:
                    update = update - torch.einsum("hk,hkv->hv", key[token], state)
                if given.beta is not None:
                    update = update * given.beta[token, :, None]
                state = state + key[token][:, :, None] * update[:, None]
                output[token] = torch.einsum("hk,hkv->hv", query[token], state)
            if after != NO_STATE:
                states[after] = state
            if given.skip is not None:
                output[row:end] += given.skip[:, None] * value[row:end]
        return output.to(given.dtype)


def _activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "none":
        return x
    return functional.silu(x) if activation == "swish" else functional.relu(x)


def _decay(given: Recurrence, token: int) -> torch.Tensor:
    """A token's decay, `[H, K, V]` or smaller where it is the same."""
    decay = given.decay[token]
    if given.rates is not None:
        return (given.rates * decay[:, None]).exp()
    return decay.exp()[..., None] if decay.dim() == 2 else decay.exp()[:, None, None]


def make_mixing(specs: Sequence[MixerSpec], device: torch.device) -> MixingBackend | None:
    """The best backend for the device; None: there is nothing to run."""
    if not specs:
        return None
    if device.type == "cpu" and kernels_available():
        return CpuMixing(specs)
    return ReferenceMixing(specs, device)

"""`RowCache`: a `transformers` cache with our layers. Keys and values are in blocks, recurrent states by slot.

The model gets it as its `past_key_values` (or `cache_params`) while rows of a step run: each layer has the keys and
values of these rows' sequences, gathered and padded on the left, and their states. The model's own cache shows the
kinds of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from inflight.contracts.api.errors import ModelError
from inflight.execution.ragged_batch import IntArray

ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
STATE = (LinearAttentionLayer,)
BOTH = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
NUM_SPARE = 64
"""Spare tokens after gathered ones."""


@dataclass(slots=True)
class CacheRows:
    """B rows of L tokens, whose sequences have up to K keys. Shorter first spans are padded on the left.

    Attributes:
        sequence_ids, slots: `[B]` int64.
        starts, ends: `[B]` int64, the positions of each row's first token and after its last.
        num_new: L.
        tokens: `[n]` int64, indices of the n tokens among the B * L entries; None: no padding.
        written: `[n]` int64, the cache index of each token.
        gathered: `[B, K]` int64, the cache indices of each sequence's keys, padded on the left with its first.
        num_keys: K.
    """

    sequence_ids: IntArray
    slots: IntArray
    starts: IntArray
    ends: IntArray
    num_new: int
    tokens: torch.Tensor | None
    written: torch.Tensor
    gathered: torch.Tensor
    num_keys: int

    def follow(self, before: "CacheRows | None") -> bool:
        """Whether these are the sequences of the previous rows, each with its next token."""
        return (
            before is not None
            and np.array_equal(before.sequence_ids, self.sequence_ids)
            and np.array_equal(before.ends, self.starts)
            and np.array_equal(self.starts + 1, self.ends)
        )

    @property
    def num_past(self) -> int:
        """Keys cached from the model's view: all before the rows' tokens, padding included."""
        return self.num_keys - self.num_new


class PagedTensor:
    """Storage of one layer's keys, or values: `[num_tokens, Hkv, D]`.

    While the same sequences decode, gathered keys are kept and only new tokens are added: gathering takes longer than
    attention itself.

    Args:
        states: `[B, Hkv, L, D]`, example keys or values, for sizes and dtype.
        num_tokens: room for keys or values.
    """

    def __init__(self, states: torch.Tensor, num_tokens: int) -> None:
        shape = (num_tokens, states.shape[1], states.shape[3])
        self._storage = torch.empty(shape, dtype=states.dtype, device=states.device)
        self._gathered: torch.Tensor | None = None  # [B, Hkv, K + spare, D]

    def update(self, states: torch.Tensor, rows: CacheRows, *, is_next: bool) -> torch.Tensor:
        """Store the rows' new states `[B, Hkv, L, D]`; return those of their whole sequences, `[B, Hkv, K, D]`. Both
        have the dtype of the example."""
        new = states.transpose(1, 2).flatten(0, 1)
        self._storage[rows.written] = new if rows.tokens is None else new[rows.tokens]
        if rows.num_past == 0:
            if states.shape[2] == 1:
                self._gathered = None  # gathered for other sequences
            return states
        gathered, num_keys = self._gathered, rows.num_keys
        if is_next and gathered is not None and gathered.shape[2] >= num_keys:
            gathered[:, :, num_keys - 1] = states[:, :, 0]
        else:
            num_rows, num_heads, num_new, size = states.shape
            gathered = states.new_empty((num_rows, num_heads, num_keys + NUM_SPARE, size))
            found = self._storage.index_select(0, rows.gathered.flatten()).view(num_rows, num_keys, num_heads, size)
            gathered[:, :, :num_keys] = found.transpose(1, 2)
            if num_new == 1:
                self._gathered = gathered
        return gathered[:, :, :num_keys]

    def forget_gathered(self) -> None:
        """Free gathered keys."""
        self._gathered = None

    def copy(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy tokens from cache indices to cache indices, `[n]` int64 each."""
        self._storage[destinations] = self._storage[sources]


class PagedKeysAndValues:
    """Storage of one layer's keys and values, in the shapes of `layer`."""

    def __init__(self, layer: DynamicLayer, num_tokens: int) -> None:
        self._keys, self._values = (PagedTensor(states, num_tokens) for states in (layer.keys, layer.values))
        self.rows: CacheRows | None = None
        self.is_next = False

    @staticmethod
    def bytes_per_token(layer: DynamicLayer) -> int:
        """Bytes that one token takes."""
        return sum(states.shape[1] * states.shape[3] * states.element_size() for states in (layer.keys, layer.values))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the rows' new keys and values `[B, Hkv, L, D]`; return those of their sequences, `[B, Hkv, K, D]`, in
        the layer's dtype."""
        rows = self.rows
        assert rows is not None
        keys = self._keys.update(key_states, rows, is_next=self.is_next)
        return keys, self._values.update(value_states, rows, is_next=self.is_next)

    def copy(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """See `PagedTensor`."""
        for states in (self._keys, self._values):
            states.copy(sources, destinations)

    def forget_gathered(self) -> None:
        """See `PagedTensor`."""
        for states in (self._keys, self._values):
            states.forget_gathered()


class StatesBySlot:
    """Storage of one layer's recurrent states, by slot."""

    def __init__(self, layer: LinearAttentionLayer, num_slots: int) -> None:
        self.kernel_sizes = dict(layer.conv_kernel_size)
        self.tensors = {
            (name, index): torch.zeros((num_slots, *state.shape[1:]), dtype=state.dtype, device=state.device)
            for name in ("conv_states", "recurrent_states")
            for index, state in getattr(layer, name).items()
            if state is not None
        }

    @staticmethod
    def bytes_per_slot(layer: LinearAttentionLayer) -> int:
        """Bytes that one slot takes."""
        states = (*layer.conv_states.values(), *layer.recurrent_states.values())
        return sum(state.numel() * state.element_size() for state in states if state is not None)

    def load(self, layer: LinearAttentionLayer, slots: torch.Tensor | None) -> None:
        """Load the states of `slots` `[B]` int64 into `layer`; None: the sequences begin, and the layer initialises its
        states."""
        for name in ("conv_states", "recurrent_states"):
            states, known = getattr(layer, name), getattr(layer, f"is_{name}_initialized")
            for index in states:
                kept = self.tensors.get((name, index))
                states[index] = None if slots is None or kept is None else kept[slots]
                known[index] = states[index] is not None
        for index in layer.has_previous_state:
            layer.has_previous_state[index] = slots is not None
        layer.conv_kernel_size.update(self.kernel_sizes)

    def store(self, layer: LinearAttentionLayer, slots: torch.Tensor) -> None:
        """Save the states of `layer` for `slots` `[B]` int64."""
        for (name, index), kept in self.tensors.items():
            kept[slots] = getattr(layer, name)[index]


class _Paged:
    """Overrides what layers with keys and values inherit."""

    storage: PagedKeysAndValues

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PagedKeysAndValues`."""
        return self.storage.update(key_states, value_states)

    def get_seq_length(self) -> int:
        return 0 if self.storage.rows is None else self.storage.rows.num_past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class _PagedLayer(_Paged, DynamicLayer):
    """Full attention with all keys; the model's mask applies a window."""


class _SlidingPagedLayer(_Paged, DynamicSlidingWindowLayer):
    pass


class _HybridLayer(_Paged, LinearAttentionAndFullAttentionLayer):
    pass


class _SlidingHybridLayer(_Paged, LinearAttentionAndSlidingWindowAttentionLayer):
    pass


_PAGED = {
    DynamicLayer: _PagedLayer,
    DynamicSlidingWindowLayer: _SlidingPagedLayer,
    LinearAttentionAndFullAttentionLayer: _HybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: _SlidingHybridLayer,
}


class RowCache(Cache):
    """The cache of all sequences of an engine, viewed by the current rows.

    Args:
        like: the model's own cache after some tokens, as an example of its layers.
        num_tokens: room for keys and values.
        num_slots: room for states.

    Raises:
        ModelError: a layer holds anything other than keys, values and states.
    """

    def __init__(self, like: DynamicCache, num_tokens: int, num_slots: int) -> None:
        check_layers(like)
        layers: list[Any] = []
        self._paged: list[PagedKeysAndValues] = []
        self._states: list[tuple[LinearAttentionLayer, StatesBySlot]] = []
        for layer in like.layers:
            own = _like(layer)
            if isinstance(own, _Paged):
                own.storage = PagedKeysAndValues(layer, num_tokens)
                self._paged.append(own.storage)
            if isinstance(own, STATE):
                self._states.append((own, StatesBySlot(layer, num_slots)))
            layers.append(own)
        super().__init__(layers=layers)
        self._lengths = np.full(num_slots, -1, dtype=np.int64)  # the tokens in each slot's states
        self._before: CacheRows | None = None  # the last rows of one token each that have run

    @property
    def has_keys(self) -> bool:
        return bool(self._paged)

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    def copy(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy keys and values from cache indices to cache indices, `[n]` int64 each."""
        for storage in self._paged:
            storage.copy(sources, destinations)

    def release(self, slots: Sequence[int]) -> None:
        """Forget the sequences in these slots."""
        self._lengths[list(slots)] = -1
        if self._before is not None and np.isin(self._before.slots, slots).any():
            self._before = None
            for storage in self._paged:
                storage.forget_gathered()

    def enter(self, rows: CacheRows) -> None:
        """Begin running these rows. Raises `RuntimeError` if their states are unknown."""
        is_next = rows.follow(self._before)
        if rows.num_new == 1:
            self._before = None  # until these have run
        for storage in self._paged:
            storage.rows, storage.is_next = rows, is_next
        if not self._states:
            return
        slots = torch.from_numpy(rows.slots) if rows.starts[0] > 0 else None
        if slots is not None and (self._lengths[rows.slots] != rows.starts).any():
            raise RuntimeError("the recurrent state of a sequence was lost")
        for layer, states in self._states:
            states.load(layer, slots)

    def leave(self, rows: CacheRows) -> None:
        """Save the rows' new states after they have run."""
        for storage in self._paged:
            storage.rows = None
        if rows.num_new == 1:
            self._before = rows
        if not self._states:
            return
        self._lengths[rows.slots] = rows.ends
        for layer, states in self._states:
            states.store(layer, torch.from_numpy(rows.slots))


def check_layers(like: Cache) -> None:
    """Raise `ModelError` unless all layers of a model's own cache are of known kinds."""
    if type(like) is not DynamicCache:
        raise ModelError(f"its cache is of an unknown kind, {type(like).__name__}")
    for layer in like.layers:
        if type(layer) not in (*ATTENTION, *STATE, *BOTH, DummyLayer):
            raise ModelError(f"its cache has layers of an unknown kind, {type(layer).__name__}")


def _like(layer: Any) -> Any:
    """A layer of the same kind as the model's, with our storage if it has keys and values."""
    if isinstance(layer, DynamicLayer) and not layer.is_initialized:
        return DummyLayer()  # never used
    kind: Any = _PAGED.get(type(layer), type(layer))
    options: dict[str, Any] = {}
    if isinstance(layer, DynamicSlidingWindowLayer):
        options["sliding_window"] = layer.sliding_window
    if isinstance(layer, STATE):
        options["number_of_states"] = layer.number_of_states
    return kind(**options)


def bytes_of(like: DynamicCache) -> tuple[int, int]:
    """Bytes that a token takes, and bytes that a slot takes."""
    per_token = sum(
        PagedKeysAndValues.bytes_per_token(layer)
        for layer in like.layers
        if isinstance(layer, DynamicLayer) and layer.is_initialized
    )
    return per_token, sum(StatesBySlot.bytes_per_slot(layer) for layer in like.layers if isinstance(layer, STATE))


def indices_of_blocks(copies: Sequence[tuple[int, int]], block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache indices of all tokens in the source blocks, and of those in the destination blocks: `[n]` int64
    each."""
    blocks = np.array(copies, dtype=np.int64).reshape(-1, 2).T[..., None] * block_size + np.arange(block_size)
    return torch.from_numpy(blocks[0].ravel()), torch.from_numpy(blocks[1].ravel())

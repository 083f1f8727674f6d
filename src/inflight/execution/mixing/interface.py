"""The two operators that all sequence mixers are made of, and the states that they keep.

Shapes: T tokens in the row, C channels, H heads of values, Hk heads of keys, K and V their sizes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """One call of an operator in a forward pass.

    Attributes:
        is_recurrence: whether its states are of heads, `(H, K, V)`; otherwise they are a convolution's last rows,
            `(K - 1, C)`.
        state: the sizes of a state.
    """

    is_recurrence: bool
    state: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The input of a linear recurrence. Each head has a state S `[K, V]`, float32. For each token, `S = decay * S + key
    (beta * value)`, or in a delta rule `key (beta * (value - key S))` with the decayed S; the result is `query S + skip
    * value`.

    Attributes:
        query, key: `[T, Hk, K]`; heads `i * H // Hk …` share one.
        value: `[T, H, V]`.
        decay: the logarithm of the decay, `[T, H]` or `[T, H, K]` float32; with `rates`, their factor, `[T, H, V]`.
        beta: `[T, H]` float32; None: 1.
        skip: `[H]` float32; None: 0.
        rates: `[H, K, V]` float32.
        normalizes: whether queries and keys are divided by their lengths first.
        scale: a factor of queries.
        dtype: the result's.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    rates: torch.Tensor | None = None
    is_delta: bool = False
    normalizes: bool = False
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> MixerSpec:
        """Its states."""
        return MixerSpec(True, (self.value.shape[1], self.key.shape[2], self.value.shape[2]))


class Operators(Protocol):
    """Runs the operators of a forward pass, in order."""

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """Each channel's last K rows times its weights: rows `[T, C]`, weights `[C, K]`, a bias `[C]` and an activation
        of `ACTIVATIONS`, to `[T, C]`, all of one dtype."""
        ...

    def recur(self, given: Recurrence) -> torch.Tensor:
        """See `Recurrence`; returns `[T, H, V]`."""
        ...

"""How the hidden states of a text become one vector: the modes of `sentence-transformers`."""

from collections.abc import Callable, Sequence

import torch

from inflight.contracts.errors import ModelError


def _weighted_mean(states: torch.Tensor, first: int) -> torch.Tensor:
    weights = torch.arange(1 + first, 1 + first + len(states), dtype=torch.float32, device=states.device)[:, None]
    return (states * weights).sum(0) / weights.sum()


POOLERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "cls": lambda states, first: states[0],
    "lasttoken": lambda states, first: states[-1],
    "mean": lambda states, first: states.mean(0),
    "max": lambda states, first: states.amax(0),
    "mean_sqrt_len_tokens": lambda states, first: states.sum(0) / len(states) ** 0.5,
    "weightedmean": _weighted_mean,
}
"""Each takes the states `[L, H]` of the tokens that are pooled, float32, and the place of the first of them in the
text, to `[H]`."""


def check_modes(modes: Sequence[str]) -> None:
    """Raise `ModelError` for a mode that is not known."""
    for mode in modes:
        if mode not in POOLERS:
            raise ModelError(f"the model pools by {mode!r}; this is not one of {', '.join(POOLERS)}")


def pooled(states: torch.Tensor, modes: Sequence[str], prompt_length: int) -> torch.Tensor:
    """The vector `[len(modes) * H]` of a text, float32.

    Args:
        states: of all its tokens, `[L, H]`.
        prompt_length: how many of the first ones are not pooled.
    """
    first = min(prompt_length, len(states) - 1)
    own = states[first:].float()
    return torch.cat([POOLERS[mode](own, first) for mode in modes])

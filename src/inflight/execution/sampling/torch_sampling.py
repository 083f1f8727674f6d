"""Sampling with torch's operators, where our kernels do not run: temperature, top-k, top-p, min-p, and the draw."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inflight.execution.ragged_batch import IntArray, to_device

FloatArray = npt.NDArray[np.float32]


def sample_with_torch(
    logits: torch.Tensor,
    temperature: FloatArray,
    top_k: IntArray,
    top_p: FloatArray,
    min_p: FloatArray,
    uniform: FloatArray,
) -> torch.Tensor:
    """Sampled tokens `[N]` int64 from logits `[N, V]`, float.

    Args:
        temperature, top_k, top_p, min_p: `[N]` float32, top_k int64, as in `SamplingParams`; temperatures above 0.
        uniform: `[N]` float32, random numbers in [0, 1).
    """

    def column(values: npt.NDArray[Any]) -> torch.Tensor:
        return to_device(values, logits.device)[:, None]

    logits = logits.float()
    # Less the largest logit, so that no temperature, however small, makes infinities.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / column(temperature)
    if (rows := np.flatnonzero(top_k)).size:
        selected, k = to_device(rows, logits.device), top_k[rows]
        logits[selected] = top_k_filter(logits[selected], column(k), int(k.max()))
    if (rows := np.flatnonzero(top_p < 1)).size:
        selected = to_device(rows, logits.device)
        logits[selected] = top_p_filter(logits[selected], column(top_p[rows]))
    if (rows := np.flatnonzero(min_p)).size:
        selected = to_device(rows, logits.device)
        logits[selected] = min_p_filter(logits[selected], column(min_p[rows]))
    return draw(torch.softmax(logits, dim=-1), column(uniform)[:, 0])


def top_k_filter(logits: torch.Tensor, top_k: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Keep each row's k most likely tokens, and ties: logits `[R, V]` float32, top_k `[R, 1]` int64 in
    [1, largest_k]."""
    largest = torch.topk(logits, min(largest_k, logits.shape[-1]), dim=-1).values
    least = largest.gather(-1, top_k.clamp(max=largest.shape[-1]) - 1)
    return logits.masked_fill(logits < least, float("-inf"))


def top_p_filter(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep each row's smallest set of most likely tokens that reaches probability p: `[R, V]`, top_p `[R, 1]`, float32.

    Nucleus sampling (Holtzman et al., 2020). Keeps ties with the least likely token that is kept.
    """
    ascending = torch.sort(logits, dim=-1).values
    num_dropped = (torch.softmax(ascending, dim=-1).cumsum(dim=-1) <= 1 - top_p).sum(dim=-1, keepdim=True)
    least = ascending.gather(-1, num_dropped.clamp(max=logits.shape[-1] - 1))
    return logits.masked_fill(logits < least, float("-inf"))


def min_p_filter(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drop tokens less likely than min_p times the row's most likely token: `[R, V]`, min_p `[R, 1]` > 0, float32."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), float("-inf"))


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Invert each row's cumulative distribution: probabilities `[R, V]` and uniform `[R]` in [0, 1), float32; tokens
    `[R]` int64."""
    cumulative = probabilities.cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=probabilities.shape[-1] - 1)
    # Sums that a device computes in parallel need not rise everywhere: never choose a token without probability.
    possible = probabilities.gather(-1, tokens) > 0
    return torch.where(possible, tokens, probabilities.argmax(dim=-1, keepdim=True))[:, 0]

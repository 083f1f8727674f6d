"""Integers with a scale, and often a zero point, per group of inputs, as in GPTQ, AWQ and compressed-tensors, which
differ in packing."""

import torch

from inflight.execution.grouped.weight import CHUNK, GroupedLayout, Groups

WIDTHS = (2, 3, 4, 5, 8)
"""Supported bits; narrower numbers are widened."""
BYTE = 8
"""Bits."""


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack numbers `[…, n * 8 / bits]` uint8 from bytes `[…, n]`, consecutive, the first in the lowest bits."""
    if bits == BYTE:
        return packed
    if BYTE % bits == 0:
        shifts = torch.arange(0, BYTE, bits, dtype=torch.uint8)
        return (packed[..., None] >> shifts & ((1 << bits) - 1)).flatten(-2)
    of_numbers = (packed[..., None] >> torch.arange(BYTE, dtype=torch.uint8) & 1).flatten(-2)
    num_numbers = of_numbers.shape[-1] // bits
    of_numbers = of_numbers[..., : num_numbers * bits].reshape(*packed.shape[:-1], num_numbers, bits)
    return (of_numbers << torch.arange(bits, dtype=torch.uint8)).sum(dim=-1, dtype=torch.uint8)


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """Integers `[…, n]` of any size as bytes, `[…, n * size]` uint8."""
    return words.contiguous().view(torch.uint8)


def in_groups(
    numbers: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    group: int,
    group_of: torch.Tensor | None = None,
) -> Groups | torch.Tensor:
    """A weight `(number - zero) * scale`, or its values `[out, in]` float32 where no kernel supports such groups.

    Args:
        numbers: `[out, in]` uint8 below `2**bits`.
        scales: `[out, groups]`.
        zeros: `[out, groups]`, or one for all.
        group: inputs that share a scale.
        group_of: `[in]` int64, the group of each input; None: consecutive.

    Raises `ValueError` if these do not fit each other.
    """
    num_groups, order, whole = scales.shape[1], None, True
    if scales.shape != (len(numbers), -(-numbers.shape[1] // group)):
        raise ValueError(f"scales {list(scales.shape)} do not fit {list(numbers.shape)} numbers in groups of {group}")
    if not isinstance(zeros, int) and zeros.shape != scales.shape:
        raise ValueError(f"zero points {list(zeros.shape)} do not fit scales {list(scales.shape)}")
    if group_of is not None and group_of.shape != numbers.shape[1:]:
        raise ValueError(f"the groups of {len(group_of)} inputs are given, not of {numbers.shape[1]}")
    if group_of is not None:
        order = group_of.argsort(stable=True)
        whole = torch.equal(group_of[order], torch.arange(len(order)) // group)
        order = None if torch.equal(order, torch.arange(len(order))) else order
    if num_groups == 1:
        group = -(-numbers.shape[1] // CHUNK) * CHUNK
    zeros = _one_for_all(zeros)
    is_exact = isinstance(zeros, int) or torch.equal(scales.to(torch.bfloat16).to(scales.dtype), scales)
    is_exact = is_exact or torch.equal(scales.half().to(scales.dtype), scales)  # `number * scale` has 24 bits at most
    if not (whole and is_exact and group % CHUNK == 0):
        places = torch.arange(numbers.shape[1]) // group if group_of is None else group_of.long()
        middles = zeros if isinstance(zeros, int) else zeros.float()[:, places]
        return (numbers.float() - middles) * scales.float()[:, places]
    numbers = numbers if order is None else numbers[:, order]
    width = next(each for each in WIDTHS if each >= bits)
    if isinstance(zeros, int):
        coarse = narrowest(scales)
        layout = GroupedLayout(width, group, middle=zeros, has_wide_scales=coarse.dtype == torch.float32)
        return Groups(layout, numbers, coarse, order=order)
    coarse = scales.float()
    layout = GroupedLayout(width, group, has_minima=True, has_wide_scales=True)
    return Groups(layout, numbers, coarse, coarse_minima=zeros.float() * coarse, order=order)


def _one_for_all(zeros: torch.Tensor | int) -> torch.Tensor | int:
    """Zero points `[out, groups]` as a single one, if they are all the same."""
    if isinstance(zeros, int):
        return zeros
    first = zeros.flatten()[0]
    return int(first) if bool((zeros == first).all()) else zeros


def narrowest(scales: torch.Tensor) -> torch.Tensor:
    """Scales `[…]`, float, in float16 if that holds them, else in float32."""
    halves = scales.half()
    return halves if torch.equal(halves.float(), scales.float()) else scales.float()

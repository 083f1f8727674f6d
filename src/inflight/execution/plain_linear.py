"""`plain_linear`: a fast `functional.linear` on CPUs, for models that run as in `transformers`.

Without AVX-512, torch multiplies bfloat16 and float16 with its own loops, a third as fast as float32, whose sums round
once to the same precision.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

VALUES_AT_ONCE = 2**20
"""Bytes of a weight's part in float32 that stay in a cache."""
LEAST_TOKENS = 8
"""Fewer are as fast without."""


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`[…, in]`, `[out, in]` and `[out]` of one dtype to `[…, out]`; sums are added in float32 in low precision."""
    num_outputs, num_inputs = weight.shape
    is_fast = x.device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    if is_fast or x.dtype not in (torch.bfloat16, torch.float16) or x.numel() < LEAST_TOKENS * num_inputs:
        return functional.linear(x, weight, bias)
    wide, out = x.float(), x.new_empty(*x.shape[:-1], num_outputs)
    step = max(1, VALUES_AT_ONCE // num_inputs)
    values = torch.empty(min(step, num_outputs), num_inputs)
    for first in range(0, num_outputs, step):
        some = slice(first, first + step)
        rows = values[: len(weight[some])].copy_(weight[some])
        out[..., some] = functional.linear(wide, rows, None if bias is None else bias[some].float())
    return out


class PlainLinears(TorchFunctionMode):
    """A context in which `functional.linear` is `plain_linear`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if func is functional.linear and type(args[1]) in (torch.Tensor, torch.nn.Parameter):
            return plain_linear(*args, **kwargs)
        return func(*args, **(kwargs or {}))

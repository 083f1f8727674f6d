"""`BatchInvariantElementwise`: elementwise functions of rows whose bits do not depend on an element's place.

torch computes the end of a tensor by another routine than its middle. Rows of a few numbers, such as a decay for each
head, would get other bits in other company.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OURS: Mapping[Any, str] = {
    torch.ops.aten.exp.default: "exp",
    torch.ops.aten.sigmoid.default: "sigmoid",
    torch.ops.aten.silu.default: "swish",
    torch.ops.aten.softplus.default: "softplus",
}
"""Names of the kernels."""


class BatchInvariantElementwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs these functions by our kernel. Needs `kernels_available()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        if func not in OURS or kwargs or args[1:] not in ((), (1, 20)) or not _is_ours(args[0]):
            return func(*args, **(kwargs or {}))
        x: torch.Tensor = args[0]
        is_by_channel = x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1
        rows = x.transpose(-1, -2) if is_by_channel else x
        output = torch.ops.inflight.activate(rows, OURS[func], "none")
        return output.transpose(-1, -2) if is_by_channel else output


def _is_ours(x: torch.Tensor) -> bool:
    return x.is_cpu and x.dtype in (torch.float32, torch.bfloat16) and x.dim() > 0

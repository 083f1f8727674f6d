"""`mix`: the functions through which models of `transformers` mix tokens without attention, over a packed row.

A model that is given no cache calls one of these five with the whole row, from its beginning, and only for the output.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from inflight.contracts.api.errors import ModelError
from inflight.execution.mixing.interface import Operators, Recurrence

ACTIVATIONS: Mapping[str | None, str] = {None: "none", "silu": "swish", "swish": "swish", "relu": "relu"}
"""Names of the kernels, by those of `transformers`."""
MAX_HEAD = 64
"""Channels of a selective scan that are computed as one head."""

MixerFunction: TypeAlias = Callable[..., Any]


def mix(name: str, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    """Call a function of `FUNCTIONS` by its name in the packages that it stands for; arguments and results are the
    original's. Raises `ModelError` for arguments that a packed row cannot have."""
    if kwargs.get("initial_state") is not None or kwargs.get("initial_states") is not None:
        raise ModelError(f"{name} begins with a state of the model's")
    return FUNCTIONS[name](operators, *args, **kwargs)


def _causal_conv1d(
    operators: Operators,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Rows `[1, C, T]` to `[1, C, T]`."""
    if activation not in ACTIVATIONS:
        raise ModelError(f"a convolution with the activation {activation!r} is not supported")
    rows = hidden_states[0].transpose(0, 1).to(weight.dtype)
    output = operators.convolve(rows, weight, bias, ACTIVATIONS[activation])
    return output.to(hidden_states.dtype).transpose(0, 1)[None]


def _delta_rule(
    operators: Operators,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Queries and keys `[1, T, Hk, K]`, values `[1, T, H, V]`, logarithms of decays `[1, T, H]` (Gated DeltaNet) or
    `[1, T, H, K]` (Kimi Delta Attention)."""
    output = operators.recur(
        Recurrence(
            query[0],
            key[0],
            value[0],
            g[0].float(),
            beta=beta[0].float(),
            is_delta=True,
            normalizes=use_qk_l2norm_in_kernel,
            scale=query.shape[-1] ** -0.5,
            dtype=query.dtype,
        )
    )
    return output[None], None


def _mamba2(
    operators: Operators,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> torch.Tensor:
    """Rows `[1, T, H, V]`, steps `[1, T, H]`, `B` and `C` `[1, T, Hk, K]`."""
    step = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    step = functional.softplus(step) if dt_softplus else step
    if dt_limit != (0.0, float("inf")) or not dt_softplus:
        step = torch.clamp(step, *dt_limit)
    step = step.float()
    skip = None if D is None else D.float()
    return operators.recur(Recurrence(C[0], B[0], hidden_states[0], A.float() * step, beta=step, skip=skip))[None]


def _selective_scan(
    operators: Operators,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    *,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Rows and steps `[1, C, T]`, `A` `[C, K]`, `B` and `C` `[1, K, T]`."""
    num_channels = hidden_states.shape[1]
    size = next(size for size in range(MAX_HEAD, 0, -1) if num_channels % size == 0)
    step = dt[0] if delta_bias is None else dt[0] + delta_bias.to(dt.dtype)[:, None]
    step = (functional.softplus(step) if delta_softplus else step).float().transpose(0, 1)
    rows = hidden_states[0].float().transpose(0, 1)

    def heads(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1, num_channels // size, size)

    rates = A.float().reshape(num_channels // size, size, -1).transpose(1, 2).contiguous()
    query, key = (each[0].transpose(0, 1)[:, None] for each in (C, B))
    output = operators.recur(Recurrence(query, key, heads(step * rows), heads(step), rates=rates))
    output = output.reshape(-1, num_channels)
    output = output if D is None else output + rows * D.float()
    output = output.transpose(0, 1)[None]
    return output if z is None else output * functional.silu(z)


FUNCTIONS: Mapping[str, MixerFunction] = {
    "causal_conv1d_fn": _causal_conv1d,
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "mamba_chunk_scan_combined": _mamba2,
    "selective_scan_fn": _selective_scan,
}
"""By their names in causal-conv1d, flash-linear-attention and mamba-ssm."""

"""Mixtures of experts with prepacked weights. `transformers` keeps these as bare parameters, not as linear layers.

All experts' matrices of one projection are one three-dimensional parameter, and models look up an implementation by
name. Ours, "inflight", runs the tokens of each expert together, and sums each token's experts in its own order, so that
a token gets the same bits in any batch. Routers, and experts of models without that lookup, are intercepted
(`caught_matrices`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from inflight.execution.kernels import delete_with, kernels_available
from inflight.execution.mixing.elementwise import BatchInvariantElementwise
from inflight.execution.weights.caught_matrices import CaughtMatrices, CaughtMatrix, LeftMatrix
from inflight.execution.weights.formats import PLAIN, WeightFormat
from inflight.execution.weights.layers import MIN_INVARIANT_ROWS
from inflight.execution.weights.linear_calls import ACTIVATIONS, OwnForward
from inflight.execution.weights.linears import ReleaseWeight
from inflight.execution.weights.panels import PanelLinear
from inflight.execution.weights.prepacked_linear import PrepackedLinear


class PrepackedExperts:
    """All experts of a module, each projection of each expert prepacked by itself.

    Attributes:
        up_name, down_name: the names of the original parameters.
        up: the layers `hidden` to `intermediate` (twice that with a gate), one for each expert.
        down: the layers back to `hidden`.
        num_chosen: experts per token; all, before the first call.
    """

    def __init__(self, module: Any, weight_format: WeightFormat = PLAIN, release: ReleaseWeight | None = None) -> None:
        self.up_name, self.down_name = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        self.up = _prepack_each(module, self.up_name, weight_format, release)
        self.down = _prepack_each(module, self.down_name, weight_format, release)
        self.num_chosen = len(self.up)
        self._activation = self._usual_activation(module)
        self.number = self._register()

    def _usual_activation(self, module: Any) -> tuple[str, str]:
        """The gate's activation if our kernel supports it; else "none"."""
        is_usual = type(module)._apply_gate is _default_apply_gate and not module.has_post_expert_norm
        known = ACTIVATIONS.get(type(getattr(module, "act_fn", module)))
        return known if module.has_gate and is_usual and known else ("none", "none")

    def _register(self) -> int | None:
        """The kernels' handle of these experts; None if unsupported."""
        panels = [each for each in (*self.up, *self.down) if isinstance(each, PanelLinear)]
        if len(panels) < len(self.up) + len(self.down):
            return None
        numbers = [each.number for each in panels]
        ups, downs = numbers[: len(self.up)], numbers[len(self.up) :]
        number: int = torch.ops.inflight.new_experts(ups, downs, *self._activation)
        delete_with(self, torch.ops.inflight.delete_experts, number)
        return number

    @property
    def run_in_kernel(self) -> bool:
        """Whether our kernel supports them."""
        return self.number is not None

    def run(self, module: Any, hidden_states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Tokens `[T, hidden]`, in the model's dtype, and their expert ids `[T, K]` int64; returns `[T * K, hidden]` in
        the tokens' dtype, with zeros for invalid experts."""
        outputs: torch.Tensor
        self.num_chosen = chosen.shape[1]
        if self.number is None:
            return self._run_one_by_one(module, hidden_states, chosen)
        if self._activation[0] != "none":
            outputs = torch.ops.inflight.experts.default(hidden_states, chosen, self.number)
            return outputs
        up, down = self.up[0].out_features, self.down[0].out_features
        projected = torch.ops.inflight.experts_up.default(hidden_states, chosen, self.number, up)
        inner = _between(module, projected)
        outputs = torch.ops.inflight.experts_down.default(inner, chosen, self.number, down)
        if module.has_post_expert_norm:
            outputs = module.post_expert_norm(outputs)
        return outputs

    def _run_one_by_one(self, module: Any, hidden_states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The same as `run`, for oneDNN's layers: `[T, hidden]` and `[T, K]` to `[T * K, hidden]`."""
        outputs = hidden_states.new_zeros(chosen.numel(), hidden_states.shape[-1])
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=module.num_experts)[: module.num_experts].tolist()
        first = 0
        for expert, count in enumerate(counts):
            if count:
                places = order[first : first + count]
                outputs[places] = self._run_one(module, expert, hidden_states[places // chosen.shape[1]])
                first += count
        return outputs

    def _run_one(self, module: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """One expert on rows `[n, hidden]`; returns `[n, hidden]` of their dtype."""
        num_rows = len(rows)
        if num_rows < MIN_INVARIANT_ROWS:
            rows = rows.expand(MIN_INVARIANT_ROWS, -1)
        projected = self.down[expert](_between(module, self.up[expert](rows)))
        if module.has_post_expert_norm:
            projected = module.post_expert_norm(projected)
        outputs: torch.Tensor = projected[:num_rows]
        return outputs


def _between(module: Any, projected: torch.Tensor) -> torch.Tensor:
    """The function between an expert's projections, `[n, …]` to `[n, …]`: a gate, or an activation alone."""
    inner: torch.Tensor = module._apply_gate(projected) if module.has_gate else module.act_fn(projected)
    return inner


def _prepack_each(
    module: Any, name: str, weight_format: WeightFormat, release: ReleaseWeight | None
) -> list[PrepackedLinear]:
    """Make a layer for each expert, removing the module's parameter."""
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    linears = [
        weight_format.prepack_linear(weight.T if module.is_transposed else weight, bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    delattr(module, name)
    if release:
        release(weights)
    return linears


def _run_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Tokens `[T, hidden]`, and each one's experts `[T, K]` int64 and their weights `[T, K]`, float; returns
    `[T, hidden]` in the tokens' dtype."""
    experts: PrepackedExperts = module.inflight_experts
    outputs = experts.run(module, hidden_states, top_k_index)
    weighted: torch.Tensor
    if experts.run_in_kernel:
        weighted = torch.ops.inflight.weighted_sum.default(outputs, top_k_weights)
        return weighted
    weighted = outputs.view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


ExpertsInterface.register("inflight", _run_experts)


def prepack_experts(
    model: PreTrainedModel, weight_format: WeightFormat = PLAIN, release: ReleaseWeight | None = None
) -> None:
    """Prepack the experts of `model`, which is ours alone.

    Args:
        weight_format: of the experts; those run by the model's own code stay plain.
        release: called with each parameter `[experts, …]` once prepacked.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(module, "_apply_gate") and hasattr(module, "has_gate") and isinstance(config, PreTrainedConfig):
            module.inflight_experts = PrepackedExperts(module, weight_format, release)
            config._experts_implementation_internal = "inflight"
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3 and _has_experts(module, len(parameter)):
                module._parameters[name] = CaughtMatrices.from_weights(parameter)


def prepack_routers(model: PreTrainedModel) -> None:
    """Prepack the routers of `model`, if it has experts: every matrix left by `prepack_experts` and `prepack_linears`,
    in no layer or in one that is never called. Their probabilities are computed by our kernels, too. Also prepack
    Mamba's projections of time steps, in layers that it never calls."""
    for module in model.modules():
        if hasattr(module, "A_log") and type(layer := getattr(module, "dt_proj", None)) is nn.Linear:
            layer._parameters["weight"] = LeftMatrix.from_weight(layer.weight)
    if not any(
        hasattr(module, "inflight_experts")
        or any(isinstance(each, CaughtMatrices) for each in module.parameters(False))
        for module in model.modules()
    ):
        return
    for module in model.modules():
        weight = module._parameters.get("weight")
        is_router = weight is not None and weight.dim() == 2 and not isinstance(weight, LeftMatrix)
        if is_router and not isinstance(module, nn.Embedding):
            module._parameters["weight"] = CaughtMatrix.from_weight(weight)
            if kernels_available():
                module.forward = OwnForward(_run_batch_invariant, module.forward)


def _has_experts(module: nn.Module, number: int) -> bool:
    """Whether a module has `number` experts."""
    return any("expert" in name and value == number for name, value in vars(module).items())


def routers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Those of a prepacked model."""
    return [each for each in model.modules() if isinstance(each._parameters.get("weight"), CaughtMatrix)]


def has_own_experts(model: PreTrainedModel) -> bool:
    """Whether a prepacked model runs experts by its own code."""
    return any(isinstance(each, CaughtMatrices) for each in model.parameters())


def _run_batch_invariant(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a router's `forward`: torch would compute the last few elements of a tensor by another routine."""
    with BatchInvariantElementwise():
        return forward(*args, **kwargs)

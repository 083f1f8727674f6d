"""Prepacks the linear layers of a model's encoders in bfloat16: torch's own run in loops on CPUs without instructions
for it, and are slower where there is a matrix unit. In float32 torch's are as fast."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, bfloat16, channels_last, finfo, nn, ops
from torch.nn.functional import linear
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from inflight.execution.hf.model_class import encoders
from inflight.execution.multimodal.encoder import rows_of
from inflight.execution.weights.linear_calls import LinearCalls, OwnForward, is_linear, is_watched, watch_linears
from inflight.execution.weights.linears import prepack_linears, replace_module
from inflight.execution.weights.prepacked_linear import can_prepack


def prepack_encoder(
    model: PreTrainedModel, encode: Callable[[], ModelOutput]
) -> tuple[ModelOutput, LinearCalls | None]:
    """Encode an item, prepack the linear layers that this calls, and encode it again.

    Returns:
        The output, and the calls; None: nothing is prepacked, because it would change the output.
    """
    with watch_linears(model) as calls:
        plain = encode()
    if not calls.patterns or not can_prepack(model):
        return plain, None
    modules = dict(model.named_modules(remove_duplicate=False))
    kept = {name: each for name, each in modules.items() if is_linear(each) or name in calls.activations.values()}
    parameters = {name: dict(each._parameters) for name, each in kept.items()}
    prepack_linears(model, calls)
    output = encode()
    if all(map(are_alike, rows_of(plain).values(), rows_of(output).values())):
        return output, calls
    for name, module in kept.items():
        module._parameters.update(parameters[name])
        replace_module(model, name, module)
    return plain, None


def is_faster_prepacked(model: PreTrainedModel) -> bool:
    """Whether our layers are faster than torch's."""
    return bool(model.dtype == bfloat16)


def prepare_encoders(model: PreTrainedModel) -> None:
    """Speed up the encoders of a model that is exclusively ours.

    Patches that a convolution makes of an image lie one after the other, as the layers behind it read them: else all of
    these would compute on a transposed tensor. Convolutions, and linear layers until they are prepacked, compute in
    float32 where torch runs them in loops: over the patches of an image one took longer than all layers behind it.
    """
    if model.device.type != "cpu":
        return
    in_loops = model.dtype == bfloat16 and not ops.mkldnn._is_mkldnn_bf16_supported()
    for module in (module for encoder in encoders(model) for module in encoder.modules()):
        if is_watched(module):
            continue
        if in_loops and (isinstance(module, _ConvNd) or type(module) is nn.Linear):
            module.forward = OwnForward(_in_float32, module)  # type: ignore[method-assign]
        if type(module) is nn.Conv2d and module.stride == module.kernel_size:
            module.forward = OwnForward(_one_by_one, module.forward)  # type: ignore[method-assign]


def _one_by_one(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x).contiguous(memory_format=channels_last)


def _in_float32(module: Any, x: Tensor) -> Tensor:
    compute = module._conv_forward if isinstance(module, _ConvNd) else linear
    bias = None if module.bias is None else module.bias.float()
    result: Tensor = compute(x.float(), module.weight.float(), bias)
    return result.to(x.dtype)


def are_alike(rows: Tensor, others: Tensor) -> bool:
    """Whether rows differ by no more than rounding."""
    tolerance = others.abs().max() * finfo(others.dtype).eps ** 0.5
    return rows.shape == others.shape and bool((rows - others).abs().max() <= tolerance)

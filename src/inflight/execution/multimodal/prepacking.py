"""Prepacks the linear layers of a model's encoders in bfloat16: torch's own run in loops on CPUs without instructions
for it, and are slower where there is a matrix unit. In float32 torch's are as fast."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, bfloat16, channels_last, channels_last_3d, contiguous_format, finfo, float32, nn, ops
from torch.nn.functional import linear
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from inflight.execution.hf.model_class import encoders
from inflight.execution.multimodal.encoder import rows_of
from inflight.execution.weights.linear_calls import LinearCalls, OwnForward, is_linear, is_watched, watch_linears
from inflight.execution.weights.linears import prepack_linears, replace_module
from inflight.execution.weights.prepacked_linear import can_prepack

ONE_BY_ONE = {4: channels_last, 5: channels_last_3d}
"""By the dimensions of a batch of images, or of videos."""


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

    What a convolution makes of patches side by side lies one after the other, as the layers behind it read it: else all
    of these would compute on a transposed tensor. It runs as a linear layer: as Qwen's towers call it, torch takes 140
    ms for an image, and 1.4 so. (In float32 it does not: its rounding is the plain model's.) Other convolutions, and
    linear layers until they are prepacked, compute in float32 where torch runs them in loops.
    """
    if model.device.type != "cpu":
        return
    in_loops = model.dtype == bfloat16 and not ops.mkldnn._is_mkldnn_bf16_supported()
    for module in (module for encoder in encoders(model) for module in encoder.modules()):
        if is_watched(module):
            continue
        if in_loops and (isinstance(module, _ConvNd) or type(module) is nn.Linear):
            module.forward = OwnForward(_in_float32, module)  # type: ignore[method-assign]
        if type(module) in (nn.Conv2d, nn.Conv3d) and _is_over_patches(module):
            module.forward = OwnForward(_over_patches, module, in_loops)


def _is_over_patches(module: Any) -> bool:
    ones, zeros = [(number,) * len(module.kernel_size) for number in (1, 0)]
    whole = module.stride == module.kernel_size and (module.dilation, module.groups) == (ones, 1)
    return bool(whole and module.padding in (zeros, "valid"))


def _over_patches(module: Any, in_float32: bool, x: Tensor) -> Tensor:
    """The output `[batch, out, *numbers of patches]` of a convolution for `[batch, in, *sizes]`."""
    if x.dtype == float32 or x.dim() != module.weight.dim():
        result = module._conv_forward(x, module.weight, module.bias)
        return cast(Tensor, result.contiguous(memory_format=ONE_BY_ONE.get(result.dim(), contiguous_format)))
    numbers = [size // own for size, own in zip(x.shape[2:], module.kernel_size, strict=True)]
    split = [part for pair in zip(numbers, module.kernel_size, strict=True) for part in pair]
    for dim, (number, own) in enumerate(zip(numbers, module.kernel_size, strict=True), start=2):
        x = x.narrow(dim, 0, number * own)
    places = range(2, 2 + len(split), 2)
    patches = x.reshape(*x.shape[:2], *split).permute(0, *places, 1, *(each + 1 for each in places))
    given = (patches.flatten(0, len(numbers)).flatten(1), module.weight.flatten(1), module.bias)
    result = linear(*(each.float() if in_float32 and each is not None else each for each in given)).to(x.dtype)
    return result.view(len(x), *numbers, -1).movedim(-1, 1)


def _in_float32(module: Any, x: Tensor) -> Tensor:
    compute = module._conv_forward if isinstance(module, _ConvNd) else linear
    bias = None if module.bias is None else module.bias.float()
    result: Tensor = compute(x.float(), module.weight.float(), bias)
    return result.to(x.dtype)


def are_alike(rows: Tensor, others: Tensor) -> bool:
    """Whether rows differ by no more than rounding."""
    tolerance = others.abs().max() * finfo(others.dtype).eps ** 0.5
    return rows.shape == others.shape and bool((rows - others).abs().max() <= tolerance)

"""Quantised checkpoints of tiny models, packed as their methods publish it, and what their weights stand for."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.bitnet import pack_weights

Quantised: TypeAlias = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors that hold a weight, by what follows the name of its layer; and its values `[out, in]` float32."""
Quantise: TypeAlias = Callable[[torch.Tensor], Quantised]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight outputs AutoAWQ puts into the next four bits."""
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def write(folder: Path, model: PreTrainedModel, quantise: Quantise, settings: Mapping[str, Any]) -> Path:
    """Write `model` with the matrices of its layers and experts quantised; returns the folder of the same model with
    the values that they stand for."""
    quantised, plain = folder / "quantised", folder / "plain"
    for each in (quantised, plain):
        model.save_pretrained(each)
    weights = load_file(plain / "model.safetensors")
    packed, values = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.endswith("proj.weight"):
            parts, values[name] = quantise(weight.float())
            del packed[name]
            packed |= {name.removesuffix(".weight") + ending: part for ending, part in parts.items()}
    for each, tensors in ((quantised, packed), (plain, values)):
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, each / "model.safetensors", metadata={"format": "pt"})
    configure(quantised, settings)
    return plain


def configure(folder: Path, settings: Mapping[str, Any]) -> None:
    """Let a checkpoint say that it is quantised in this way."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def rounded(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, *, has_zeros: bool, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers `[out, in]`, scales and zero points `[out, groups]`, and values, of inputs in these groups `[in]`."""
    largest = 2**bits - 1
    numbers, values = torch.empty_like(weight, dtype=torch.int32), torch.empty_like(weight)
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        own = weight[:, groups == group]
        if has_zeros:
            scale = (own.amax(1) - own.amin(1)).div(largest).to(dtype)
            zero = (-own.amin(1) / scale.float()).round().clamp(0, largest)
        else:
            scale = own.abs().amax(1).div(largest // 2).to(dtype)
            zero = torch.full_like(own[:, 0], 2 ** (bits - 1))
        number = (own / scale.float()[:, None] + zero[:, None]).round().clamp(0, largest)
        numbers[:, groups == group] = number.int()
        values[:, groups == group] = (number - zero[:, None]) * scale.float()[:, None]
        scales.append(scale)
        zeros.append(zero.int())
    return numbers, torch.stack(scales, 1), torch.stack(zeros, 1), values


def neighbours(weight: torch.Tensor, group: int) -> torch.Tensor:
    """The group of each input, -1 for one that all are in."""
    return torch.arange(weight.shape[1]) // (weight.shape[1] if group == -1 else group)


def _words(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """`[n, m]` packed along the first dimension: `[n * bits / 32, m]` int32."""
    stream = (numbers.astype(np.uint64)[:, None] >> np.arange(bits, dtype=np.uint64)[:, None] & np.uint64(1)).reshape(
        -1, 32, numbers.shape[1]
    )
    words = (stream << np.arange(32, dtype=np.uint64)[:, None]).sum(axis=1).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def gptq(bits: int, group: int, *, has_zeros: bool = False, in_order: bool = True, version: int = 1) -> Quantise:
    """As AutoGPTQ packs it (version 1, whose zero points are stored less one) or GPTQModel (version 2)."""

    def quantise(weight: torch.Tensor) -> Quantised:
        groups = neighbours(weight, group)
        if not in_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        numbers, scales, zeros, values = rounded(weight, bits, groups, has_zeros=has_zeros)
        stored = zeros - 1 & 2**bits - 1 if version == 1 else zeros
        parts = {
            ".qweight": _words(numbers.T.numpy(), bits),
            ".qzeros": _words(stored.numpy(), bits).T,
            ".scales": scales.T,
            ".g_idx": groups.int(),
        }
        return parts, values

    return quantise


def awq(group: int) -> Quantise:
    """As AutoAWQ packs it for its "GEMM"."""

    def pack(numbers: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int32)
        for column in range(packed.shape[1]):
            for place, output in enumerate(AWQ_ORDER):
                packed[:, column] |= numbers[:, column * 8 + output] << (place * 4)
        return packed

    def quantise(weight: torch.Tensor) -> Quantised:
        numbers, scales, zeros, values = rounded(weight, 4, neighbours(weight, group), has_zeros=True)
        return {".qweight": pack(numbers.T), ".qzeros": pack(zeros.T), ".scales": scales.T}, values

    return quantise


def compressed(bits: int, group: int, *, has_zeros: bool = False, in_order: bool = True) -> Quantise:
    """As llm-compressor packs it, with the package's own function."""

    def quantise(weight: torch.Tensor) -> Quantised:
        groups = neighbours(weight, group)
        if not in_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        numbers, scales, zeros, values = rounded(weight, bits, groups, has_zeros=has_zeros, dtype=torch.bfloat16)
        signed = (numbers - 2 ** (bits - 1)).to(torch.int8)
        parts = {
            ".weight_packed": pack_to_int32(signed, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            parts[".weight_zero_point"] = pack_to_int32((zeros - 2 ** (bits - 1)).to(torch.int8), bits, packed_dim=0)
        if not in_order:
            parts[".weight_g_idx"] = groups.int()
        return parts, values

    return quantise


def int8(weight: torch.Tensor) -> Quantised:
    """W8A8 of compressed-tensors."""
    numbers, scales, _, values = rounded(weight, 8, neighbours(weight, -1), has_zeros=False, dtype=torch.bfloat16)
    return {".weight": (numbers - 128).to(torch.int8), ".weight_scale": scales}, values


def floats(block: tuple[int, int] | None, ending: str = ".weight_scale_inv") -> Quantise:
    """Floats of eight bits with a scale for each block, or (None) for each output; (0, 0) is one for all."""

    def quantise(weight: torch.Tensor) -> Quantised:
        rows, columns = weight.shape
        height, width = (1, columns) if block is None else weight.shape if block == (0, 0) else block
        spread, scales = torch.empty_like(weight), torch.empty(-(-rows // height), -(-columns // width))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                own = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                spread[own] = scales[i, j] = weight[own].abs().max() / 448
        numbers = (weight / spread).to(torch.float8_e4m3fn)
        return {".weight": numbers, ending: scales if block != (0, 0) else scales[0, 0]}, numbers.float() * spread

    return quantise


def bitnet(weight: torch.Tensor) -> Quantised:
    """BitNet b1.58, with the function of `transformers`."""
    scale = weight.abs().mean().to(torch.bfloat16).reshape(1)
    numbers = (weight / scale.float()).round().clamp(-1, 1)
    return {".weight": pack_weights(numbers.to(torch.int8)), ".weight_scale": scale}, numbers * scale.float()


def mxfp4(weights: torch.Tensor) -> Quantised:
    """Experts `[experts, in, out]` as gpt-oss stores them; their values are `[experts, in, out]`."""
    matrices = weights.mT.unflatten(-1, (-1, 32))
    exponents = (matrices.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    scaled = matrices / torch.exp2(exponents)[..., None]
    numbers = (scaled[..., None] - torch.tensor(E2M1)).abs().argmin(-1).to(torch.uint8)
    values = torch.tensor(E2M1)[numbers.int()] * torch.exp2(exponents)[..., None]
    packed = numbers[..., 0::2] | numbers[..., 1::2] << 4
    return {"_blocks": packed, "_scales": (exponents + 127).to(torch.uint8)}, values.flatten(-2).mT

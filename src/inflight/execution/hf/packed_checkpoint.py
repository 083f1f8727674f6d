"""Our own checkpoint format: grouped weights are stored in the kernels' layout, so loading maps the file without a
copy.

It is an ordinary folder with one safetensors file. A grouped weight is a uint8 tensor of panels under the parameter's
name; the file's metadata describe the layout.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.weight import GroupedLayout, GroupedWeight, PackedMatrix
from inflight.execution.kernels import kernels_available

METHOD = "inflight"
"""The name of this quantization in `config.json`,"""
VERSION = 1
"""and the layout of panels, which may change between versions of the kernels."""
ORDER = ".order"
"""Suffix for the name of a weight's input order."""
ALIGNMENT = 64
"""Bytes: a cache line."""
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
"""Their names in safetensors."""


def write_packed_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Write weights, configuration and generation defaults of `model`, which has grouped weights. Tensors are in module
    order, so that weights used together are neighbours."""
    tensors: dict[str, torch.Tensor] = {}
    layouts: dict[str, dict[str, Any]] = {}
    for name, tensor in _tensors(model):
        if not isinstance(tensor, GroupedWeight):
            tensors[name] = tensor.contiguous()
            continue
        panels = [each.panels for each in tensor.matrices]
        tensors[name] = torch.stack(panels) if tensor.dim() == 3 else panels[0]
        layouts[name] = {
            "kind": tensor.kind,
            "layout": asdict(tensor.grouping),
            "shape": [*tensor.shape[:-2], *tensor.matrix_shape],
            "is_transposed": tensor.is_transposed,
        }
        orders = [each.order for each in tensor.matrices if each.order is not None]
        if orders:
            tensors[name + ORDER] = torch.stack(orders)
    config = model.config.to_dict() | {"quantization_config": {"quant_method": METHOD, "version": VERSION}}
    folder.mkdir(parents=True, exist_ok=True)
    _write_safetensors(folder / "model.safetensors", tensors, {"format": "pt", METHOD: json.dumps(layouts)})
    (folder / "generation_config.json").write_text(model.generation_config.to_json_string() + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors `[…]` of a checkpoint by name, each once."""
    kept = model.state_dict().keys()
    yield from ((name, parameter.data) for name, parameter in model.named_parameters())
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors `[…]`, of dtypes in `DTYPES`, in this order, the first at a multiple of `ALIGNMENT`. (The
    `safetensors` package sorts them.)"""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def read_packed_weights(
    paths: Iterable[Path], settings: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters `[…]` of such a checkpoint by name, memory-mapped; grouped ones have the nominal `dtype`, others
    the stored one.

    Args:
        settings: `quantization_config` of its `config.json`.

    Raises `ModelError` if they cannot be read here.
    """
    if settings.get("version") != VERSION:
        raise ModelError("it was quantised by another version of inflight: quantise it again")
    if not kernels_available():
        raise ModelError("weights quantised by inflight need its kernels, and so a C++ compiler")
    tensors: dict[str, torch.Tensor] = {}
    layouts: dict[str, Any] = {}
    for path in paths:
        metadata, its_tensors = _mapped(path)
        layouts |= json.loads(metadata.get(METHOD, "{}"))
        tensors |= its_tensors
    for name, tensor in tensors.items():
        if name in layouts:
            try:
                yield name, _weight(tensor, tensors.get(name + ORDER), layouts[name], dtype)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise ModelError(f"the weight {name!r} cannot be read: {str(error).splitlines()[0]}") from error
        elif name.removesuffix(ORDER) not in layouts:
            yield name, tensor


def _mapped(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The metadata and tensors `[…]` of a safetensors file, in a single mapping. (The package maps each tensor
    separately.) Raises `ModelError` if the file is damaged."""
    try:
        safe_open(path, framework="pt")  # checks everything
    except SafetensorError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error}") from error
    with path.open("rb") as file:
        first = 8 + (length := int.from_bytes(file.read(8), "little"))
        header = json.loads(file.read(length))
    content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    metadata, dtypes = header.pop("__metadata__", {}), {name: dtype for dtype, name in DTYPES.items()}
    tensors = {}
    for name, described in header.items():
        begin, end = described["data_offsets"]
        part = content[first + begin : first + end].view(dtypes[described["dtype"]])
        tensors[name] = part.view(described["shape"])
    return metadata, tensors


def _weight(
    panels: torch.Tensor, order: torch.Tensor | None, described: Mapping[str, Any], dtype: torch.dtype
) -> GroupedWeight:
    """The weight of these tensors. Raises `KeyError`, `TypeError`, `ValueError` or `RuntimeError` if they do not fit.

    Args:
        panels: `[out / 32, bytes]` or `[experts, out / 32, bytes]` uint8.
        order: `[1, in]` or `[experts, in]` int64, see `Groups`.
        described: kind, layout, shape and transposition, from the metadata.
    """
    shape = described["shape"]
    matrices = list(panels) if len(shape) == 3 else [panels]
    orders = [None] * len(matrices) if order is None else list(order)
    packed = [PackedMatrix(*each) for each in zip(matrices, orders, strict=True)]
    weight = GroupedWeight(
        str(described["kind"]), GroupedLayout(**described["layout"]), packed, shape, dtype, described["is_transposed"]
    )
    for each in packed:  # refuses panels of another size
        weight.like(matrices=[each], shape=weight.matrix_shape).stored_rows.rows(torch.zeros(1, dtype=torch.int64))
    return weight

"""`quantize`: writes a quantized checkpoint that loads without conversion."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.rounding import Rounding
from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.hf.load import load_model
from inflight.execution.hf.packed_checkpoint import write_packed_checkpoint
from inflight.execution.hf.source import check_source
from inflight.execution.kernels import kernels_available
from inflight.execution.mapped_memory import release_file_pages
from inflight.execution.weights.rounded_model import round_weights
from inflight.text.tokenizer_files import load_tokenizer

FORMATS = ("int4", "int8")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The result for one weight.

    Attributes:
        before, after: a dtype, or the name of a format's type.
        bytes_before, bytes_after: its size.
    """

    name: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int


def quantize(
    model: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    format: str = "int4",
    *,
    group_size: int = 32,
    minima: bool = False,
    revision: str | None = None,
    use_tqdm: bool = True,
) -> list[QuantizedWeight]:
    """Write `model` with its linear layers and experts in 4 or 8 bits. Already quantized weights are kept.

    Args:
        model: a hub id, a folder, or a GGUF file.
        folder: where the checkpoint goes; it must not exist, or be empty.
        format: "int4", or "int8" (a scale for each output channel).
        group_size: of int4: weights that share a scale: 32, 64 or 128.
        minima: of int4: whether these weights share a minimum, too.
        revision: branch, tag or commit of a hub repository.
        use_tqdm: whether to show a progress bar.

    Returns the result for each weight, in the order of the model.

    Raises:
        ModelError: the model cannot be loaded, its class is not one of `transformers`, or the folder is not empty.
        ValueError: an option is unknown or out of range.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; it may be {' or '.join(map(repr, FORMATS))}")
    config = EngineConfig(
        device="cpu",
        revision=revision,
        quantization=format,
        quantization_group_size=group_size,
        quantization_minima=minima,
    )
    out = Path(folder).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{str(out)!r} exists already; give another folder")
    if not kernels_available():
        raise ModelError("to quantise, inflight needs its kernels, and so a C++ compiler")
    source = os.path.expanduser(os.fspath(model))
    check_source(source, config)
    tokenizer = load_tokenizer(source, None, config)
    loaded = load_model(source, config, in_own_dtype=True)
    rounding = Rounding(8) if format == "int8" else Rounding(4, group_size, minima)
    rounded: dict[str, QuantizedWeight] = {}
    num_weights = sum(parameter.numel() for parameter in loaded.parameters())
    with tqdm(total=num_weights, unit=" weights", unit_scale=True, desc="Rounding", disable=not use_tqdm) as bar:

        def told(name: str, before: torch.Tensor, after: GroupedWeight) -> None:
            rounded[name] = QuantizedWeight(name, _name(before.dtype), after.kind, before.nbytes, after.num_bytes)
            bar.update(before.numel())

        round_weights(loaded, rounding, loaded.dtype, release_file_pages, told)
        bar.update(num_weights - bar.n)
    write_packed_checkpoint(loaded, out)
    if tokenizer is not None:
        tokenizer.inner.save_pretrained(out)
    return [rounded.get(name) or _kept(name, parameter.data) for name, parameter in loaded.named_parameters()]


def _kept(name: str, weight: torch.Tensor) -> QuantizedWeight:
    """What became of a weight `[…]` that was not rounded; sizes in bytes."""
    if isinstance(weight, GroupedWeight):
        return QuantizedWeight(name, weight.kind, weight.kind, weight.num_bytes, weight.num_bytes)
    return QuantizedWeight(name, _name(weight.dtype), _name(weight.dtype), weight.nbytes, weight.nbytes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

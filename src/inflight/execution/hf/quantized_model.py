"""Loads a quantized checkpoint as a `transformers` model whose large weights keep the files' quantization."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.checkpoints import QuantizationMethod, find_method
from inflight.execution.grouped.weight import GroupedWeight, Groups
from inflight.execution.hf.model_class import auto_class_of
from inflight.execution.hf.packed_checkpoint import METHOD, read_packed_weights
from inflight.execution.hf.state import model_of_state
from inflight.execution.kernels import kernels_available

FILE = "model.safetensors"


def load_quantized_model(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, revision: str | None
) -> PreTrainedModel | None:
    """The model of a folder or a hub repository, on the CPU, with its large weights as `GroupedWeight`s; its
    `inflight_notes` list converted weights. None if it is not quantized, or by a method left to `transformers`, as are
    all other methods on other devices.

    Raises `ModelError` if the checkpoint does not have all weights, or some of them cannot be read."""
    settings = getattr(config, "quantization_config", None)
    if settings is None or type(config) not in auto_class_of(config)._model_mapping:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    is_ours = settings.get("quant_method") == METHOD
    method = None if is_ours or device.type != "cpu" else find_method(settings)
    if method is None and not is_ours:
        return None
    paths = _paths(name, revision)
    if method is None:
        state, notes = dict(read_packed_weights(paths, settings, dtype)), []
    else:
        reader = _Reader(_tensors(paths), method, dtype)
        state, notes = dict(reader.weights()), reader.notes()
    plain = copy.deepcopy(config)
    del plain.quantization_config
    model = model_of_state(plain, state, dtype, f"the checkpoint {name!r}", _generation_config(name, revision))
    model.inflight_notes = (*notes, *model.inflight_notes)
    return model


class _Reader:
    """Reads the weights of a checkpoint.

    Args:
        files: for each tensor, the open file that it is in.
    """

    def __init__(self, files: Mapping[str, Any], method: QuantizationMethod, dtype: torch.dtype) -> None:
        self._files, self._method, self._dtype = files, method, dtype
        self._expanded: Counter[str] = Counter()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters `[…]`, by the checkpoint's names for them: grouped, expanded to `dtype`, or as stored. Raises
        `ModelError` if one cannot be read."""
        method = self._method
        parameters: dict[str, dict[str, torch.Tensor]] = {}
        for name, file in self._files.items():
            ending = next((each for each in method.endings if name.endswith(each)), None)
            if ending is None:
                yield name, file.get_tensor(name)
            else:
                parameter = name[: len(name) - len(ending)] + method.parameter
                parameters.setdefault(parameter, {})[ending] = file.get_tensor(name)
        for name, parts in parameters.items():
            if method.is_quantised(parts.keys()):
                yield name, self._weight(name, parts)
                continue
            for ending, tensor in parts.items():
                if not ending and tensor.is_floating_point() and tensor.itemsize == 1:
                    raise ModelError(f"the weight {name!r} is in {tensor.dtype}, and lacks its scale")
                yield name.removesuffix(method.parameter) + ending, tensor

    def notes(self) -> list[str]:
        """Notes on converted weights."""
        return [
            f"{number} weights in {kind} are expanded to {self._dtype}, because no kernel reads them"
            for kind, number in self._expanded.items()
        ]

    def _weight(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One weight `[out, in]`, or those of all experts, `[experts, out, in]`, grouped or expanded; transposed where
        the model has inputs first. Raises `ModelError` if it cannot be read.

        Args:
            parts: see `QuantizationMethod`.
        """
        method, is_stacked = self._method, self._method.is_stacked(parts)
        try:
            matrices = [method.read(each) for each in (_of_each_expert(parts) if is_stacked else [parts])]
            if any(isinstance(each, Groups) and not each.is_finite for each in matrices):
                raise ValueError("it has scales that are not finite")
        except KeyError as error:
            raise ModelError(f"the weight {name!r} cannot be read: it lacks {error.args[0]}") from error
        except (ValueError, IndexError, RuntimeError, StopIteration) as error:
            raise ModelError(f"the weight {name!r} cannot be read: {error}") from error
        kept = [each for each in matrices if isinstance(each, Groups) and each.layout == _layout(matrices[0])]
        if len(kept) == len(matrices) and kernels_available():
            weight: torch.Tensor = GroupedWeight.from_groups(method.kind, kept, self._dtype, is_stacked=is_stacked)
        else:
            self._expanded[method.kind] += 1
            values = [(each.values() if isinstance(each, Groups) else each).to(self._dtype) for each in matrices]
            weight = torch.stack(values) if is_stacked else values[0]
        return weight.mT if method.has_inputs_first else weight


def _of_each_expert(parts: Mapping[str, torch.Tensor]) -> Iterator[Mapping[str, torch.Tensor]]:
    """Parts `[experts, …]` as the parts `[…]` of each expert."""
    for tensors in zip(*(each.unbind() for each in parts.values()), strict=True):
        yield dict(zip(parts, tensors, strict=True))


def _layout(matrix: Groups | torch.Tensor) -> Any:
    """The layout of a matrix `[out, in]`; None if it is not grouped."""
    return matrix.layout if isinstance(matrix, Groups) else None


def _tensors(paths: Sequence[Path]) -> dict[str, Any]:
    """For each tensor of some files, the open file that it is in. Raises `ModelError` if one is not intact."""
    tensors = {}
    for path in paths:
        try:
            file: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ModelError(f"{str(path)!r} cannot be read: {error}") from error
        tensors.update(dict.fromkeys(file.keys(), file))
    return tensors


def _paths(name: str, revision: str | None) -> list[Path]:
    """The files of a checkpoint, downloaded if need be. Raises `ModelError` if there are none."""
    index = cached_file(name, f"{FILE}.index.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        shards: list[str] = get_checkpoint_shard_files(name, index, revision=revision)[0]
        return [Path(shard) for shard in shards]
    file = cached_file(name, FILE, revision=revision, _raise_exceptions_for_missing_entries=False)
    if file is None:
        raise ModelError(f"{name!r} has no {FILE}: quantised weights are read out of safetensors only")
    return [Path(file)]


def _generation_config(name: str, revision: str | None) -> GenerationConfig:
    """A checkpoint's own quantization settings, or those of its `config.json`, as `transformers` finds them."""
    try:
        return GenerationConfig.from_pretrained(name, revision=revision)
    except OSError:
        return GenerationConfig.from_pretrained(
            name, config_file_name="config.json", revision=revision, _from_model_config=True
        )

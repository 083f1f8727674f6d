"""How tensors of a GGUF file become a model's parameters, by the two kinds of mappings that `transformers` has.

Both are given the values of float tensors, and for quantized ones the numbers of their rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf import GGUF_ARCHS
from transformers.integrations.gguf.gguf_conversion_mapping import PermuteInputFeatures
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

DROPPED = "mtp."
"""The prefix of the parameters of MTP layers, which these models do not have."""


class TensorMapping(Protocol):
    """Maps the tensors of one file."""

    def moved(self, name: str, given: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor under the model's names.

        Args:
            name: in the file.
            given: its values `[…]` float32 or float16, or its row numbers from 1, `[…, out, 1]` int64. Rows of other
                tensors are 0 in the result.
        """
        ...

    def permutation_of(self, name: str) -> torch.Tensor | None:
        """The order in which a weight, moved as row numbers, has the columns of its tensors, `[in]` int64; None: it is
        the same."""
        ...

    def is_ignored(self, name: str) -> bool:
        """Whether the model needs no such tensor."""
        ...


def find_mapping(architecture: str, config: PreTrainedConfig, model: PreTrainedModel) -> TensorMapping:
    """The mapping of an architecture, as llama.cpp calls it, to this model."""
    if architecture in GGUF_ARCHS:
        return Transforms(GGUF_ARCHS[architecture](config))
    return Processor(architecture, config, model)


class Transforms:
    """Renamings and converters of `transformers.integrations.gguf`.

    Args:
        transforms: of an architecture.
    """

    def __init__(self, transforms: list[Any]) -> None:
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._merged: dict[str, torch.Tensor] = {}  # of several tensors, in floats
        self._permutations: dict[str, torch.Tensor] = {}

    def moved(self, name: str, given: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TensorMapping`."""
        target, pattern = rename_source_key(name, self._renamings, self._converters)
        if target.startswith(DROPPED):
            return
        converter = next((each for each in self._converters if pattern in each.source_patterns), None)
        if converter is None:
            yield target, given
            return
        sources = converter.source_patterns
        tensors: dict[str, Any] = {each: [given if each == pattern else torch.zeros_like(given)] for each in sources}
        for operation in converter.operations:
            if isinstance(operation, PermuteInputFeatures) and given.dtype == torch.int64:
                if not bool((operation.permutation.diff() == 1).all()):
                    self._permutations[target] = operation.permutation
                continue
            tensors = operation.convert(tensors, source_patterns=sources, target_patterns=[target])
        (found,) = tensors.values()
        result: torch.Tensor = found[0] if isinstance(found, list) else found
        if len(sources) > 1 and given.dtype != torch.int64:
            result = self._merged[target] = result + self._merged.get(target, 0)
        yield target, result

    def permutation_of(self, name: str) -> torch.Tensor | None:
        """See `TensorMapping`."""
        return self._permutations.get(name)

    def is_ignored(self, name: str) -> bool:
        """See `TensorMapping`."""
        target, _ = rename_source_key(name, self._renamings, self._converters)
        return str(target).startswith(DROPPED)


class Processor:
    """The older kind: a class for each architecture, and names from the `gguf` package."""

    def __init__(self, architecture: str, config: PreTrainedConfig, model: PreTrainedModel) -> None:
        flat: dict[str, Any] = config.get_text_config().to_dict()
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=flat)
        self._names: dict[str, str] = get_gguf_hf_weights_map(_Names(model, has_parts=False), self._processor)
        if not model.state_dict().keys() <= set(self._names.values()):
            self._names = get_gguf_hf_weights_map(_Names(model), self._processor)
        self._merged: Mapping[str, torch.Tensor] = {}
        """Float parameters assembled from several tensors by `transformers`."""

    def moved(self, name: str, given: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TensorMapping`."""
        in_blocks = given.dtype == torch.int64
        parts = _Touched({} if in_blocks else self._merged)
        result = self._processor.process(
            weights=given.numpy(), name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": parts}
        )
        if not in_blocks:
            self._merged = parts
        yield from ((each, parts[each]) for each in list(parts.touched))
        if result.name in self._names:
            yield self._names[result.name], torch.from_numpy(np.ascontiguousarray(result.weights))

    def permutation_of(self, name: str) -> torch.Tensor | None:
        """See `TensorMapping`."""
        return None

    def is_ignored(self, name: str) -> bool:
        """See `TensorMapping`."""
        return False


class _Names:
    """A model as `get_gguf_hf_weights_map` sees it: its own names and those of its parts, without theirs. (It makes a
    table of 10 ms for every module that it sees.)"""

    def __init__(self, module: torch.nn.Module, *, has_parts: bool = True) -> None:
        self.config = getattr(module, "config", None)
        self.state_dict = module.state_dict
        self._parts = dict(module.named_children()) if has_parts else {}

    def named_children(self) -> list[tuple[str, "_Names"]]:
        """The model's parts."""
        return [(name, _Names(part, has_parts=False)) for name, part in self._parts.items()]


class _Touched(dict[str, torch.Tensor]):
    """Parameters `[…]` assembled by `transformers`, by name; records reads and writes."""

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        super().__init__(given)
        self.touched: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        """The parameter `[…]`, recorded as touched."""
        self.touched.add(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        """Set the parameter to `[…]`, and record it as touched."""
        self.touched.add(name)
        super().__setitem__(name, tensor)

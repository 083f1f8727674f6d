"""A GGUF file becomes a `transformers` model whose large weights stay as they are in the file.

Which architecture, which configuration, and which tensor goes where: that is `transformers`' mapping. It is made to move
whole tensors of floats; here it moves the numbers of their rows instead, and the rows follow.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from inflight.contracts.errors import ModelError
from inflight.execution.weights.gguf_blocks import BLOCK_TYPES
from inflight.execution.weights.grouped_linear import can_group
from inflight.execution.weights.grouped_weight import GroupedWeight, Groups
from inflight.gguf.header import BLOCKS, GgufHeader, TensorEntry

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_SIZES = {name: (elements, num_bytes) for name, elements, num_bytes in BLOCKS.values()}
ROPE_FACTORS = "rope_freqs.weight"
"""What the frequencies of rotary embedding are divided by (Llama 3.1 and later)."""


def load_gguf_model(header: GgufHeader, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model, with its large weights as `GroupedWeight`s; its `inflight_notes` say what is not as in the file. Raises
    `ModelError` if the file does not have all weights."""
    loader = _Loader(header, config, dtype)
    state = loader.state()
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    model, report = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for kind, problem in (("missing_keys", "lacks"), ("mismatched_keys", "has wrong shapes for")):
        if keys := sorted(map(str, report.get(kind) or ())):
            raise ModelError(
                f"{str(header.path)!r} {problem} some of the model's weights ({len(keys)}): {keys[0]} …"
            )
    loader.divide_frequencies(model)
    model.inflight_notes = tuple(loader.notes)
    return model


class _Loader:
    """Moves the tensors of one file to where the model has them."""

    def __init__(self, header: GgufHeader, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self._header = header
        self._dtype = dtype
        self._content = np.memmap(header.path, mode="r", dtype=np.uint8)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self._shapes = {name: tuple(each.shape) for name, each in self._model.state_dict().items()}
        self._processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=_flat(config))
        self._names: dict[str, str] = get_gguf_hf_weights_map(self._model, self._processor)
        self._widened: Counter[str] = Counter()
        self.notes: list[str] = []

    def state(self) -> dict[str, torch.Tensor]:
        """All parameters, by the model's names for them."""
        state: dict[str, torch.Tensor] = {}
        sources: dict[str, list[tuple[TensorEntry, torch.Tensor]]] = {}
        unknown = []
        for entry in self._header.tensors.values():
            moved = False
            for name, tensor in self._moved(entry):
                moved = True
                if tensor.dtype == torch.int64:
                    sources.setdefault(name, []).append((entry, tensor))
                else:
                    state[name] = tensor.to(self._dtype)
            if not moved and entry.name != ROPE_FACTORS:
                unknown.append(entry.name)
        for name, parts in sources.items():
            state[name] = self._gathered(name, parts)
        if unknown:
            self.notes.append(f"the model has no place for {len(unknown)} of the file's tensors: {unknown[0]} …")
        for kind, number in self._widened.items():
            self.notes.append(f"{number} weights in {kind} are expanded to {self._dtype}, because no kernel reads them")
        return state

    def divide_frequencies(self, model: PreTrainedModel) -> None:
        """Let the model's rotary embedding turn as the file says."""
        entry = self._header.tensors.get(ROPE_FACTORS)
        if entry is None:
            return
        factors = self._floats(entry).float()
        found = [(name, each) for name, each in model.named_buffers() if name.endswith("inv_freq")]
        if not found or any(each.shape != factors.shape for _, each in found):
            raise ModelError(f"{str(self._header.path)!r} has factors for frequencies that the model does not have")
        for _, buffer in found:
            buffer.div_(factors)

    def _moved(self, entry: TensorEntry) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor under the model's names: its values, or, of one in blocks, the numbers of its rows, int64, with a
        last dimension of 1."""
        in_blocks = entry.kind not in FLOATS
        if in_blocks:
            rows = entry.num_elements // entry.shape[-1]
            given = torch.arange(rows).view(*entry.shape[:-1], 1)
        else:
            given = self._floats(entry)
            if len(entry.shape) == 1 or given.dtype == torch.bfloat16:
                given = given.float()
        parsed: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        result = self._processor.process(
            weights=given.numpy(), name=entry.name, tensor_key_mapping=self._names, parsed_parameters=parsed
        )
        yield from parsed["tensors"].items()
        if result.name in self._names:
            yield self._names[result.name], torch.from_numpy(np.ascontiguousarray(result.weights))

    def _gathered(self, name: str, parts: list[tuple[TensorEntry, torch.Tensor]]) -> torch.Tensor:
        """The rows of one or several tensors in blocks, in the order of the numbers."""
        shape = self._shapes.get(name)
        if shape is None:
            raise ModelError(f"{str(self._header.path)!r} has a weight {name!r}, which the model does not have")
        return torch.cat([self._rows(entry, order) for entry, order in parts]) if len(parts) > 1 else self._rows(*parts[0])

    def _rows(self, entry: TensorEntry, order: torch.Tensor) -> torch.Tensor:
        elements, num_bytes = BLOCK_SIZES[entry.kind]
        is_transposed = order.shape[-1] != 1
        order = order.mT if is_transposed else order
        blocks = self._bytes(entry).view(-1, entry.shape[-1] // elements, num_bytes)
        matrices = []
        for rows in order.reshape(-1, *order.shape[-2:-1]) if order.dim() > 2 else [order.reshape(-1)]:
            first = int(rows[0])
            in_order = torch.equal(rows, torch.arange(first, first + len(rows)))
            matrices.append(blocks[first : first + len(rows)] if in_order else blocks[rows])
        if entry.kind in BLOCK_TYPES and can_group() and entry.shape[-1] % 32 == 0:
            groups = [checked(BLOCK_TYPES[entry.kind](each), entry.name) for each in matrices]
            weight: torch.Tensor = GroupedWeight.of(entry.kind, groups, self._dtype, is_stacked=order.dim() > 2)
        else:
            self._widened[entry.kind] += 1
            values = [_dequantised(each, entry).to(self._dtype) for each in matrices]
            weight = torch.stack(values) if order.dim() > 2 else values[0]
        return weight.mT if is_transposed else weight

    def _floats(self, entry: TensorEntry) -> torch.Tensor:
        return self._bytes(entry).clone().view(FLOATS[entry.kind]).view(entry.shape)

    def _bytes(self, entry: TensorEntry) -> torch.Tensor:
        part = self._content[entry.start : entry.start + entry.nbytes]
        return torch.from_numpy(part) if part.flags.writeable else _read_only(part)


def _read_only(part: np.ndarray) -> torch.Tensor:
    """A tensor over memory that must not be written to."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(part)


def _flat(config: PreTrainedConfig) -> dict[str, Any]:
    return config.get_text_config().to_dict()


def _dequantised(blocks: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """A weight `[out, in]` float32, by the `gguf` package. Raises `ModelError` if it does not know the type."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType[entry.kind]
        return torch.from_numpy(gguf.dequantize(blocks.flatten(1).numpy(), kind).copy())
    except (KeyError, NotImplementedError) as error:
        raise ModelError(f"the weight {entry.name!r} is in {entry.kind}, which cannot be read") from error


def checked(groups: Groups, name: str) -> Groups:
    """Refuse scales that are not finite."""
    for each in (groups.coarse, groups.coarse_minima):
        if each is not None and not each.isfinite().all():
            raise ModelError(f"the weight {name!r} has scales that are not finite: is the file intact?")
    return groups

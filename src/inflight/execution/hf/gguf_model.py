"""Loads a GGUF file as a `transformers` model whose large weights keep the file's quantization.

`transformers` maps architecture, configuration and tensors. Its mapping moves float tensors; here it moves row indices
instead, by which the quantized rows are then gathered.

Supported types of GGUF's quantized tensors, and their layouts in panels.

A row of a tensor is a row of blocks; a block has 32 or 256 neighbouring inputs (`kernels/gguf_blocks.cpp`).
"""

import mmap
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.grouped.checkpoints.floats import BIAS, MIDDLE, TWICE
from inflight.execution.grouped.weight import CHUNK, GroupedLayout, GroupedWeight, PackedMatrix
from inflight.execution.hf.gguf_lattice import LATTICES, lattice_groups
from inflight.execution.hf.gguf_mapping import find_mapping
from inflight.execution.hf.model_class import auto_class_of
from inflight.execution.hf.source import first_line
from inflight.execution.hf.state import model_of_state
from inflight.execution.kernels import kernels_available
from inflight.gguf.header import BLOCKS, GgufHeader, TensorEntry

LAYOUTS = {
    "Q4_0": GroupedLayout(4, 32, middle=8),
    "Q4_1": GroupedLayout(4, 32, has_minima=True),
    "Q5_0": GroupedLayout(5, 32, middle=16),
    "Q5_1": GroupedLayout(5, 32, has_minima=True),
    "Q8_0": GroupedLayout(8, 32, middle=128),
    "Q2_K": GroupedLayout(2, 256, fine=2, has_minima=True),
    "Q3_K": GroupedLayout(3, 256, fine=2, middle=4),
    "Q4_K": GroupedLayout(4, 256, fine=1, has_minima=True),
    "Q5_K": GroupedLayout(5, 256, fine=1, has_minima=True),
    "Q6_K": GroupedLayout(6, 256, fine=2, middle=32),
    "IQ4_NL": GroupedLayout(4, 32, middle=128, code="nonlinear"),
    "IQ4_XS": GroupedLayout(4, 256, fine=1, middle=128, code="nonlinear"),
    "MXFP4": GroupedLayout(4, 32, middle=MIDDLE, code="e2m1"),
    "TQ1_0": GroupedLayout(2, 256, middle=1),
    "TQ2_0": GroupedLayout(2, 256, middle=1),
}
HALF_POWERS = (-24, 15)
"""Exponents of the least and the greatest power of two that is a float16."""


def packed_blocks(kind: str, blocks: Sequence[torch.Tensor], rows: torch.Tensor) -> tuple[GroupedLayout, PackedMatrix]:
    """A matrix `[out, in]` in panels, with its layout.

    Args:
        kind: of `LAYOUTS` or `LATTICES`.
        blocks: `[n, in / block, bytes]` uint8 each.
        rows: `[tensors, out]` int64, the index of each row of the matrix in each tensor, from 1, or 0.

    Raises:
        RuntimeError: some scales are not finite.
    """
    if kind in LATTICES:
        chosen = torch.empty(rows.shape[1], *blocks[0].shape[1:], dtype=torch.uint8)
        for each, numbers in zip(blocks, rows, strict=True):
            chosen[numbers > 0] = each[numbers[numbers > 0] - 1]
        groups = lattice_groups(kind, chosen)
        return groups.layout, groups.packed()
    layout = LAYOUTS[kind]
    if kind == "MXFP4":
        lowest, highest = (HALF_POWERS[end] + BIAS + TWICE for end in (0, 1))
        exponents = [each[..., 0] for each in blocks]
        if any(bool(((each < lowest) | (each > highest)).any()) for each in exponents):
            layout = GroupedLayout(4, 32, middle=MIDDLE, has_wide_scales=True, code="e2m1")
    return layout, PackedMatrix(torch.ops.inflight.pack_blocks(kind, layout.words, blocks, rows))


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_SIZES = {name: (elements, num_bytes) for name, elements, num_bytes in BLOCKS.values()}
ROPE_FACTORS = "rope_freqs.weight"
"""The divisors of rotary frequencies (Llama 3.1 and later)."""


def load_gguf_model(header: GgufHeader, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model, with its large weights as `GroupedWeight`s; its `inflight_notes` list converted weights. Raises
    `ModelError` if weights are missing."""
    loader = _Loader(header, config, dtype)
    state = loader.state()
    model = model_of_state(config, state, dtype, repr(str(header.path)))
    loader.divide_frequencies(model)
    model.inflight_notes = (*loader.notes, *model.inflight_notes)
    return model


class _Loader:
    """Maps the tensors of one file to the model's parameters."""

    def __init__(self, header: GgufHeader, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self._header = header
        self._dtype = dtype
        paths = {entry.path for entry in header.tensors.values()}
        self._files: dict[Path, mmap.mmap] = {}
        self._contents: dict[Path, torch.Tensor] = {}
        for path in paths:
            with open(path, "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # nothing writes to this memory
                self._files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._contents[path] = torch.frombuffer(self._files[path], dtype=torch.uint8)
        with torch.device("meta"):
            self._model = auto_class_of(config).from_config(config, dtype=dtype)
        self._shapes = {name: tuple(each.shape) for name, each in self._model.state_dict().items()}
        self._mapping = find_mapping(header.architecture, config, self._model)
        self._widened: Counter[tuple[str, str]] = Counter()
        self.notes: list[str] = []

    def state(self) -> dict[str, torch.Tensor]:
        """All parameters `[…]`, by the model's names for them: grouped, float32, float16, or expanded to the model's
        dtype. Raises `ModelError` for a tensor that the model has no place for, or that cannot be read."""
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
                    state[name] = tensor
            if not moved and entry.name != ROPE_FACTORS and not self._mapping.is_ignored(entry.name):
                unknown.append(entry.name)
        for name, parts in sources.items():
            if name in state:
                raise ModelError(f"{str(self._header.path)!r} has one part of {name!r} in blocks and one in floats")
            state[name] = self._gathered(name, parts)
        if unknown:
            raise ModelError(
                f"{str(self._header.path)!r} has {len(unknown)} tensors that the model has no place for: {unknown[0]} …"
            )
        for (kind, reason), number in self._widened.items():
            self.notes.append(f"{number} weights in {kind} are expanded to {self._dtype}, because {reason}")
        return state

    def divide_frequencies(self, model: PreTrainedModel) -> None:
        """Apply the file's rotary frequencies."""
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
        """A tensor under the model's names: its values `[…]` float32 or float16, or, for one in blocks, its row numbers
        from 1, `[…, out, 1]` int64, transposed if the model's weight is. Rows of other tensors are 0."""
        if entry.kind not in FLOATS:
            rows = entry.num_elements // entry.shape[-1]
            given = torch.arange(1, rows + 1).view(*entry.shape[:-1], 1)
        else:
            given = self._floats(entry)
            if len(entry.shape) == 1 or given.dtype == torch.bfloat16:
                given = given.float()
        return self._mapping.moved(entry.name, given)

    def _gathered(self, name: str, parts: list[tuple[TensorEntry, torch.Tensor]]) -> torch.Tensor:
        """A weight `[out, in]` or `[experts, out, in]`, grouped or in the model's dtype, transposed if `parts` are.
        Raises `ModelError` if they do not fit.

        Args:
            parts: the block tensors that have its rows, each with row numbers (see `_moved`).
        """
        entries, orders = zip(*parts, strict=True)
        shape = orders[0].shape
        if name not in self._shapes or any(order.shape != shape for order in orders):
            raise ModelError(f"{str(self._header.path)!r} has a weight {name!r} that the model does not have")
        is_transposed, is_stacked = shape[-1] != 1, len(shape) > 2
        rows = torch.stack([(order.mT if is_transposed else order)[..., 0] for order in orders])  # [tensors, …, out]
        matrices = rows.flatten(1, -2).unbind(1) if is_stacked else [rows]
        kinds, first, permutation = {entry.kind for entry in entries}, entries[0], self._mapping.permutation_of(name)
        is_whole = permutation is None and first.shape[-1] % CHUNK == 0 and kernels_available()
        if is_whole and len(kinds) == 1 and (first.kind in LAYOUTS or first.kind in LATTICES):
            packed = [self._packed(entries, each) for each in matrices]
            sizes = (rows.shape[-1], first.shape[-1])
            weight: torch.Tensor = GroupedWeight(
                *(first.kind, packed[0][0], [panels for _, panels in packed]),
                *((len(packed), *sizes) if is_stacked else sizes, self._dtype),
            )
        else:
            reason = "no kernel reads them" if permutation is None else "the model has their columns in another order"
            self._widened["/".join(sorted(kinds)), reason] += 1
            values = [self._values(entries, each, permutation).to(self._dtype) for each in matrices]
            weight = torch.stack(values) if is_stacked else values[0]
        for entry in entries:
            self._release(entry)
        return weight.mT if is_transposed else weight

    def _packed(self, entries: Sequence[TensorEntry], rows: torch.Tensor) -> tuple[GroupedLayout, PackedMatrix]:
        """A matrix in panels, with its layout; `rows` `[tensors, out]` has its row numbers in each tensor, from 1, or
        0."""
        blocks = [self._bytes(each).view(-1, *_block_shape(each)) for each in entries]
        try:
            return packed_blocks(entries[0].kind, blocks, rows.contiguous())
        except RuntimeError as error:
            name = entries[0].name
            raise ModelError(
                f"the weight {name!r} cannot be read ({first_line(error)}): is the file intact?"
            ) from error

    def _values(
        self, entries: Sequence[TensorEntry], rows: torch.Tensor, permutation: torch.Tensor | None
    ) -> torch.Tensor:
        """The values `[out, in]` float32 of a matrix; `rows` as for `_packed`, `permutation` of its columns."""
        values = torch.empty(rows.shape[1], entries[0].shape[-1])
        for entry, numbers in zip(entries, rows, strict=True):
            blocks = self._bytes(entry).view(-1, *_block_shape(entry))
            values[numbers > 0] = _dequantised(blocks[numbers[numbers > 0] - 1], entry)
        return values if permutation is None else values[:, permutation]

    def _floats(self, entry: TensorEntry) -> torch.Tensor:
        """A copy of a tensor's values, `[…]` in the file's float dtype."""
        values = self._bytes(entry).clone().view(FLOATS[entry.kind]).view(entry.shape)
        self._release(entry)
        return values

    def _bytes(self, entry: TensorEntry) -> torch.Tensor:
        """A tensor's bytes in the mapped file, `[n]` uint8."""
        return self._contents[entry.path][entry.start : entry.start + entry.nbytes]

    def _release(self, entry: TensorEntry) -> None:
        """Release the pages of a tensor's file, except those shared with neighbours."""
        page = mmap.PAGESIZE
        first, last = -(-entry.start // page) * page, (entry.start + entry.nbytes) // page * page
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._files[entry.path].madvise(mmap.MADV_DONTNEED, first, last - first)


def _block_shape(entry: TensorEntry) -> tuple[int, int]:
    """The blocks of a row, and the bytes of a block."""
    elements, num_bytes = BLOCK_SIZES[entry.kind]
    return entry.shape[-1] // elements, num_bytes


def _dequantised(blocks: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Dequantize a weight `[out, in]` to float32 with the `gguf` package. Raises `ModelError` for an unknown type."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType[entry.kind]
        return torch.from_numpy(gguf.dequantize(blocks.flatten(1).numpy(), kind).copy())
    except (KeyError, NotImplementedError) as error:
        raise ModelError(f"the weight {entry.name!r} is in {entry.kind}, which cannot be read") from error

"""`EncoderOutputs`: encodes the images and sounds of running sequences, and puts the outputs in place of their
placeholder tokens.

A multimodal model of `transformers` takes encoder outputs as `mm_encoder_outputs`, one row for each placeholder among
the tokens of a forward pass. So a step gives it the rows of its own placeholders, whatever sequences they belong to.
Each item is encoded alone, so its bits depend on no other.
"""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from inflight.contracts.api.errors import InvalidRequestError, ModelError
from inflight.contracts.step.multimodal import Array, EncoderInput, MultimodalInputs
from inflight.contracts.step.plan import StepPlan
from inflight.execution.hf.hook import MASKED, attend_with, attention_in_use, restore_attention, use_attention
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.hf.model_class import encoders
from inflight.execution.hf.source import first_line
from inflight.execution.ragged_batch import RaggedBatch

NUM_AROUND = 8
MAX_BYTES = 2**28
"""Encoder outputs that are kept for later requests."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """An item's encoder output: a row `[hidden]` for each placeholder, and in some models one for each of a few layers
    (DeepStack).

    Attributes:
        kind: the class of the model's output.
        is_list: whether the model gives a list of one tensor for each item.
    """

    pooled: Tensor
    deep: tuple[Tensor, ...]
    kind: type[ModelOutput]
    is_list: bool

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.pooled, *self.deep))


@dataclass(frozen=True, slots=True)
class _SequenceInputs:
    """What the steps of one sequence need.

    Attributes:
        rows: by kind, the rows of its placeholders.
        places: by kind, their indices, `[n]` int64, ascending.
        positions: of the prompt's tokens, `[k, L]` int64.
        types: arguments of the model with a value for each token of the prompt, `[L]`.
    """

    rows: Mapping[str, _Rows]
    places: Mapping[str, np.ndarray[Any, Any]]
    positions: Tensor
    types: Mapping[str, Tensor]

    def positions_of(self, start: int, end: int) -> Tensor:
        """The positions `[k, end - start]` of these tokens. After the prompt each dimension counts on from its last, as
        in `model.generate`."""
        length = self.positions.shape[1]
        after = self.positions[:, -1:] + torch.arange(max(start, length), max(end, length)) - length + 1
        return torch.cat([self.positions[:, start:end], after], dim=1)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step's forward pass needs besides its tokens.

    Attributes:
        positions: `[n]` int64, or `[k, n]` in k dimensions.
        options: arguments of the model; empty: a graph can run the step, if its positions have one dimension.
    """

    positions: Tensor
    options: Mapping[str, Any]


class EncoderOutputs:
    """The encoder outputs of one model's running sequences.

    Args:
        model: exclusively ours.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._kept: OrderedDict[bytes, _Rows] = OrderedDict()
        self._sequences: dict[int, _SequenceInputs] = {}  # by slot
        self._is_checked = False
        self._token_ids = {kind: _placeholder(model, kind) for kind in ("image", "audio")}

    def take(self, plan: StepPlan) -> None:
        """Track releases and assignments of slots; encode what newly assigned sequences need."""
        for slot in plan.released_slots:
            self._sequences.pop(slot, None)
        for assignment in plan.assignments:
            if assignment.multimodal is not None:
                self._sequences[assignment.slot] = self._inputs(
                    assignment.token_ids[: assignment.prompt_len], assignment.multimodal
                )

    def of(self, batch: RaggedBatch, input_ids: Tensor, positions: Tensor) -> StepInputs | None:
        """What this step needs; None: it has no sequence with images or sounds.

        Args:
            input_ids, positions: of the row, with padding, `[n]` int64.
        """
        if not any(span.slot in self._sequences for span in batch.spans):
            return None
        num_rows = max(len(each.positions) for each in self._sequences.values())
        own = positions.expand(num_rows, -1).clone()
        options: dict[str, Any] = {}
        known: dict[str, list[tuple[_Rows, Tensor, Tensor]]] = {}  # rows, which of them, where in the step's row
        first = 0
        for span in batch.spans:
            sequence, end = self._sequences.get(span.slot), first + span.length
            if sequence is not None:
                own[:, first:end] = sequence.positions_of(span.start, span.end)
                for kind, places in sequence.places.items():
                    lowest, highest = np.searchsorted(places, (span.start, span.end))
                    if lowest < highest:
                        where = torch.from_numpy(places[lowest:highest] - span.start + first)
                        known.setdefault(kind, []).append((sequence.rows[kind], torch.arange(lowest, highest), where))
                for name, types in sequence.types.items():
                    row = options.setdefault(name, types.new_zeros(1, len(input_ids)))
                    row[0, first : first + len(types[span.start : span.end])] = types[span.start : span.end]
            first = end
        own[:, first:] = own[:, first - 1 : first]
        if known:
            options["mm_encoder_outputs"] = {
                kind: self._merged(kind, parts, input_ids) for kind, parts in known.items()
            }
        is_flat = bool((own == own[:1]).all())
        return StepInputs(own[0] if is_flat else own, options if known else {})

    def _merged(self, kind: str, parts: list[tuple[_Rows, Tensor, Tensor]], input_ids: Tensor) -> ModelOutput:
        """The model's encoder output for one step's placeholders. Those without an item, which a text may have, too,
        keep their own embedding."""
        like = parts[0][0]
        token_id = self._token_ids[kind]
        assert token_id is not None
        places = torch.eq(input_ids, token_id).nonzero()[:, 0]
        pooled = self._model.get_input_embeddings()(input_ids[places]).to(like.pooled.dtype)
        deep = [each.new_zeros(len(places), each.shape[1]) for each in like.deep]
        for rows, which, where in parts:
            index = torch.searchsorted(places, where)
            pooled[index] = rows.pooled[which]
            for target, source in zip(deep, rows.deep, strict=True):
                target[index] = source[which]
        contained = (lambda rows: [rows]) if like.is_list else (lambda rows: rows[None])
        given: dict[str, Any] = {"pooler_output": contained(pooled)}
        if deep:
            given["deepstack_features"] = [contained(each) for each in deep]
        return like.kind(**given)

    def encode(self, token_ids: Sequence[int], inputs: MultimodalInputs) -> None:
        """Encode a prompt's items before it is queued. Raises `InvalidRequestError` if the model cannot take them."""
        try:
            sequence = self._inputs(token_ids, inputs)
            if not self._is_checked:
                self._check_visibility(token_ids, sequence, len(inputs.items[0].places))
                self._is_checked = True
        except ModelError as error:
            raise InvalidRequestError(str(error)) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # in the model's own code
            raise InvalidRequestError(f"the model cannot encode the images: {first_line(error)}") from error

    @torch.inference_mode()
    def _check_visibility(self, token_ids: Sequence[int], sequence: _SequenceInputs, num_rows: int) -> None:
        """Raise `ModelError` unless every token sees what precedes it, and nothing else: some models let the tokens of
        an image see each other. A forward pass over an image and a few tokens around it shows the model's masks."""

        def look(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
        ) -> Tensor:
            sees_later = not getattr(module, "is_causal", True) if mask is None else (mask[0, 0] >= 0).triu(1).any()
            if sees_later:
                raise ModelError(
                    f"{type(self._model).__name__} lets the tokens of an image see each other; inflight does not"
                )
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

        kind, rows = next(iter(sequence.rows.items()))
        start = max(0, int(sequence.places[kind][0]) - NUM_AROUND)
        end = int(sequence.places[kind][num_rows - 1]) + 1 + NUM_AROUND
        row = torch.tensor(token_ids[start:end], device=self._model.device)
        where = torch.from_numpy(sequence.places[kind][:num_rows]) - start
        types = {name: each[None, start:end] for name, each in sequence.types.items()}
        positions = torch.arange(len(row))[None]
        if len(sequence.positions) > 1:
            positions = torch.cat([positions, sequence.positions[:, start:end]])
        in_use = attention_in_use(self._model)
        use_attention(self._model, MASKED)
        try:
            with attend_with(look):
                self._model(
                    input_ids=row[None],
                    position_ids=positions[:, None] if len(positions) > 1 else positions,
                    mm_encoder_outputs={kind: self._merged(kind, [(rows, torch.arange(num_rows), where)], row)},
                    use_cache=False,
                    **types,
                )
        finally:
            restore_attention(self._model, in_use)

    @torch.inference_mode()
    def _inputs(self, prompt: Sequence[int], inputs: MultimodalInputs) -> _SequenceInputs:
        length = len(prompt)
        token_ids = torch.tensor([list(prompt)], device=self._model.device)
        given = {name: _tensor(each) for name, each in inputs.arrays.items()}
        positions = self._model._prepare_position_ids_for_generation(token_ids, {"input_ids": token_ids, **given})
        if hasattr(self._model.base_model, "rope_deltas"):
            self._model.base_model.rope_deltas = None
        positions = positions.reshape(-1, length)[-3:]  # of four rows, the first is for masks
        rows: dict[str, _Rows] = {}
        places: dict[str, np.ndarray[Any, Any]] = {}
        for kind in {item.kind for item in inputs.items}:
            items = [item for item in inputs.items if item.kind == kind]
            encoded = [self._encoded(item) for item in items]
            rows[kind] = _Rows(
                torch.cat([each.pooled for each in encoded]),
                tuple(map(torch.cat, zip(*(each.deep for each in encoded), strict=True))),
                encoded[0].kind,
                encoded[0].is_list,
            )
            places[kind] = np.concatenate([np.asarray(item.places, dtype=np.int64) for item in items])
        names = set(inspect.signature(self._model.forward).parameters)
        types = {name: each[0] for name, each in given.items() if name in names and each.shape == (1, length)}
        return _SequenceInputs(rows, places, positions, types)

    def _encoded(self, item: EncoderInput) -> _Rows:
        if item.digest in self._kept:
            self._kept.move_to_end(item.digest)
            return self._kept[item.digest]
        model = self._model
        for encoder in encoders(model):
            encoder.to(model.dtype)
        encode = getattr(model.base_model, f"get_{item.kind}_features")
        names = inspect.signature(encode).parameters
        given = {name: _tensor(each) for name, each in item.arrays.items() if name in names}
        in_use = attention_in_use(model)
        use_attention(model, "eager")  # of what lies between an encoder and the language model
        try:
            output = encode(**given, return_dict=True)
        finally:
            restore_attention(model, in_use)
        pooled, deep = output.pooler_output, getattr(output, "deepstack_features", None) or ()
        rows = _Rows(_flat(pooled), tuple(map(_flat, deep)), type(output), not isinstance(pooled, Tensor))
        if len(rows.pooled) != len(item.places):
            raise ModelError(
                f"an {item.kind} has {len(item.places)} placeholders, but {len(rows.pooled)} encoder outputs"
            )
        self._kept[item.digest] = rows
        while len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > MAX_BYTES:
            self._kept.popitem(last=False)
        return rows


def _tensor(array: Array) -> Tensor:
    """A tensor of its own memory."""
    return torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())


def _flat(features: Any) -> Tensor:
    """Features as rows `[n, hidden]`."""
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


def _placeholder(model: PreTrainedModel, kind: str) -> int | None:
    """The token id that stands for a row of an encoder's output; None: the model has no such encoder."""
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((value for name in names if (value := getattr(model.config, name, None)) is not None), None)


def encodable(model: PreTrainedModel) -> tuple[str, ...]:
    """What a model encodes and takes the outputs of, besides text: "image"."""
    takes_outputs = "mm_encoder_outputs" in forward_parameters(model)
    encodes = hasattr(model.base_model, "get_image_features") and _placeholder(model, "image") is not None
    return ("image",) if takes_outputs and encodes else ()

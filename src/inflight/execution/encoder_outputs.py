"""`EncoderOutputs`: encodes the images and sounds of running sequences, and puts the outputs in place of their
placeholder tokens.

Items are encoded between steps, those first that the scheduler wants (`Scheduler.wanted_items`), and in slices of time
while others decode. So the items of cached blocks are not encoded, and the outputs of a long queue take no memory.

A multimodal model of `transformers` takes encoder outputs as `mm_encoder_outputs`, one row for each placeholder among
the tokens of a forward pass. So a step gives it the rows of its own placeholders, whatever sequences they belong to.
Each item is encoded alone, so its bits depend on no other.
"""

import inspect
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from inflight.contracts.api.errors import InvalidRequestError, ModelError
from inflight.contracts.step.multimodal import Array, EncoderInput, MultimodalInputs, placeholder_id
from inflight.contracts.step.plan import StepPlan
from inflight.execution.hf.hook import MASKED, attend_with, attention_in_use, restore_attention, use_attention
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.hf.model_class import encoders
from inflight.execution.hf.source import first_line
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.slices import Sliced

OF_ITEMS = ("pooler_output", "last_hidden_state", "hidden_states", "attentions")
DEEP = "deepstack_features"
"""Fields of an encoder's output with a row for each placeholder, or internal to it."""
PLACES = "placeholders"
TYPES = "token_type_ids"
"""The ending of the names of arguments with a type for each token."""

NUM_AROUND = 8
MAX_BYTES = 2**28
"""Encoder outputs that are kept for later steps."""


class EncodingError(ModelError):
    """The model cannot encode an item of this sequence."""

    def __init__(self, sequence_id: int, message: str) -> None:
        super().__init__(message)
        self.sequence_id = sequence_id


@dataclass(frozen=True, slots=True)
class _Rows:
    """An item's encoder output: a row `[hidden]` for each placeholder, and in some models one for each of a few layers
    (DeepStack; None: the model has no such output).

    Attributes:
        kind: the class of the model's output.
        is_list: whether the model gives a list of one tensor for each item.
        others: further tensors of the output, which do not depend on the item.
    """

    pooled: Tensor
    deep: tuple[Tensor, ...] | None
    kind: type[ModelOutput]
    is_list: bool
    others: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.pooled, *(self.deep or ())))


@dataclass(frozen=True, slots=True)
class _SequenceInputs:
    """What the steps of one sequence need.

    Attributes:
        given: its images and sounds.
        positions: of the prompt's tokens, `[k, L]` int64.
        types: arguments of the model with a value for each token of the prompt, `[L]`.
    """

    given: MultimodalInputs
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
        attention_calls: the kernels' handles of the model's attention calls, in order; none: others attend.
    """

    def __init__(self, model: PreTrainedModel, attention_calls: Callable[[], Sequence[int]]) -> None:
        self._model = model
        self._attention_calls = attention_calls
        self._kept: OrderedDict[bytes, _Rows] = OrderedDict()
        self._like: dict[str, _Rows] = {}  # by kind, without rows: what is the same for all items
        self._sequences: dict[int, _SequenceInputs] = {}  # by slot
        self._begun: tuple[bytes, Sliced] | None = None  # the item that is being encoded, in slices
        self._is_checked = False
        self._ranges: str | None = None  # which tokens of an image see each other (see `_ranges`); None: none
        self._window = sys.maxsize  # the least of attention in which they do
        self._token_ids = {kind: placeholder_id(model.config, kind) for kind in ("image", "audio")}

    def take(self, plan: StepPlan) -> None:
        """Track releases and assignments of slots; encode what is missing nevertheless. Raises `EncodingError`."""
        for slot in plan.released_slots:
            self._sequences.pop(slot, None)
        for assignment in plan.assignments:
            if assignment.multimodal is not None:
                prompt = assignment.token_ids[: assignment.prompt_len]
                with _failing(assignment.sequence_id):
                    self._sequences[assignment.slot] = self._inputs(prompt, assignment.multimodal)
        needed: dict[bytes, tuple[int, EncoderInput]] = {}
        for span in plan.spans:
            if (sequence := self._sequences.get(span.slot)) is not None:
                for item in sequence.given.items_between(span.start, span.end):
                    needed[item.digest] = span.sequence_id, item
        for digest in needed.keys() & self._kept.keys():
            self._kept.move_to_end(digest)
            del needed[digest]
        if needed or not plan.spans:
            self.encode(needed)

    def has(self, item: EncoderInput) -> bool:
        """Whether an item is encoded."""
        return item.digest in self._kept

    def encode(self, wanted: Mapping[bytes, tuple[int, EncoderInput]], seconds: float | None = None) -> None:
        """Encode what is not kept of these items.

        Args:
            wanted: by digest, with a sequence that has the item. Others may be dropped.
            seconds: go on for about so long, and with the same item at the next call; None: to the end.

        Raises:
            EncodingError: the model cannot encode one of them.
        """
        if self._begun is not None and self._begun[0] not in wanted:
            self._begun[1].abandon()
            self._begun = None
        missing = [each for digest, each in wanted.items() if digest not in self._kept]
        missing.sort(key=lambda each: self._begun is None or each[1].digest != self._begun[0])
        end = math.inf if seconds is None else time.monotonic() + seconds
        for sequence_id, item in missing:
            self._make_room(wanted)
            with _failing(sequence_id):
                self._encode(item, end)
            if time.monotonic() >= end:
                break

    def _make_room(self, wanted: Container[bytes]) -> None:
        """Drop the oldest outputs that are not wanted, if there are too many."""
        others = [digest for digest in self._kept if digest not in wanted]
        while others and sum(each.num_bytes for each in self._kept.values()) > MAX_BYTES:
            del self._kept[others.pop(0)]

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
        known: dict[str, list[tuple[_Rows, slice, Tensor]]] = {}  # rows, which of them, where in the step's row
        first = 0
        for span in batch.spans:
            sequence, end = self._sequences.get(span.slot), first + span.length
            if sequence is not None:
                own[:, first:end] = sequence.positions_of(span.start, span.end)
                if span.start < sequence.positions.shape[1]:
                    for kind in {item.kind for item in sequence.given.items if self._like[item.kind].others}:
                        known.setdefault(kind, [])
                for item in sequence.given.items_between(span.start, span.end):
                    places = np.asarray(item.places, dtype=np.int64)
                    lowest, highest = np.searchsorted(places, (span.start, span.end)).tolist()
                    where = torch.from_numpy(places[lowest:highest] - span.start + first)
                    part = self._kept[item.digest], slice(lowest, highest), where
                    known.setdefault(item.kind, []).append(part)
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

    def _merged(self, kind: str, parts: list[tuple[_Rows, slice, Tensor]], input_ids: Tensor) -> ModelOutput:
        """The model's encoder output for one step's placeholders. Those without an item, which a text may have, too,
        keep their own embedding."""
        like = self._like[kind]
        token_id = self._token_ids[kind]
        assert token_id is not None
        places = torch.eq(input_ids, token_id).nonzero()[:, 0]
        pooled = self._model.get_input_embeddings()(input_ids[places]).to(like.pooled.dtype)
        if pooled.shape[1] != like.pooled.shape[1]:  # the model projects the rows: these have no embedding to keep
            pooled = like.pooled.new_zeros(len(places), like.pooled.shape[1])
        deep = [each.new_zeros(len(places), each.shape[1]) for each in like.deep or ()]
        for rows, which, where in parts:
            index = torch.searchsorted(places, where)
            pooled[index] = rows.pooled[which]
            for target, source in zip(deep, rows.deep or (), strict=True):
                target[index] = source[which]
        contained = (lambda rows: [rows]) if like.is_list else (lambda rows: rows[None])
        given: dict[str, Any] = dict.fromkeys(("last_hidden_state", "pooler_output"), contained(pooled))
        if like.deep is not None:
            given[DEEP] = [contained(each) for each in deep]
        return like.kind(**given, **like.others)

    def check(self, token_ids: Sequence[int], inputs: MultimodalInputs) -> MultimodalInputs:
        """Check a prompt's items before it is queued; return them with `whole`. Of the first prompt, one is encoded.
        Raises `InvalidRequestError` if the model cannot take them."""
        try:
            with _failing(0):
                sequence = self._inputs(token_ids, inputs)
                if not self._is_checked:
                    self.encode({inputs.items[0].digest: (0, inputs.items[0])})
                    self._check_visibility(token_ids, sequence)
                    self._is_checked = True
        except EncodingError as error:
            raise InvalidRequestError(str(error)) from error
        if self._ranges is None:
            return inputs
        whole = _ranges(sequence, 0, len(token_ids))[self._ranges]
        if (longest := max((end - start for start, end in whole), default=0)) > self._window:
            raise InvalidRequestError(
                f"an image has {longest} tokens, more than the attention's window, {self._window}"
            )
        return replace(inputs, whole=whole)

    def apart(self, batch: RaggedBatch) -> RaggedBatch:
        """A batch for attention: images whose tokens see each other are spans of their own."""
        if self._ranges is None:
            return batch
        sequences = (self._sequences.get(span.slot) for span in batch.spans)
        return batch.with_items([() if each is None else each.given.whole for each in sequences])

    @torch.inference_mode()
    def _check_visibility(self, token_ids: Sequence[int], sequence: _SequenceInputs) -> None:
        """Find the attention calls in which the tokens of an image see each other. Raise `ModelError` if a token sees
        anything else that comes after it. The model's masks for two images with a few tokens around show it."""
        item, *others = sequence.given.items
        rows, kind, begin, end = self._kept[item.digest], item.kind, item.places[0], item.places[-1] + 1
        following = next((each.places[0] for each in others), len(token_ids))
        start, stop = max(0, begin - NUM_AROUND), min(end + NUM_AROUND, following)
        ranges = _ranges(sequence, start, stop, num_times=2)
        row = torch.tensor([*token_ids[start:stop]] * 2, device=self._model.device)
        sees: list[str | None] = []  # by call: which ranges see each other
        name = type(self._model).__name__
        refusal = ModelError(f"{name} lets tokens see others after them that are not of the same image")

        def look(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
        ) -> Tensor:
            found, window = None, kwargs.get("sliding_window") or len(row)
            if mask is None and not getattr(module, "is_causal", True):
                raise refusal
            if mask is not None and (mask[0, 0] >= 0).triu(1).any():
                every = torch.ones(len(row), len(row), dtype=torch.bool)
                alike = (
                    each
                    for each in ranges
                    if torch.equal(mask[0, 0] >= 0, (every.tril() | _within(ranges[each], len(row))).triu(1 - window))
                )
                found = next(alike, None)
                if found is None:
                    raise refusal
                if end - begin <= window < len(row):  # longer images might be seen beyond the window
                    self._window = min(self._window, window)
            sees.append(found)
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

        where, which = torch.tensor(item.places) - start, slice(None)
        types = {name: each[None, start:stop].repeat(1, 2) for name, each in sequence.types.items()}
        positions = sequence.positions[:, start:stop].repeat(1, 2)
        if len(positions) == 1:
            positions = torch.arange(len(row))[None]
        in_use = attention_in_use(self._model)
        use_attention(self._model, MASKED)
        try:
            with attend_with(look):
                self._model(
                    input_ids=row[None],
                    position_ids=positions[:, None] if len(positions) > 1 else positions,
                    mm_encoder_outputs={
                        kind: self._merged(kind, [(rows, which, where), (rows, which, where + stop - start)], row)
                    },
                    use_cache=False,
                    **types,
                )
        finally:
            restore_attention(self._model, in_use)
        if not any(sees):
            return
        calls = self._attention_calls()
        if len(calls) != len(sees):
            raise ModelError(f"{name} lets the tokens of an image see each other, which needs the attention kernels")
        for call, found in zip(calls, sees, strict=True):
            if found is not None:
                torch.ops.inflight.see_items(call)
        self._ranges = next(each for each in sees if each is not None)

    @torch.inference_mode()
    def _inputs(self, prompt: Sequence[int], inputs: MultimodalInputs) -> _SequenceInputs:
        length = len(prompt)
        token_ids = torch.tensor([list(prompt)], device=self._model.device)
        given = {name: _tensor(each) for name, each in inputs.arrays.items()}
        positions = self._model._prepare_position_ids_for_generation(token_ids, {"input_ids": token_ids, **given})
        if hasattr(self._model.base_model, "rope_deltas"):
            self._model.base_model.rope_deltas = None
        rope = getattr(self._model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        num_dimensions = len(rope.get("mrope_section") or range(3))  # a further first row is for masks
        positions = positions.reshape(-1, length)[-num_dimensions:]
        names = {name for name in inspect.signature(self._model.forward).parameters if name.endswith(TYPES)}
        types = {name: each[0] for name, each in given.items() if name in names}
        return _SequenceInputs(inputs, positions, types)

    def _encode(self, item: EncoderInput, end: float) -> None:
        """Encode an item, or go on with it until `end` (of `time.monotonic()`), and keep its rows."""
        model = self._model
        in_use = attention_in_use(model)
        use_attention(model, "eager")  # of what lies between an encoder and the language model
        try:
            if self._begun is None and end == math.inf:
                rows = self._encoded(item)
            else:
                if self._begun is None:
                    modules = [module for encoder in encoders(model) for module in encoder.modules()]
                    self._begun = item.digest, Sliced(lambda: self._encoded(item), modules)
                rows = self._begun[1].resume(end)
                if rows is None:
                    return
                self._begun = None
        except BaseException:
            self._begun = None
            raise
        finally:
            restore_attention(model, in_use)
        self._kept[item.digest] = rows
        if item.kind not in self._like:
            deep = None if rows.deep is None else tuple(each[:0].clone() for each in rows.deep)
            self._like[item.kind] = replace(rows, pooled=rows.pooled[:0].clone(), deep=deep)

    @torch.inference_mode()
    def _encoded(self, item: EncoderInput) -> _Rows:
        model = self._model
        for weight in (each for encoder in encoders(model) for each in encoder.state_dict(keep_vars=True).values()):
            # Not what no checkpoint has, such as rotary frequencies: `generate` has these in float32, too.
            weight.data = weight.data.to(model.dtype if weight.is_floating_point() else weight.dtype)
        encode = getattr(model.base_model, f"get_{item.kind}_features")
        names = inspect.signature(encode).parameters
        given = {name: _tensor(each) for name, each in item.arrays.items() if name in names}
        given = {name: each.to(model.dtype) if each.is_floating_point() else each for name, each in given.items()}
        output = encode(**given, return_dict=True)
        pooled, deep = output.get("pooler_output", output.get("last_hidden_state")), getattr(output, DEEP, None)
        others = {name: each for name, each in output.items() if name not in (*OF_ITEMS, DEEP)}
        layers = None if deep is None else tuple(map(_flat, deep))
        rows = _Rows(_flat(pooled), layers, type(output), not isinstance(pooled, Tensor), others)
        if len(rows.pooled) != len(item.places):
            raise ModelError(
                f"an {item.kind} has {len(item.places)} placeholders, but {len(rows.pooled)} encoder outputs"
            )
        return rows


@contextmanager
def _failing(sequence_id: int) -> Iterator[None]:
    """Raise errors as `EncodingError`."""
    try:
        yield
    except ModelError as error:
        raise EncodingError(sequence_id, str(error)) from error
    except Exception as error:  # the model's own code can raise anything
        raise EncodingError(sequence_id, f"the model cannot encode the images: {first_line(error)}") from error


def _ranges(sequence: _SequenceInputs, start: int, end: int, num_times: int = 1) -> dict[str, list[tuple[int, int]]]:
    """The ranges of tokens that a model may take for an image, from `start`: neighbouring placeholders, or, by an
    argument that tells types of tokens, neighbours of the placeholders' type; of the row, repeated `num_times`."""
    is_place = np.zeros(sequence.positions.shape[1], dtype=bool)
    for item in sequence.given.items:
        is_place[list(item.places)] = True
    found = {name: (each == each[int(is_place.argmax())]).numpy() for name, each in sequence.types.items()}
    ranges = {}
    for name, is_item in {PLACES: is_place, **found}.items():
        row = np.tile(is_item[start:end], num_times)
        borders = np.flatnonzero(np.diff(row, prepend=False, append=False)).tolist()
        ranges[name] = list(zip(borders[::2], borders[1::2], strict=True))
    return ranges


def _within(ranges: Sequence[tuple[int, int]], length: int) -> Tensor:
    """Which tokens see each other, `[length, length]` bool, if those of each range do."""
    number = torch.full((length,), -1)
    for index, (start, end) in enumerate(ranges):
        number[start:end] = index
    return (number[:, None] == number) & (number >= 0)


def _tensor(array: Array) -> Tensor:
    """A tensor of its own memory."""
    return torch.from_numpy(np.frombuffer(array.data, array.dtype).reshape(array.shape).copy())


def _flat(features: Any) -> Tensor:
    """Features as rows `[n, hidden]`."""
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


def encodable(model: PreTrainedModel) -> tuple[str, ...]:
    """What a model encodes and takes the outputs of, besides text: "image"."""
    takes_outputs = "mm_encoder_outputs" in forward_parameters(model)
    encodes = hasattr(model.base_model, "get_image_features") and placeholder_id(model.config, "image") is not None
    return ("image",) if takes_outputs and encodes else ()

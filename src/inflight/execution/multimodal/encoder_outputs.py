"""`EncoderOutputs`: encodes the images and sounds of running sequences, and puts the outputs in place of their
placeholder tokens.

Items are encoded between steps, those first that the scheduler wants (`Scheduler.wanted_items`), and in slices of time
while others decode. So the items of cached blocks are not encoded, and the outputs of a long queue take no memory.

A step gets the rows of its own placeholders, whatever sequences they belong to, in place of their input embeddings.
Each item is encoded alone, so its bits depend on no other.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.multimodal import EncoderInput, MultimodalInputs
from inflight.contracts.step.plan import StepPlan
from inflight.execution.hf.hook import with_attention
from inflight.execution.hf.model_class import encoders
from inflight.execution.hf.source import first_line
from inflight.execution.multimodal.encoder import Part, Rows, encode, from_bytes, rows_of, to_bytes
from inflight.execution.multimodal.item_proofs import BETWEEN, ItemProofs, ProofResults
from inflight.execution.multimodal.placing import Placing
from inflight.execution.multimodal.prepacking import prepare_encoders
from inflight.execution.multimodal.sequence_inputs import SequenceInputs, num_dimensions
from inflight.execution.multimodal.slices import Sliced
from inflight.execution.ragged_batch import RaggedBatch

MAX_BYTES = 2**28
"""Encoder outputs that are kept for later steps."""


class EncodingError(ModelError):
    """The model cannot encode an item of this sequence."""

    def __init__(self, sequence_id: int, message: str) -> None:
        super().__init__(message)
        self.sequence_id = sequence_id


class OutputStore(Protocol):
    """Keeps encoder outputs beyond the process."""

    def find_output(self, digest: bytes) -> bytearray | None:
        """An item's output, if it is kept."""
        ...

    def save_output(self, digest: bytes, output: bytes) -> None:
        """Keep an item's output."""
        ...


class EncoderOutputs:
    """The encoder outputs of one model's running sequences.

    Args:
        model: exclusively ours.
        attention_calls: the kernels' handles of the model's attention calls, in order; none: others attend.
        results: proofs of earlier processes.
        key: the model's, in `results`; None: nothing is kept there.

    Attributes:
        num_dimensions: the dimensions k of positions.
        placing: puts rows into a forward pass.
        proofs: what the first items showed.
        store: keeps outputs beyond the process; None: nothing does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention_calls: Callable[[], Sequence[int]],
        results: ProofResults,
        key: str | None,
    ) -> None:
        self._model = model
        self.store: OutputStore | None = None
        self.placing = Placing(model)
        self.proofs = ItemProofs(model, self.placing, attention_calls, results, key)
        prepare_encoders(model)
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        self._sequences: dict[int, SequenceInputs] = {}  # by slot
        self._begun: tuple[bytes, Sliced] | None = None  # the item that is being encoded, in slices
        self.num_dimensions = num_dimensions(model)

    def take(self, plan: StepPlan) -> None:
        """Track releases and assignments of slots; encode what is missing nevertheless. Raises `EncodingError`."""
        for slot in plan.released_slots:
            self._sequences.pop(slot, None)
        for assignment in plan.assignments:
            if assignment.multimodal is not None and not assignment.multimodal.left_to_generate:
                prompt = assignment.token_ids[: assignment.prompt_len]
                with _failing(assignment.sequence_id):
                    self._sequences[assignment.slot] = SequenceInputs.of(self._model, prompt, assignment.multimodal)
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
        while others and sum(each.nbytes for rows in self._kept.values() for each in rows.values()) > MAX_BYTES:
            del self._kept[others.pop(0)]

    def positions(self, batch: RaggedBatch, positions: Tensor) -> Tensor:
        """A step's positions, `[n]` int64, or `[k, n]` in k dimensions. The rows of its placeholders go into the next
        forward pass.

        Args:
            positions: of the row, with padding, `[n]` int64, as without images and sounds.
        """
        if self.num_dimensions == 1 and not any(span.slot in self._sequences for span in batch.spans):
            self.placing.put(())
            return positions
        own = positions.repeat(self.num_dimensions, 1)
        parts: list[Part] = []
        first = 0
        for span in batch.spans:
            sequence, end = self._sequences.get(span.slot), first + span.length
            if sequence is not None:
                own[:, first:end] = sequence.positions_of(span.start, span.end)
                for item in sequence.given.items_between(span.start, span.end):
                    places = np.asarray(item.places, dtype=np.int64)
                    lowest, highest = np.searchsorted(places, (span.start, span.end)).tolist()
                    where = torch.from_numpy(places[lowest:highest] - span.start + first)
                    parts.append((self._kept[item.digest], slice(lowest, highest), where))
            first = end
        if first:
            own[:, first:] = own[:, first - 1 : first]
        self.placing.put(parts)
        return own if self.num_dimensions > 1 else own[0]

    def check(self, token_ids: Sequence[int], inputs: MultimodalInputs) -> MultimodalInputs:
        """Check a prompt's items before it is queued; return them with `whole`, or for the model's own `generate`. The
        first of each kind is encoded, and the first several in one prompt."""
        kinds = dict.fromkeys(item.kind for item in inputs.items)
        try:
            sequence = SequenceInputs.of(self._model, token_ids, inputs)
        except Exception:  # the model's own code can raise anything
            return inputs.generated()
        if not all(self.proofs.allow(kind, token_ids, sequence, self._keep, self._alone) for kind in kinds):
            return inputs.generated()
        ranges = {kind: name for kind, name in self.proofs.ranges.items() if kind in kinds}
        whole = [each for kind, name in ranges.items() for each in sequence.ranges(kind, 0, len(token_ids))[name]]
        if max((end - start for start, end in whole), default=0) > self.proofs.window:
            return inputs.generated()
        return replace(inputs, whole=sorted(whole), encoder_arrays={})

    def _restore(self, item: EncoderInput) -> bool:
        """Whether the store has an item's output; then it is kept here, too."""
        saved = None if self.store is None else self.store.find_output(item.digest)
        if saved is not None:
            self._kept[item.digest] = from_bytes(saved)
        return saved is not None

    def _keep(self, item: EncoderInput, rows: Rows) -> None:
        self._kept[item.digest] = rows
        if self.store is not None:
            self.store.save_output(item.digest, to_bytes(rows))

    def _alone(self, item: EncoderInput) -> Rows:
        """The rows of an item, encoded alone."""
        if item.digest not in self._kept and not self._restore(item):
            with with_attention(self._model, BETWEEN):
                self._keep(item, rows_of(encode(self._model, item)))
        return self._kept[item.digest]

    def apart(self, batch: RaggedBatch) -> RaggedBatch:
        """A batch for attention: images whose tokens see each other are spans of their own."""
        if not self.proofs.ranges:
            return batch
        sequences = (self._sequences.get(span.slot) for span in batch.spans)
        return batch.with_items([() if each is None else each.given.whole for each in sequences])

    def _encode(self, item: EncoderInput, end: float) -> None:
        """Encode an item, or go on with it until `end` (of `time.monotonic()`), and keep its rows."""
        if self._begun is None and self._restore(item):
            return
        begun, self._begun = self._begun, None
        with with_attention(self._model, BETWEEN):
            if begun is None and end == math.inf:
                output = encode(self._model, item)
            else:
                if begun is None:
                    modules = [each for part in encoders(self._model) for each in part.named_modules()]
                    begun = item.digest, Sliced(lambda: encode(self._model, item), modules)
                output = begun[1].resume(end)
        if output is None:
            self._begun = begun
        else:
            self._keep(item, rows_of(output))


@contextmanager
def _failing(sequence_id: int) -> Iterator[None]:
    """Raise errors as `EncodingError`."""
    try:
        yield
    except ModelError as error:
        raise EncodingError(sequence_id, str(error)) from error
    except Exception as error:  # the model's own code can raise anything
        raise EncodingError(sequence_id, f"the model's encoder fails: {first_line(error)}") from error

"""`EncoderOutputs`: encodes the images and sounds of running sequences, and puts the outputs in place of their
placeholder tokens.

Items are encoded between steps, those first that the scheduler wants (`Scheduler.wanted_items`), and in slices of time
while others decode. So the items of cached blocks are not encoded, and the outputs of a long queue take no memory.

A step gets the rows of its own placeholders, whatever sequences they belong to, in place of their input embeddings.
Each item is encoded alone, so its bits depend on no other.
"""

import logging
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.multimodal import KINDS, EncoderInput, MultimodalInputs
from inflight.contracts.step.plan import StepPlan
from inflight.execution.hf.hook import with_attention
from inflight.execution.hf.model_class import encoders
from inflight.execution.hf.source import first_line
from inflight.execution.multimodal.encoder import Part, Rows, encode, from_bytes, load_encoders, rows_of, to_bytes
from inflight.execution.multimodal.placing import Placing
from inflight.execution.multimodal.prepacking import are_alike, prepack_encoder, run_convolutions_in_float32
from inflight.execution.multimodal.proof import Proof
from inflight.execution.multimodal.sequence_inputs import SequenceInputs, num_dimensions
from inflight.execution.multimodal.slices import Sliced
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.weights.linear_calls import LinearCalls
from inflight.execution.weights.linears import prepack_linears

logger = logging.getLogger(__name__)

MAX_BYTES = 2**28
"""Encoder outputs that are kept for later steps."""
OF_THE_MODEL = (ModelError, TypeError, AttributeError, LookupError, StopIteration)
"""Errors that other items would raise, too: a model has no such function, or takes other arguments."""
BETWEEN = "eager"
"""The attention implementation of what lies between an encoder and the language model."""


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


@dataclass(frozen=True, slots=True)
class ItemProof:
    """What the first item of a kind, or the first several of one prompt, showed.

    Attributes:
        why_generated: why the model's own `generate` runs prompts with them; None: rows are placed.
        ranges: which ranges of its tokens see each other; None: none do.
        calls: the attention calls in which they do, by number.
        window: the least of their windows; None: they have none.
        linear_calls: the encoder's linear layers that are prepacked; None: none are.
    """

    why_generated: str | None = None
    ranges: str | None = None
    calls: tuple[int, ...] = ()
    window: int | None = None
    linear_calls: LinearCalls | None = None


class ProofResults(Protocol):
    """Keeps proofs beyond the process, by key."""

    def find(self, key: str | None) -> ItemProof | None: ...

    def keep(self, key: str | None, result: ItemProof) -> None: ...


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
        proofs: by kind, and for several by the kind's plural. Without an entry there was none yet.
        store: keeps outputs beyond the process; None: nothing does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention_calls: Callable[[], Sequence[int]],
        results: ProofResults,
        key: str | None,
    ) -> None:
        self._model, self._results, self._key = model, results, key
        self.store: OutputStore | None = None
        self.placing = Placing(model)
        self._attention_calls = attention_calls
        run_convolutions_in_float32(model)
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        self._sequences: dict[int, SequenceInputs] = {}  # by slot
        self._begun: tuple[bytes, Sliced] | None = None  # the item that is being encoded, in slices
        self.proofs: dict[str, ItemProof] = {}
        self._linear_calls: dict[str, LinearCalls | None] = {}  # by kind: of its encoder, once prepacked
        self._ranges: dict[str, str] = {}  # by kind: which ranges of its tokens see each other, if any
        self._window = sys.maxsize  # the least of attention in which they do
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
        if not all(self._can_place(kind, token_ids, sequence) for kind in kinds):
            return inputs.generated()
        ranges = {kind: name for kind, name in self._ranges.items() if kind in kinds}
        whole = [each for kind, name in ranges.items() for each in sequence.ranges(kind, 0, len(token_ids))[name]]
        if max((end - start for start, end in whole), default=0) > self._window:
            return inputs.generated()
        return replace(inputs, whole=sorted(whole), encoder_arrays={})

    def _can_place(self, kind: str, token_ids: Sequence[int], sequence: SequenceInputs) -> bool:
        """Whether rows may be placed for all items of this kind, each encoded alone."""
        items = [item for item in sequence.given.items if item.kind == kind]
        proofs: dict[str, Callable[[], ItemProof]] = {kind: lambda: self._prove(items[0], token_ids, sequence)}
        if len(items) > 1:
            proofs[KINDS[kind]] = lambda: self._prove_apart(items, sequence.given)
        for name, prove in proofs.items():
            if name not in self.proofs:
                key = None if self._key is None else f"{self._key}-{name}"
                proof = self._results.find(key)
                if proof is not None and proof.linear_calls is not None:
                    load_encoders(self._model)
                    prepack_linears(self._model, proof.linear_calls)
                    self._linear_calls[kind] = proof.linear_calls
                if proof is None:
                    try:
                        proof = prove()
                    except Exception as error:  # the model's own code can raise anything
                        reason = first_line(error)
                        logger.warning("prompts with %s run in the model's own generate: %s", KINDS[kind], reason)
                        if not isinstance(error, OF_THE_MODEL):
                            return False  # it may be this item's fault
                        proof = ItemProof(reason)
                    proof = replace(proof, linear_calls=self._linear_calls.get(kind))
                    self._results.keep(key, proof)
                self._take(kind, proof)
                self.proofs[name] = proof
            if self.proofs[name].why_generated is not None:
                return False
        return True

    def _take(self, kind: str, proof: ItemProof) -> None:
        calls = self._attention_calls()
        for number in proof.calls:
            torch.ops.inflight.see_items(calls[number])
        if proof.ranges is not None:
            self._ranges[kind] = proof.ranges
            self._window = min(self._window, proof.window or sys.maxsize)

    def _prove(self, item: EncoderInput, token_ids: Sequence[int], sequence: SequenceInputs) -> ItemProof:
        """Find what the model does with an item. Raises `ModelError` if its rows may not be placed."""
        name, kind = type(self._model).__name__, item.kind
        with with_attention(self._model, BETWEEN):
            if kind in self._linear_calls:
                output = encode(self._model, item)
            else:
                output, self._linear_calls[kind] = prepack_encoder(self._model, lambda: encode(self._model, item))
        self._keep(item, rows_of(output))
        proof = Proof(self._model, token_ids, sequence, item, output)
        if not proof.allows(self.placing):
            raise ModelError(f"{name} does more with {KINDS[kind]} than to replace their tokens' embeddings")
        seen = proof.seen()
        if not any(seen.by_call):
            return ItemProof()
        if len(self._attention_calls()) != len(seen.by_call):
            raise ModelError(
                f"{name} lets the tokens of {KINDS[kind]} see each other, which needs the attention kernels"
            )
        calls = [number for number, found in enumerate(seen.by_call) if found is not None]
        return ItemProof(None, seen.by_call[calls[0]], tuple(calls), seen.window)

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

    def _prove_apart(self, items: Sequence[EncoderInput], given: MultimodalInputs) -> ItemProof:
        """Encode several items together. Raises `ModelError` if their rows are not those of each alone."""
        places = [place for item in items for place in item.places]
        together = EncoderInput(items[0].kind, b"", places, {**given.arrays, **given.encoder_arrays})
        with with_attention(self._model, BETWEEN):
            rows = rows_of(encode(self._model, together))[0]
            for item in items:
                if item.digest not in self._kept and not self._restore(item):
                    self._keep(item, rows_of(encode(self._model, item)))
        alone = torch.cat([self._kept[item.digest][0] for item in items])
        if not are_alike(rows, alone):
            name = type(self._model).__name__
            raise ModelError(f"{name} gives several {KINDS[items[0].kind]} of a prompt other values than each alone")
        return ItemProof()

    def apart(self, batch: RaggedBatch) -> RaggedBatch:
        """A batch for attention: images whose tokens see each other are spans of their own."""
        if not self._ranges:
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
                    modules = [module for part in encoders(self._model) for module in part.modules()]
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

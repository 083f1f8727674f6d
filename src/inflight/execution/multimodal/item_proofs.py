"""`ItemProofs`: what a model does with images and sounds, found with the first of each kind.

Then its encoder is prepacked, if it is slow. What was found is kept for the next process.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.multimodal import KINDS, EncoderInput, MultimodalInputs
from inflight.execution.hf.hook import with_attention
from inflight.execution.hf.source import first_line
from inflight.execution.multimodal.encoder import Rows, encode, load_encoders, rows_of
from inflight.execution.multimodal.placing import Placing
from inflight.execution.multimodal.prepacking import are_alike, is_faster_prepacked, prepack_encoder
from inflight.execution.multimodal.proof import Proof
from inflight.execution.multimodal.sequence_inputs import SequenceInputs
from inflight.execution.weights.linear_calls import LinearCalls
from inflight.execution.weights.linears import prepack_linears

logger = logging.getLogger(__name__)

OF_THE_MODEL = (ModelError, TypeError, AttributeError, LookupError, StopIteration)
"""Errors that other items would raise, too: a model has no such function, or takes other arguments."""
BETWEEN = "eager"
"""The attention implementation of what lies between an encoder and the language model."""


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


class ItemProofs:
    """What one model does with the items of each kind.

    Args:
        model: exclusively ours.
        placing: puts rows into its forward pass.
        attention_calls: the kernels' handles of its attention calls, in order; none: others attend.
        results: proofs of earlier processes.
        key: the model's, in `results`; None: nothing is kept there.

    Attributes:
        found: by kind, and for several by the kind's plural. Without an entry there was none yet.
        ranges: by kind, which ranges of its tokens see each other, if any do.
        window: the least of attention in which they do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        placing: Placing,
        attention_calls: Callable[[], Sequence[int]],
        results: ProofResults,
        key: str | None,
    ) -> None:
        self._model, self._placing, self._attention_calls = model, placing, attention_calls
        self._results, self._key = results, key
        self.found: dict[str, ItemProof] = {}
        self.ranges: dict[str, str] = {}
        self.window = sys.maxsize
        self._linear_calls: dict[str, LinearCalls | None] = {}  # by kind: of its encoder, once prepacked

    def allow(
        self,
        kind: str,
        token_ids: Sequence[int],
        sequence: SequenceInputs,
        keep: Callable[[EncoderInput, Rows], None],
        alone: Callable[[EncoderInput], Rows],
    ) -> bool:
        """Whether rows may be placed for all items of this kind, each encoded alone.

        Args:
            keep: takes the rows of an item that is encoded here.
            alone: encodes an item.
        """
        items = [item for item in sequence.given.items if item.kind == kind]
        proofs: dict[str, Callable[[], ItemProof]] = {kind: lambda: self._prove(items[0], token_ids, sequence, keep)}
        if len(items) > 1:
            proofs[KINDS[kind]] = lambda: self._prove_apart(items, sequence.given, alone)
        for name, prove in proofs.items():
            if name not in self.found:
                key = None if self._key is None else f"{self._key}-{name}"
                proof = self._results.find(key)
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
                self.found[name] = proof
            if self.found[name].why_generated is not None:
                return False
        return True

    def _take(self, kind: str, proof: ItemProof) -> None:
        if proof.linear_calls is not None and kind not in self._linear_calls:  # of an earlier process
            load_encoders(self._model)
            prepack_linears(self._model, proof.linear_calls)
            self._linear_calls[kind] = proof.linear_calls
        calls = self._attention_calls()
        for number in proof.calls:
            torch.ops.inflight.see_items(calls[number])
        if proof.ranges is not None:
            self.ranges[kind] = proof.ranges
            self.window = min(self.window, proof.window or sys.maxsize)

    def _prove(
        self,
        item: EncoderInput,
        token_ids: Sequence[int],
        sequence: SequenceInputs,
        keep: Callable[[EncoderInput, Rows], None],
    ) -> ItemProof:
        """Find what the model does with an item. Raises `ModelError` if its rows may not be placed."""
        name, kind = type(self._model).__name__, item.kind
        with with_attention(self._model, BETWEEN):
            if kind in self._linear_calls or not is_faster_prepacked(self._model):
                output = encode(self._model, item)
            else:
                output, self._linear_calls[kind] = prepack_encoder(self._model, lambda: encode(self._model, item))
        keep(item, rows_of(output))
        proof = Proof(self._model, token_ids, sequence, item, output)
        if not proof.allows(self._placing):
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

    def _prove_apart(
        self, items: Sequence[EncoderInput], given: MultimodalInputs, alone: Callable[[EncoderInput], Rows]
    ) -> ItemProof:
        """Encode several items together. Raises `ModelError` if their rows are not those of each alone."""
        places = [place for item in items for place in item.places]
        together = EncoderInput(items[0].kind, b"", places, {**given.arrays, **given.encoder_arrays})
        with with_attention(self._model, BETWEEN):
            rows = rows_of(encode(self._model, together))[0]
        if not are_alike(rows, torch.cat([alone(item)[0] for item in items])):
            name = type(self._model).__name__
            raise ModelError(f"{name} gives several {KINDS[items[0].kind]} of a prompt other values than each alone")
        return ItemProof()

"""What a model does with the tokens of an image or sound, found by its forward pass over a prompt that has one."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.multimodal import EncoderInput, MultimodalInputs
from inflight.execution.hf.hook import MASKED, attend_with, with_attention
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.multimodal.encoder import OUTPUTS, CaughtOutput, answering, arguments, output_of, rows_of
from inflight.execution.multimodal.placing import Placing
from inflight.execution.multimodal.sequence_inputs import SequenceInputs

NUM_AROUND = 8
"""Tokens around an item, and rows of logits that are compared."""
MAX_PLACES = 32
"""Placeholders of the item that are looked at."""


@dataclass(slots=True)
class Seen:
    """Which tokens of an item see each other.

    Attributes:
        ranges: the ranges of tokens that a model may take for an item, by name (`SequenceInputs.ranges`).
        by_call: for each attention call, whose ranges see each other; None: no tokens see any after them.
        window: the least of attention in which they do; None: there is none.
    """

    ranges: Mapping[str, Sequence[tuple[int, int]]]
    by_call: list[str | None] = field(default_factory=list)
    window: int | None = None

    def look(self, mask: Tensor | None, num_tokens: int, window: int | None) -> bool:
        """Note the mask `[1, 1, T, T]` of the next attention call. Returns whether it is understood."""
        found = None
        if mask is not None and (mask[0, 0] >= 0).triu(1).any():
            every = torch.ones(num_tokens, num_tokens, dtype=torch.bool)
            width = window or num_tokens
            alike = (
                name
                for name, ranges in self.ranges.items()
                if torch.equal(mask[0, 0] >= 0, (every.tril() | _within(ranges, num_tokens)).triu(1 - width))
            )
            found = next(alike, None)
            if found is None:
                return False
            if window is not None:  # items that are longer might be seen beyond the window
                self.window = min(self.window or window, window)
        self.by_call.append(found)
        return True


class Proof:
    """Runs a model over one item of a prompt, with a few tokens around it.

    Args:
        output: of the encoder, for the item.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        token_ids: Sequence[int],
        sequence: SequenceInputs,
        item: EncoderInput,
        output: ModelOutput,
    ) -> None:
        self._model, self._output = model, output
        begin, end = item.places[0], item.places[-1] + 1
        before = max((each.places[-1] + 1 for each in sequence.given.items if each.places[-1] < begin), default=0)
        after = min((each.places[0] for each in sequence.given.items if each.places[0] >= end), default=len(token_ids))
        number = len(item.places) if isinstance(output, CaughtOutput) else min(len(item.places), MAX_PLACES)
        start, stop, last = max(before, begin - NUM_AROUND), min(end + NUM_AROUND, after), item.places[number - 1]
        kept = [*range(start, last + 1), *range(end, stop)]
        self._token_ids = torch.tensor([token_ids[each] for each in kept], device=model.device)
        own = replace(item, places=[place - start for place in item.places[:number]])
        types = {name: each[kept] for name, each in sequence.types.items()}
        self._sequence = SequenceInputs(MultimodalInputs([own]), sequence.positions[:, kept], types)
        self._rows = {layer: each[:number] for layer, each in rows_of(output).items()}
        self.item = own

    def allows(self, placing: Placing) -> bool:
        """Whether logits have the same bits with rows that are placed."""
        return placing.fits(self._rows) and torch.equal(self._run(1, placing), self._run(1))

    def seen(self) -> Seen:
        """Which of the item's tokens see each other, by the model's masks for two such items. Raises `ModelError` if a
        token sees anything after it that is not of the same item."""
        seen = Seen(self._sequence.ranges(self.item.kind, 0, len(self._token_ids), 2))
        self._run(2, seen=seen)
        return seen

    @torch.inference_mode()
    def _run(self, number: int, placing: Placing | None = None, seen: Seen | None = None) -> Tensor:
        """The logits `[1, n, V]` for this many copies of the tokens, if possible only the last."""
        row = self._token_ids.repeat(number)
        parameters = forward_parameters(self._model)
        options: dict[str, Any] = {}
        if seen is None and "logits_to_keep" in parameters:  # Gemma 4 masks only rows whose logits it keeps
            options["logits_to_keep"] = NUM_AROUND
        positions = self._sequence.positions.repeat(1, number)
        positions = torch.arange(len(row))[None] if len(positions) == 1 else positions[:, None]
        encoding: AbstractContextManager[None] = nullcontext()
        if placing is not None:
            placing.put([(self._rows, slice(None), torch.tensor(self.item.places))])
        else:
            for name, types in self._sequence.types.items():
                options[name] = types.repeat(1, number)
            is_caught = isinstance(self._output, CaughtOutput)
            output = self._output if is_caught else output_of(self._output, self._rows, number)
            if self.item.kind == "image" and OUTPUTS in parameters and not is_caught:
                options[OUTPUTS] = {self.item.kind: output}
            else:
                given = arguments(self._model, self.item, parameters)
                options |= {
                    name: each * number if isinstance(each, list) else torch.cat([each] * number)
                    for name, each in given.items()
                }
                if not is_caught:
                    encoding = answering(self._model, self.item.kind, output)

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
        ) -> Tensor:
            is_seen = mask is not None or getattr(module, "is_causal", True)
            if seen is not None and not (is_seen and seen.look(mask, len(row), kwargs.get("sliding_window"))):
                name = type(self._model).__name__
                raise ModelError(f"{name} lets tokens see others after them that are not of the same {self.item.kind}")
            attended = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=kwargs.get("scaling"), enable_gqa=True
            )
            return attended.transpose(1, 2)

        with with_attention(self._model, MASKED), attend_with(attend), encoding:
            logits: Tensor = self._model(input_ids=row[None], position_ids=positions, use_cache=False, **options).logits
        return logits


def _within(ranges: Sequence[tuple[int, int]], length: int) -> Tensor:
    """Which tokens see each other, `[length, length]` bool, if those of each range do."""
    number = torch.full((length,), -1)
    for index, (start, end) in enumerate(ranges):
        number[start:end] = index
    return (number[:, None] == number) & (number >= 0)

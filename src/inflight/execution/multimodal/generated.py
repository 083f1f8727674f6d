"""`GeneratedSequences`: sequences that the model's own `generate` runs, a token at a time.

Those with images or sounds, if the model does more with these than to replace their tokens' embeddings, or does not run
packed; and all of a model that runs in no other way: whatever it does, `generate` does it. Such a sequence has its own
cache; the blocks of its tables stay empty.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.multimodal import Array
from inflight.contracts.step.plan import SlotAssignment, Span, StepPlan
from inflight.execution.hf.hook import with_attention
from inflight.execution.hf.load import SUPPRESSES
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.hf.model_class import prompts_decoder
from inflight.execution.hf.source import first_line
from inflight.execution.multimodal.encoder import load_encoders
from inflight.execution.multimodal.sequence_inputs import TYPES, as_argument, forget_positions
from inflight.execution.multimodal.turns import InTurns
from inflight.execution.ragged_batch import RaggedBatch
from inflight.host.garbage_collection import call_soon

ENDLESS = 10**9
BEGINS = ("bos_token_id", "decoder_start_token_id")


class GeneratedSequences:
    """Those of one model.

    Args:
        model: exclusively ours.
        attention: the attention implementation for them; None: the model's.
        takes_all: whether `generate` runs texts, too.

    Attributes:
        errors: by sequence id, why it failed in the last step.
    """

    def __init__(self, model: PreTrainedModel, attention: str | None, *, takes_all: bool = False) -> None:
        self.errors: dict[int, str] = {}
        self._model = model
        self._takes_all = takes_all
        self._attention = attention
        self._assigned: dict[int, SlotAssignment] = {}  # by slot, as all below
        self._token_ids: dict[int, list[int]] = {}
        self._running: dict[int, _Generate] = {}
        # Their threads have the model. Those of a process end with it.
        weakref.finalize(self, call_soon, partial(_end_all, self._running)).atexit = False

    def take(self, plan: StepPlan) -> None:
        """Track releases and assignments of slots."""
        for slot in plan.released_slots:
            self._assigned.pop(slot, None)
            self._end(slot)
        for each in plan.assignments:
            if self._takes_all or (each.multimodal is not None and each.multimodal.left_to_generate):
                self._assigned[each.slot] = each
                self._token_ids[each.slot] = list(each.token_ids)

    def has_any(self, batch: RaggedBatch) -> bool:
        """Whether a batch has such sequences."""
        return any(span.slot in self._assigned for span in batch.spans)

    def forward(self, batch: RaggedBatch, others: Callable[[RaggedBatch], Tensor], block_size: int) -> Tensor:
        """The logits `[R, V]` of a batch, of which `others` runs all other sequences."""
        spans, plan = batch.spans, batch.plan
        self.errors.clear()
        kept = [number for number, span in enumerate(spans) if span.slot not in self._assigned]
        if len(kept) == len(spans):
            return others(batch)
        logits = {span.sequence_id: self._run(span) for span in spans if span.slot in self._assigned}
        if kept:
            tables = tuple(tuple(table[number] for number in kept) for table in plan.tables)
            rest = replace(plan, spans=tuple(spans[number] for number in kept), tables=tables)
            of_rest = others(RaggedBatch.from_plan(rest, block_size, batch.input_ids.device))
            sizes = [span.num_logit_rows for span in rest.spans]
            logits |= {
                span.sequence_id: each for span, each in zip(rest.spans, torch.split(of_rest, sizes), strict=True)
            }
        else:
            nothing = RaggedBatch.empty(len(plan.tables), batch.input_ids.device)
            of_rest = others(replace(nothing, plan=replace(nothing.plan, copies=plan.copies)))
        for sequence_id in self.errors:
            logits[sequence_id] = of_rest.new_full((1, of_rest.shape[1]), torch.nan)
        wanted = [each for span in spans if (each := logits[span.sequence_id]) is not None]
        return torch.cat(wanted) if wanted else of_rest

    def _end(self, slot: int) -> None:
        if (running := self._running.pop(slot, None)) is not None:
            running.end()

    def _run(self, span: Span) -> Tensor | None:
        """The logits `[1, V]` of a span, in the model's dtype; None: it has no logit row, or an error. The prompt runs
        whole, with its last chunk."""
        slot, assigned, token_ids = span.slot, self._assigned[span.slot], self._token_ids[span.slot]
        token_ids[span.start :] = span.token_ids
        if not span.num_logit_rows:
            return None
        attention = nullcontext() if self._attention is None else with_attention(self._model, self._attention)
        running = self._running.get(slot)
        try:
            with attention:
                if running is None or running.length > span.end:
                    self._end(slot)
                    arrays = {} if assigned.multimodal is None else assigned.multimodal.arrays
                    running = _Generate(self._model, token_ids[: assigned.prompt_len], arrays)
                    self._running[slot] = running
                for token_id in token_ids[running.length :]:  # one, or those since a preemption
                    running.add(token_id)
                return running.logits.to(self._model.dtype)
        except Exception as error:  # the model's own code can raise anything
            self._end(slot)
            self.errors[span.sequence_id] = f"the model's generate fails: {first_line(error)}"
            return None


def _end_all(running: dict[int, "_Generate"]) -> None:
    while running:
        running.popitem()[1].end()


@contextmanager
def _plainly(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the model's `generate`, and those of models in it, neither end nor change a
    score, but for tokens that the model suppresses."""
    owners = [module for module in model.modules() if hasattr(module, "generation_config")]
    own = [module.generation_config for module in owners]
    for module, config in zip(owners, own, strict=True):
        kept = {name: getattr(config, name, None) for name in (*BEGINS, *SUPPRESSES)}
        module.generation_config = GenerationConfig(do_sample=False, **kept)
    try:
        yield
    finally:
        for module, config in zip(owners, own, strict=True):
            module.generation_config = config
        forget_positions(model)


class _Generate(LogitsProcessor):  # type: ignore[misc]
    """A call of `generate` that waits for each next token. Passes on what that raises.

    Args:
        arrays: its arguments besides the prompt.

    Attributes:
        length: the tokens that have run.
        logits: of the last token, `[1, V]` float32.
    """

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int], arrays: Mapping[str, Array]) -> None:
        load_encoders(model)
        names = forward_parameters(model)
        options: dict[str, Any] = {"input_ids": torch.tensor([list(prompt)], device=model.device)}
        for name, array in arrays.items():
            if name in names or not name.endswith(TYPES):  # only some models take types of tokens
                options[name] = as_argument(array, model.dtype)
        options |= {"max_new_tokens": ENDLESS, "logits_processor": LogitsProcessorList([self])}
        generate = model.generate
        if prompts_decoder(model):
            options["decoder_input_ids"] = options.pop("input_ids")
            generate = partial(GenerationMixin.generate, model)  # Whisper's own cuts sounds, and writes prompts
        self._turns = InTurns(lambda: generate(**options))
        self._next_id = 0
        self.length, self.logits = len(prompt), torch.empty(0)
        with _plainly(model):
            self._go_on()

    def add(self, token_id: int) -> None:
        """Run another token."""
        self._next_id = token_id
        self.length += 1
        self._go_on()

    def _go_on(self) -> None:
        self._turns.resume()
        if self._turns.has_ended:
            raise ModelError("it ends by itself")

    def end(self) -> None:
        """End it."""
        self._turns.abandon()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Within `generate`: hand out the scores `[1, V]`, and return some that allow the next token alone."""
        self.logits = scores
        self._turns.pause()
        only = torch.full_like(scores, -torch.inf)
        only[0, self._next_id] = 0
        return only

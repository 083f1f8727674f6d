"""The proof of executors that leave attention to the model: a ragged workload gives the plain model's logits.

Two short prompts run through the plain model one by one, without a cache, and through the executor: in chunks, beside
each other, token by token; then again with the slots exchanged, so that what a slot has kept shows itself. Since
nothing is looked at but logits, they must depend on their context: what another token far back changes about them has
to be many times what the executor changes.
"""

from array import array
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from inflight.contracts.errors import ModelError
from inflight.contracts.plan import Span, StepPlan
from inflight.execution.executors import Executor
from inflight.execution.hf.model_call import ModelCall
from inflight.execution.preparation.agreement import NotFiniteError, precision_of, relative_error
from inflight.execution.preparation.attention_calls import num_embeddings
from inflight.execution.ragged_batch import RaggedBatch

PROOF_BLOCK_SIZE = 4
NUM_PROOF_BLOCKS = 32
NUM_PROOF_SLOTS = 2
NOISE_MARGIN = 20
"""How many times what one rounding does to its logits a model may differ that rounds in every layer."""
MIN_EFFECT = 20
"""How many times the error what the context does to logits must be."""

Step: TypeAlias = tuple[tuple[int, int, int], ...]
"""Of which prompt, from where, to where."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What runs.

    Attributes:
        lengths: of the two prompts.
        prefill_lengths: of what comes first of each; what follows comes token by token.
        steps: what runs together.
        slots: of the prompts, one run of the steps after the other.
    """

    lengths: tuple[int, int]
    prefill_lengths: tuple[int, int]
    steps: tuple[Step, ...]
    slots: tuple[tuple[int, int], ...]


PROOF = Workload(
    lengths=(23, 11),
    prefill_lengths=(20, 9),
    steps=(
        ((0, 0, 9), (1, 0, 6)),
        ((1, 6, 9), (0, 9, 20)),
        ((0, 20, 21), (1, 9, 10)),
        ((1, 10, 11), (0, 21, 22)),
        ((0, 22, 23),),
    ),
    slots=((0, 1), (1, 0)),
)
CHUNKS = frozenset({(0, 9), (1, 6), (1, 9)})
"""Spans of which no logits are wanted in service, by prompt and end: so the second prompt's last token comes alone."""
IN_SHORT = Workload(
    lengths=(9, 7), prefill_lengths=(9, 6), steps=(((0, 0, 4), (1, 0, 6)), ((0, 4, 9), (1, 6, 7))), slots=((0, 1),)
)
"""Two chunks; the next chunk beside a decode. For what was proved before and is only compared."""


class NotCausalError(ModelError):
    """Later tokens change what a model makes of earlier ones."""


@dataclass(frozen=True, slots=True)
class PlainModel:
    """What a model gives when it runs alone.

    Attributes:
        model: that one.
        workload: what it was run on.
        prompts: its prompts.
        logits: `[L, V]` of each.
        noise: what rounding does to the logits, as far as it is seen from its embeddings rounded anew. Deep state
            spaces make much of it.
        vocab_size: token ids that can be fed and can come out.
        effect: what another token far back changes about the last logits, relative to their size; None: not measured.
        is_generated: whether the logits are those that `model.generate` sees.
    """

    model: PreTrainedModel
    workload: Workload
    prompts: tuple[tuple[int, ...], ...]
    logits: tuple[torch.Tensor, ...]
    noise: float
    vocab_size: int
    effect: float | None = None
    is_generated: bool = False

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel, workload: Workload = PROOF) -> "PlainModel":
        """Run it. Raises `NotFiniteError` if its logits are not finite."""
        vocab_size = num_embeddings(model)
        generator = torch.Generator().manual_seed(0)
        prompts = tuple(
            tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()) for length in workload.lengths
        )
        logits = tuple(_plain_logits(model, prompt) for prompt in prompts)
        if not all(torch.isfinite(each).all() for each in logits):
            raise NotFiniteError(model)
        noise = relative_error(_rounded_logits(model, prompts[0]), logits[0])
        return cls(model, workload, prompts, logits, noise, min(vocab_size, logits[0].shape[-1]))

    @torch.inference_mode()
    def with_effect(self) -> "PlainModel":
        """The same, to prove something on. Raises `NotCausalError` if it is no causal language model."""
        model, first, logits = self.model, self.prompts[0], self.logits[0]
        begun = _plain_logits(model, first[:15])
        if relative_error(begun, logits[:15]) > max(10 * precision_of(model).logits, NOISE_MARGIN * self.noise):
            name = type(model).__name__
            raise NotCausalError(f"{name} is no causal language model: later tokens change the logits of earlier ones")
        changed = (*first[:3], (first[3] + 1) % num_embeddings(model), *first[4:])
        return replace(self, effect=relative_error(_plain_logits(model, changed)[-8:], logits[-8:]))

    def as_generated(self) -> "PlainModel":
        """The same with the logits that `model.generate` sees: of a prompt in one piece, then token by token, with the
        model's own cache. (State spaces whose two ways of computing differ give others than in one forward pass.)
        Raises `ModelError` if the model has no cache."""
        try:
            pairs = zip(self.prompts, self.workload.prefill_lengths, strict=True)
            logits = tuple(_generated_logits(self.model, prompt, length) for prompt, length in pairs)
        except Exception as error:
            raise ModelError(f"it does not run with its own cache: {type(error).__name__}: {error}") from error
        return replace(self, logits=logits, is_generated=True)

    def given_by(self, executor: Executor) -> "PlainModel":
        """The same, in short, with the logits that an executor gives."""
        executor.allocate(NUM_PROOF_BLOCKS)
        prompts = tuple(prompt[:length] for prompt, length in zip(self.prompts, IN_SHORT.lengths, strict=True))
        logits = _logits_of(executor, prompts, IN_SHORT.steps, IN_SHORT.slots[0])
        return replace(self, workload=IN_SHORT, prompts=prompts, logits=logits)


def prove(executor: Executor, plain: PlainModel, tolerance: float) -> float:
    """The executor's largest relative error. Raises `ModelError` if it is beyond `tolerance`, or proves nothing.

    Args:
        plain: with its effect.
    """
    assert plain.effect is not None
    error = compare(executor, plain, tolerance)
    if error * MIN_EFFECT > plain.effect:
        raise ModelError(
            f"nothing can be proved: the context changes its logits by {plain.effect:.1e} of their size only, and they "
            f"differ by {error:.1e}"
        )
    return error


def compare(executor: Executor, plain: PlainModel, tolerance: float) -> float:
    """The executor's largest relative error. Raises `ModelError` if it is beyond `tolerance`."""
    executor.allocate(NUM_PROOF_BLOCKS)
    error = 0.0
    for slots in plain.workload.slots:
        logits = _logits_of(executor, plain.prompts, plain.workload.steps, slots)
        error = max(error, *map(relative_error, logits, plain.logits))
    if not error <= tolerance:
        raise ModelError(f"its logits differ by {error:.1e} of their size ({tolerance:.0e} is allowed)")
    if plain.workload is PROOF:
        _check_few_logits(executor, plain, tolerance)
    return error


def _logits_of(
    executor: Executor, prompts: Sequence[Sequence[int]], steps: Sequence[Step], slots: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for batch, spans in _steps(prompts, steps, slots, executor.model.device):
        rows = executor.forward(batch).split([span.length for span in spans])  # type: ignore[no-untyped-call]
        for span, row in zip(spans, rows, strict=True):
            logits[span.sequence_id].append(row)
    return tuple(map(torch.cat, logits))


def _check_few_logits(executor: Executor, plain: PlainModel, tolerance: float) -> None:
    """As in service: of a chunk no logits are wanted, of a span's end one row."""
    actual = []
    chunks = CHUNKS - {(1, PROOF.prefill_lengths[1])} if plain.is_generated else CHUNKS
    for batch, spans in _steps(plain.prompts, PROOF.steps, (0, 1), executor.model.device, chunks):
        rows = executor.forward(batch).split([span.num_logit_rows for span in spans])  # type: ignore[no-untyped-call]
        actual += [
            row for span, row in zip(spans, rows, strict=True) if span.end == len(plain.prompts[span.sequence_id])
        ]
    expected = torch.stack([plain.logits[1][-1], plain.logits[0][-1]])
    if not relative_error(torch.cat(actual), expected) <= tolerance:
        raise ModelError("it gives other rows of logits than those it is asked for")


def _steps(
    prompts: Sequence[Sequence[int]],
    steps: Sequence[Step],
    slots: Sequence[int],
    device: torch.device,
    chunks: Set[tuple[int, int]] | None = None,
) -> Iterator[tuple[RaggedBatch, tuple[Span, ...]]]:
    """The steps, over scattered blocks; with all logits, or with none of `chunks` and one of each other span."""
    tables = [array("i", range(number, NUM_PROOF_BLOCKS, len(prompts))) for number in range(len(prompts))]
    for step in steps:
        spans = tuple(
            Span(number, slots[number], start, list(prompts[number][start:end]), end - start, len(prompts[number]))
            for number, start, end in step
        )
        if chunks is not None:
            spans = tuple(
                replace(span, num_logit_rows=int((span.sequence_id, span.end) not in chunks)) for span in spans
            )
        plan = StepPlan(spans, (tuple(tables[number] for number, _, _ in step),))
        yield RaggedBatch.from_plan(plan, PROOF_BLOCK_SIZE, device), spans


def _plain_logits(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    tokens = torch.tensor([list(prompt)], device=model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits
    return logits[0]


def _rounded_logits(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """The logits `[L, V]` from embeddings of which every second number is the next one that its dtype has."""

    def round_anew(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        every_second = torch.arange(output.shape[-1], device=output.device) % 2
        return output * (1 + every_second * torch.finfo(output.dtype).eps).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(round_anew)
    try:
        return _plain_logits(model, prompt)
    finally:
        hook.remove()


@torch.inference_mode()
def _generated_logits(model: PreTrainedModel, prompt: Sequence[int], prefill_length: int) -> torch.Tensor:
    call, cache, logits = ModelCall(model), None, []
    for start, end in ((0, prefill_length), *((i, i + 1) for i in range(prefill_length, len(prompt)))):
        outputs = call.outputs(np.array([prompt[start:end]]), None, None, cache, end - start)
        cache = call.cache_of(outputs)
        logits.append(outputs.logits[0])
    return torch.cat(logits)

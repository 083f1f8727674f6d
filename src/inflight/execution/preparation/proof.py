"""The proof harness: an executor must match the reference's logits on a ragged workload.

Two short prompts run through the reference one by one, without a cache. Then they run through the executor: in chunks,
mixed, token by token, over scattered blocks; and again with their slots exchanged, to find leftover state.
`packed_proof` also observes the attention modules. `own_attention` compares only logits, so these must depend on the
context: a change of a token far back must have many times the effect of the executor.

Relative errors, measured on the tiny models of `tests/zoo.py` and on default-initialised ones, on a CPU:

| error | good models | broken ones | allowed |
|---|---|---|---|
| attention, float32 | up to 4e-7 | 2e-3 (scale off by 10 %) to 2 | 2e-5 |
| attention, bfloat16 | up to 9e-3 | 5e-2 (scale 4 times too large) to 2; 10 % off goes unnoticed | 3e-2 |
| logits, float32 | up to 4e-7 | 5e-4 to 1 | 2e-5 |
| isolation, float32 | 0, mixtures of experts up to 3e-7 | 7e-4 to 0.1 | 2e-5 |
| isolation, bfloat16 | 0 | 4e-3 to 0.1 | 1e-3 |

A sharp softmax and many layers amplify rounding. So a float32 model beyond these limits may differ by 20 times the
effect of one more rounding of its inputs, but never by more than a bfloat16 model; attention that is wrong by 1 % is
still refused in the sharpest model of the tests. Rows and sequential are proved by logits alone, where the effect of a
far token must be at least `MIN_EFFECT` times the error; in low precision agreement within 0.2 suffices.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.executors import Executor
from inflight.execution.plain_linear import PlainLinears
from inflight.execution.pooling.states_model import gives_states
from inflight.execution.preparation.agreement import (
    NOISE_MARGIN,
    NotFiniteError,
    as_model_error,
    embeddings_rounded_again,
    precision_of,
    relative_error,
    worst,
)
from inflight.execution.preparation.attention_calls import num_embeddings
from inflight.execution.ragged_batch import RaggedBatch

PROOF_BLOCK_SIZE = 4
NUM_PROOF_BLOCKS = 32
NUM_PROOF_SLOTS = 2
PADDING_PLACE = 4
"""The positions of the model's padding token in proof prompts, where it is an ordinary token."""
MIN_EFFECT = 20
"""The least ratio of the context's effect to the error."""

Step: TypeAlias = tuple[tuple[int, int, int], ...]
"""Spans that run together, each as (prompt, start, end)."""
Forward: TypeAlias = Callable[[RaggedBatch], torch.Tensor]
"""Returns a batch's logits `[R, V]`."""


@dataclass(frozen=True, slots=True)
class ProofWorkload:
    """The workload.

    Attributes:
        lengths: of the two prompts.
        prefill_lengths: tokens of each that `model.generate` would compute at once; the rest follows token by token.
        steps: the spans of each step, in order.
        slots: the slots of the two prompts; the steps run once for each pair.
    """

    lengths: tuple[int, int]
    prefill_lengths: tuple[int, int]
    steps: tuple[Step, ...]
    slots: tuple[tuple[int, int], ...]

    def in_whole_prompts(self) -> "ProofWorkload":
        """The same prompts, each in one piece."""
        return replace(self, steps=(tuple((number, 0, length) for number, length in enumerate(self.lengths)),))


PROOF = ProofWorkload(
    lengths=(23, 12),
    prefill_lengths=(20, 9),
    steps=(
        ((0, 0, 9), (1, 0, 6)),  # two chunks
        ((1, 6, 9), (0, 9, 13)),  # two later chunks, in the other order
        ((1, 9, 10), (0, 13, 20)),  # a decode beside a chunk
        ((0, 20, 21), (1, 10, 11)),  # two decodes
        ((1, 11, 12), (0, 21, 22)),  # two decodes, in the other order
        ((0, 22, 23),),  # a decode alone
    ),
    slots=((0, 1), (1, 0)),
)
CHUNKS = frozenset({(0, 9), (0, 13), (1, 6), (1, 9)})
"""Spans of `PROOF`, as (prompt, end), that need no logits in service. The second prompt is one token longer than its
chunks, so its last token comes alone."""
IN_A_ROW = replace(
    PROOF, steps=(((0, 0, 9), (1, 0, 6)), ((1, 6, 11), (0, 9, 13)), ((1, 11, 12), (0, 13, 23))), slots=((0, 1),)
)
"""Two chunks; two later chunks; a decode beside a chunk. For a packed row, where a step's tokens are compared together:
in low precision, attention outputs of one or two tokens round too differently alone."""
IN_SHORT = ProofWorkload(
    lengths=(12, 12),
    prefill_lengths=(12, 11),
    steps=(((0, 0, 5), (1, 0, 11)), ((1, 11, 12), (0, 5, 12))),
    slots=((0, 1),),
)
"""Two chunks; then a decode beside a chunk. For comparisons after a proof. The prompts are equally long, so that a
large model can run both in one forward pass."""


class NotCausalError(ModelError):
    """A model whose later tokens change the logits of earlier ones."""


@dataclass(frozen=True, slots=True)
class PlainModel:
    """The reference: a model's results when it runs alone.

    Attributes:
        prompts: the token ids of each prompt.
        logits: `[L, V]` of each prompt.
        vocab_size: the lesser of embedding rows and logit columns: token ids valid as input and output.
        noise: the relative error of logits after rounding the embeddings once more. Deep state spaces amplify it. 0 if
            not measured.
        effect: the relative change of the last logits when a token far back changes; None: not measured.
        is_generated: whether the logits are those that `model.generate` sees.
    """

    model: PreTrainedModel
    workload: ProofWorkload
    prompts: tuple[tuple[int, ...], ...]
    logits: tuple[torch.Tensor, ...]
    vocab_size: int
    noise: float = 0.0
    effect: float | None = None
    is_generated: bool = False

    @classmethod
    def run(cls, model: PreTrainedModel, workload: ProofWorkload = PROOF, *, together: bool = False) -> "PlainModel":
        """Run `model` on a workload's prompts. Raises `NotFiniteError` if its logits are not finite.

        Args:
            together: whether prompts, which are equally long, run as rows of one forward pass.
        """
        vocab_size = num_embeddings(model)
        prompts = tuple(with_padding(model, each) for each in draw_prompts(vocab_size, workload.lengths))
        groups = [prompts] if together else [(prompt,) for prompt in prompts]
        logits = tuple(rows for group in groups for rows in plain_logits(model, *group))
        if not all(torch.isfinite(each).all() for each in logits):
            raise NotFiniteError(model)
        num_columns = vocab_size if gives_states(model) else logits[0].shape[-1]
        return cls(model, workload, prompts, logits, min(vocab_size, num_columns))

    def with_noise(self) -> "PlainModel":
        """The same, with `noise` measured."""
        with embeddings_rounded_again(self.model):
            (rounded,) = plain_logits(self.model, self.prompts[0])
        return replace(self, noise=relative_error(rounded, self.logits[0]))

    def with_effect(self) -> "PlainModel":
        """The same, with `noise` and `effect` measured. Raises `NotCausalError` if the model is not causal."""
        plain, prompt, logits = self.with_noise(), self.prompts[0], self.logits[0]
        (begun,) = plain_logits(self.model, prompt[:15])
        allowed = max(10 * precision_of(self.model).logits, NOISE_MARGIN * plain.noise)
        if not gives_states(self.model) and relative_error(begun, logits[:15]) > allowed:
            name = type(self.model).__name__
            raise NotCausalError(f"{name} is no causal language model: later tokens change the logits of earlier ones")
        (changed,) = plain_logits(self.model, self._changed_prompt())
        return replace(plain, effect=relative_error(changed[-8:], logits[-8:]))

    def _changed_prompt(self) -> tuple[int, ...]:
        """The first prompt with another token far back."""
        prompt = self.prompts[0]
        return (*prompt[:3], (prompt[3] + 1) % num_embeddings(self.model), *prompt[4:])

    def as_generated(self) -> "PlainModel":
        """The same, with the logits that `model.generate` sees: the beginning of each prompt at once, the rest token by
        token, over the model's own cache. (State spaces with two algorithms differ from one forward pass.) Raises
        `ModelError` if the model does not generate."""
        prefills = self.workload.prefill_lengths
        ends = [_generated_logits(self.model, *each) for each in zip(self.prompts, prefills, strict=True)]
        beginnings = (logits[: length - 1] for logits, length in zip(self.logits, prefills, strict=True))
        effect = None
        if self.effect is not None:
            changed = _generated_logits(self.model, self._changed_prompt(), prefills[0])
            effect = relative_error(changed[1:], ends[0][1:])  # tokens that need the cache
        return replace(
            self, logits=tuple(map(torch.cat, zip(beginnings, ends, strict=True))), effect=effect, is_generated=True
        )

    def generate_difference(self) -> float:
        """The relative error of the logits that `model.generate` sees for the first prompt; 0 if within the tolerance,
        or if the model does not generate."""
        prompt, length = self.prompts[0], self.workload.prefill_lengths[0]
        if gives_states(self.model):
            return 0.0
        try:
            error = relative_error(_generated_logits(self.model, prompt, length), self.logits[0][length - 1 :])
        except ModelError:
            return 0.0
        return 0.0 if error <= max(precision_of(self.model).logits, NOISE_MARGIN * self.noise) else error

    def error_of(self, forward: Forward, slots: Sequence[int] = (0, 1)) -> float:
        """The largest relative error of a span's logits when `forward` runs the workload."""
        spans = run(forward, batches_of(self.prompts, self.workload.steps, self.model.device, slots))
        return worst(relative_error(rows, self.logits[span.sequence_id][span.start : span.end]) for span, rows in spans)


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
    error = worst(plain.error_of(executor.forward, slots) for slots in plain.workload.slots)
    if not error <= tolerance:
        raise ModelError(f"its logits differ by {error:.1e} of their size ({tolerance:.0e} is allowed)")
    if plain.workload is PROOF:
        _check_few_logits(executor, plain, tolerance)
    return error


def _check_few_logits(executor: Executor, plain: PlainModel, tolerance: float) -> None:
    """Request logits as in service: none for a chunk, one row at the end of any other span."""
    # Do not cut what `model.generate` computes at once before its last token, which would come as a decode.
    chunks = CHUNKS - {(1, PROOF.prefill_lengths[1])} if plain.is_generated else CHUNKS
    spans = run(executor.forward, batches_of(plain.prompts, PROOF.steps, plain.model.device, chunks=chunks))
    expected = ((rows, plain.logits[span.sequence_id][span.end - 1 : span.end]) for span, rows in spans if len(rows))
    if not worst(relative_error(*pair) for pair in expected) <= tolerance:
        raise ModelError("it gives other rows of logits than those it is asked for")


# ------------------------------------------------------------------------------------------- running


def draw_prompts(vocab_size: int, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Random prompts of these lengths, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    return tuple(tuple(torch.randint(vocab_size, (each,), generator=generator).tolist()) for each in lengths)


def with_padding(model: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The prompt with the model's padding token in it, to which some models give no position (RoBERTa)."""
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    if not isinstance(padding, int) or not 0 <= padding < num_embeddings(model):
        return prompt
    return (*prompt[:PADDING_PLACE], padding, *prompt[PADDING_PLACE + 1 :])


def batches_of(
    prompts: Sequence[Sequence[int]],
    steps: Sequence[Step],
    device: torch.device,
    slots: Sequence[int] = (0, 1),
    chunks: Set[tuple[int, int]] | None = None,
) -> Iterator[RaggedBatch]:
    """The batches of `steps`, over blocks that alternate between the prompts.

    Args:
        slots: of the prompts.
        chunks: None: all logits; otherwise none for these spans, given as (prompt, end), and the last row of each other
            one.
    """
    tables = [array("i", range(number, NUM_PROOF_BLOCKS, len(prompts))) for number in range(len(prompts))]
    for step in steps:
        spans = []
        for number, start, end in step:
            num_logit_rows = end - start if chunks is None else int((number, end) not in chunks)
            token_ids = list(prompts[number][start:end])
            spans.append(Span(number, slots[number], start, token_ids, num_logit_rows, len(prompts[number])))
        plan = StepPlan(tuple(spans), (tuple(tables[number] for number, _, _ in step),))
        yield RaggedBatch.from_plan(plan, PROOF_BLOCK_SIZE, device)


def run(forward: Forward, batches: Iterable[RaggedBatch]) -> Iterator[tuple[Span, torch.Tensor]]:
    """Each span of the batches, with its logits `[num_logit_rows, V]`, in the dtype of `forward`."""
    for batch in batches:
        rows = forward(batch).split([span.num_logit_rows for span in batch.spans])  # type: ignore[no-untyped-call]
        yield from zip(batch.spans, rows, strict=True)


def logits_of(forward: Forward, batches: Iterable[RaggedBatch]) -> tuple[torch.Tensor, ...]:
    """The logits `[L, V]` of each prompt, in the dtype of `forward`, concatenated from its spans."""
    logits: dict[int, list[torch.Tensor]] = {}
    for span, rows in run(forward, batches):
        logits.setdefault(span.sequence_id, []).append(rows)
    return tuple(torch.cat(logits[number]) for number in sorted(logits))


@torch.inference_mode()
def plain_logits(
    model: PreTrainedModel, *prompts: Sequence[int], positions: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits `[B, L, V]`, in the model's dtype, of a call with these positions `[L]` int64, or without, since some
    models count their own."""
    tokens = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    options = {} if positions is None else {"position_ids": positions.to(model.device)[None]}
    with PlainLinears():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False, return_dict=True, **options).logits
    return logits


class _ForcedTokens(LogitsProcessor):  # type: ignore[misc]
    """Forces `generate` to choose these tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Token ids `[1, L]` int64 and scores `[1, V]` to new scores `[1, V]`: 0 for the next forced token, -inf for
        others."""
        chosen = torch.full_like(scores, -torch.inf)
        length = input_ids.shape[1]
        chosen[:, self._token_ids[length] if length < len(self._token_ids) else 0] = 0.0
        return chosen


def _generated_logits(model: PreTrainedModel, prompt: Sequence[int], prefill_length: int) -> torch.Tensor:
    """The logits `[L - prefill_length + 1, V]` after the last tokens of a prompt when `model.generate` gets its
    beginning and is forced to choose the rest, without our code. Raises `ModelError` if the model does not generate."""
    asked = GenerationConfig(
        max_new_tokens=len(prompt) - prefill_length + 1,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    beginning = torch.tensor([list(prompt[:prefill_length])], device=model.device)
    of_the_model, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with as_model_error("it does not generate: "):
            given = model.generate(beginning, generation_config=asked, logits_processor=[_ForcedTokens(prompt)])
    finally:
        model.generation_config = of_the_model
    return torch.cat(given.logits)

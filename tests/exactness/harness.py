"""How exactness is measured: the engine against the plain model, teacher-forced on the plain model's own tokens.

The engine runs for real (scheduling, chunks, paging, preemption), but its sampler is replaced by a teacher that keeps
each row of logits and hands back the plain model's token. So one run gives the engine's logits at every output position
of every request, and the token that it would choose.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.cache_layout import ALL_TOKENS, CacheGroup, CacheLayout
from inflight.contracts.step.plan import SlotAssignment
from inflight.contracts.step.record import StepRecord
from inflight.engine.engine import Engine
from inflight.execution.ragged_batch import RaggedBatch
from tests import others, zoo
from tests.speculation.oracle import Oracle, make_it_ask

NUM_REQUESTS = 40
MAX_LOGIT_DIFFERENCE = 3e-5
"""Of the range of the reference's logits. With AVX2 the plain Qwen 3 Next is up to 1.7e-5 from its results in float64,
the engine up to 1.2e-5, and one up to 2.1e-5 from the other."""
MAX_SHARE_OF_TIES = 0.005
MIN_GAP = 1e-4  # of that range, between the two best tokens: far above CPU noise


@dataclass(frozen=True)
class Reference:
    """The tokens that follow a prompt (greedy or a teacher's), and the plain model's logits `[tokens, V]` for them."""

    prompt: list[int]
    tokens: list[int]
    logits: Tensor


@cache
def references(name: str) -> list[Reference]:
    """Requests of mixed lengths for a zoo model, with the plain model's answers."""
    return make_references(name, others.build(name))


def make_references(name: str, model: PreTrainedModel, number: int = NUM_REQUESTS) -> list[Reference]:
    """The same for a model of that architecture on any device."""
    lengths, rng = random.Random(name), random.Random(name)
    made = []
    for place in range(number):
        at_edges = (1, 2, 7, 16, 17, 31, 32, 33, 50, 64, 90)  # of blocks and windows
        length = lengths.choice(at_edges) if place % 2 else lengths.randint(1, 100)
        num_tokens = lengths.randint(1, 24)
        while True:
            prompt = [rng.randrange(zoo.VOCAB_SIZE) for _ in range(length)]
            reference = make_reference(name, model, prompt, zoo.plain_greedy(model, prompt, num_tokens))
            if is_clear(reference):
                break
        made.append(reference)
    return made


def make_reference(name: str, model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Reference:
    """The plain model's logits for one prompt and these tokens after it."""
    return Reference(prompt, tokens, _logits_behind(name, model, prompt, tokens).cpu())


def is_clear(reference: Reference) -> bool:
    """Whether the best token of each row leads the second best by enough that all CPUs agree."""
    spread = reference.logits.max() - reference.logits.min()
    best = reference.logits.topk(2, dim=-1).values
    return bool((best[:, 0] - best[:, 1]).min() > MIN_GAP * spread)


def _logits_behind(name: str, model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    everything = prompt + tokens
    logits = zoo.plain_logits(model, everything)[len(prompt) - 1 : -1]
    limit = zoo.ORIGINAL_MAX_POSITIONS
    if name == "phi3_longrope" and len(prompt) <= limit < len(everything):
        # Tokens chosen before the sequence outgrew the short frequencies were computed with those.
        num_short = limit - len(prompt) + 1
        logits = torch.cat([zoo.plain_logits(model, everything[:limit])[len(prompt) - 1 :], logits[num_short:]])
    return logits


def num_blocks_for(name: str, num_tokens: int, *, block_size: int, budget: int) -> int:
    """The largest number of blocks that a sequence of a zoo model takes if computed in spans of up to `budget`."""
    return CacheLayout(block_size, _cache_groups(name), budget).max_num_blocks(num_tokens)


@cache
def _cache_groups(name: str) -> Sequence[CacheGroup]:
    return Engine(
        others.build(name), EngineConfig(num_blocks=1, record_forward=False)
    ).scheduler.block_pool.layout.groups


def has_windows(name: str) -> bool:
    """Whether some layers of a zoo model keep only a window. Then a span takes much more of the cache while it is
    computed than afterwards, so preemption is rare."""
    return any(group != ALL_TOKENS for group in _cache_groups(name))


class Teacher:
    """Replaces the engine's sampler and identifies requests by their seed. `logits`: by request and index; rows after a
    rejected draft token do not count."""

    def __init__(self, lessons: Sequence[Reference]) -> None:
        self.lessons = lessons
        self.logits: defaultdict[tuple[int, int], dict[int, Tensor]] = defaultdict(dict)
        self._pupils: dict[int, tuple[int, int, int]] = {}

    def assign(self, assignment: SlotAssignment) -> None:
        self._pupils[assignment.slot] = (assignment.seed, assignment.index, assignment.prompt_len)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._pupils.pop(slot, None)

    def sample(self, logits: Tensor, batch: RaggedBatch, masks: object = None) -> list[int]:
        tokens = []
        positions = zip(batch.logit_slots_host.tolist(), batch.logit_positions_host.tolist(), strict=True)
        for row, (slot, position) in enumerate(positions):
            request, index, prompt_len = self._pupils[slot]
            output_position = position + 1 - prompt_len
            lesson, rows = self.lessons[request].tokens, self.logits[request, index]
            follows_the_lesson = output_position == 0 or batch.logit_token_ids_host[row] == lesson[output_position - 1]
            if output_position > len(rows) or not follows_the_lesson:
                tokens.append(0)
                continue
            assert output_position == len(rows), "a token was computed twice"
            rows[output_position] = logits[row].cpu().clone()
            tokens.append(lesson[output_position])
        return tokens


@dataclass
class Run:
    """The results of one run of the engine."""

    largest_difference: float = 0.0
    num_requests: int = 0
    ties: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    num_preemptions: int = 0
    num_accepted_tokens: int = 0

    def count(self, kind: str) -> int:
        """The number of spans of this kind that ran."""
        return sum(span.kind == kind for record in self.records for span in record.spans)


def run_teacher_forced(
    model: PreTrainedModel, lessons: Sequence[Reference], *, drafts: bool = False, **options: Any
) -> Run:
    """Run all lessons through an engine for `model` with these options, and compare every row of logits with them.

    Args:
        drafts: whether there are draft tokens, right ones and wrong ones.
    """
    engine = Engine(model, EngineConfig(speculation="lookup" if drafts else "off", **options))
    teacher, run = Teacher(lessons), Run(num_requests=len(lessons))
    if drafts:
        know_the_lessons(engine, lessons)
    engine.runner.sampler = teacher  # type: ignore[assignment]
    engine.observer = run.records.append
    for number, lesson in enumerate(lessons):
        params = SamplingParams(temperature=0, max_tokens=len(lesson.tokens), seed=number, ignore_eos=True)
        engine.submit(engine.inputs.accept(str(number), lesson.prompt, params))
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.error is None, output.error
    run.num_preemptions = engine.scheduler.count.preemptions
    run.num_accepted_tokens = engine.scheduler.count.accepted_tokens
    engine.scheduler.block_pool.check([])
    for number, lesson in enumerate(lessons):
        rows = teacher.logits[number, 0]
        assert sorted(rows) == list(range(len(lesson.tokens))), "every output position is computed exactly once"
        measure(run, number, lesson, rows)
    return run


def know_the_lessons(engine: Engine, lessons: Sequence[Reference]) -> None:
    """Let the engine draft the lessons' tokens; half of the drafts are wrong."""
    make_it_ask(engine, Oracle([[*each.prompt, *each.tokens] for each in lessons], zoo.VOCAB_SIZE, 0.7))


def measure(run: Run, number: int, lesson: Reference, rows: dict[int, Tensor]) -> None:
    """Compare the logits at the first output positions of a request with its lesson."""
    logits = torch.stack([rows[position] for position in range(len(rows))])
    expected = lesson.logits[: len(rows)]
    spread = float(lesson.logits.max() - lesson.logits.min())
    difference = float((logits - expected).abs().max())
    run.largest_difference = max(run.largest_difference, difference / spread)
    best = expected.topk(2, dim=-1).values
    for position in (logits.argmax(-1) != expected.argmax(-1)).nonzero()[:, 0].tolist():
        gap = float(best[position, 0] - best[position, 1])
        found = f"request {number}, output {position}: the two best lie {gap:.1e} apart, noise is {difference:.1e}"
        (run.ties if gap < 2 * difference else run.wrong).append(found)


def assert_exact(run: Run) -> None:
    """Assert the contract for the results of a run; ties between two tokens are printed."""
    for tie in run.ties:
        print("tie:", tie)
    assert not run.wrong
    assert run.largest_difference <= MAX_LOGIT_DIFFERENCE
    assert len(run.ties) <= MAX_SHARE_OF_TIES * run.num_requests

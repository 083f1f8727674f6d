"""What speculation gains and costs: the same requests with and without it, in turn, in one process.

python -m benchmarks.speculation --model qwen3-0.6b --dtype bfloat16 [--quantization int8] --workloads edit,story,json

Models here have random weights, and would write nonsense. So a teacher says what comes next, once the engine's own
sampler has chosen: texts of the embedded model, and source files of this repository with some lines changed. Structured
output is the model's own. For the workload "draft" the embedded model drafts, and a pupil in its sampler is right
about 70 % of the tokens. The settings have a model of their own each, and one round that does not count; then rounds
are interleaved. Printed are medians over rounds, and the share of draft tokens that were right.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from benchmarks.peers.models import NAMED_MODELS, model_folder
from benchmarks.workloads import WORKLOADS
from inflight import LLM, SamplingParams, StructuredOutput
from inflight.contracts.step.plan import SlotAssignment
from inflight.demo_model import DEMO_MODEL
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.sampling.sampler import Sampler, TokenMasks

SOURCES = Path(__file__).resolve().parents[1] / "src" / "inflight"
SHARE_KNOWN = 0.7
"""How often a draft is right."""
SCHEMA = {
    "type": "object",
    "properties": {
        "identification_number_of_customer": {"type": "integer", "minimum": 0, "maximum": 9999},
        "preferred_method_of_payment": {"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
        "has_accepted_terms_and_conditions": {"type": "boolean"},
        "estimated_date_of_delivery": {"type": "string", "pattern": "^2026-[01][0-9]-[0-3][0-9]$"},
        "reason_for_cancellation_of_order": {"enum": ["not_cancelled", "out_of_stock", "changed_mind"]},
    },
    "required": [
        "identification_number_of_customer",
        "preferred_method_of_payment",
        "has_accepted_terms_and_conditions",
        "estimated_date_of_delivery",
        "reason_for_cancellation_of_order",
    ],
}


@dataclass(frozen=True)
class Lesson:
    """A prompt, and the tokens that follow it; None: the model's own."""

    prompt: list[int]
    output: list[int] | None
    params: SamplingParams


class Teacher(Sampler):
    """Chooses as ever, and then says what the lesson says instead."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs, torch.device("cpu"))
        self.lessons: Sequence[Lesson] = ()
        self._lesson_of: dict[int, Lesson] = {}

    def said(self, slot: int, place: int, otherwise: int) -> int:
        """What the lesson of a slot has at this place of its output."""
        output = self._lesson_of[slot].output
        return otherwise if output is None or place >= len(output) else output[place]

    def assign(self, assignment: SlotAssignment) -> None:
        super().assign(assignment)
        self._lesson_of[assignment.slot] = self.lessons[assignment.seed]

    def sample(self, logits: torch.Tensor, batch: RaggedBatch, masks: TokenMasks | None = None) -> list[int]:
        tokens = super().sample(logits, batch, masks)
        places = zip(batch.logit_slots_host.tolist(), batch.logit_positions_host.tolist(), strict=True)
        for row, (slot, position) in enumerate(places):
            tokens[row] = self.said(slot, position + 1 - len(self._lesson_of[slot].prompt), tokens[row])
        return tokens


class Pupil(Teacher):
    """Knows the lessons, but not well."""

    def said(self, slot: int, place: int, otherwise: int) -> int:
        """The same, or something else."""
        is_known = random.Random(f"{self.lessons[0].params.seed} {slot} {place}").random() < SHARE_KNOWN
        return super().said(slot, place, otherwise) if is_known else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"{', '.join(NAMED_MODELS)}, or what LLM takes")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--workloads", default=",".join(MAKERS))
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model = str(model_folder(given.model)) if given.model in NAMED_MODELS else given.model
    for name in given.workloads.split(","):
        num_slots, make = MAKERS[name]
        with_drafts = {"speculation": given.speculation}
        if name in DRAFTED:
            with_drafts = {"speculation": "draft", "draft_model": str(DEMO_MODEL)}
        llms = [
            LLM(
                model,
                str(DEMO_MODEL),
                dtype=given.dtype,
                quantization=given.quantization,
                max_num_seqs=num_slots,
                **options,
            )
            for options in ({"speculation": "off"}, with_drafts)
        ]
        print(compare(name, llms, make, given.rounds), flush=True)


def compare(name: str, llms: Sequence[LLM], make: Callable[[random.Random], list[Lesson]], num_rounds: int) -> str:
    """Run one workload without and with speculation; return a line of the table."""
    teachers = [Teacher(llm.engine.config.scheduling.max_num_seqs) for llm in llms]
    pupil = Pupil(llms[1].engine.config.scheduling.max_num_seqs)
    for llm, teacher in zip(llms, teachers, strict=True):
        llm.engine.runner.sampler = teacher
    if name in DRAFTED:
        speculation = llms[1].engine._speculation
        assert speculation is not None
        assert speculation._proposer is not None
        speculation._proposer._runner.sampler = pupil  # type: ignore[attr-defined]
    speeds: list[list[float]] = [[] for _ in llms]
    for round_number in range(num_rounds + 1):
        lessons = make(random.Random(f"{name}, round {round_number}"))
        for turn in range(len(llms)):
            number = (turn + round_number) % len(llms)
            teachers[number].lessons = pupil.lessons = lessons
            speed = run(llms[number], lessons)
            if round_number:
                speeds[number].append(speed)
    without, with_drafts = map(statistics.median, speeds)
    ratio = statistics.median(ours / plain for plain, ours in zip(*speeds, strict=True))
    stats = llms[1].engine.stats()
    return (
        f"{name:8} {without:8.1f} tokens/s without, {with_drafts:8.1f} with: {ratio:.2f} times "
        f"({min(speeds[1]):.1f} to {max(speeds[1]):.1f}); of {stats.num_draft_tokens} draft tokens "
        f"{stats.num_accepted_tokens / max(1, stats.num_draft_tokens):.0%} were right, "
        f"{stats.num_accepted_tokens / max(1, stats.num_generated_tokens):.0%} of all"
    )


def run(llm: LLM, lessons: Sequence[Lesson]) -> float:
    """Tokens/s of one round."""
    start = time.perf_counter()
    outputs = llm.generate([each.prompt for each in lessons], [each.params for each in lessons], use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def params(number: int, num_tokens: int) -> SamplingParams:
    """Greedy, with a fixed number of tokens; the seed tells the teacher which lesson it is."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=number)


# ------------------------------------------------------------------------------------------- workloads


def edit(rng: random.Random) -> list[Lesson]:
    """Part of a source file is written again, with one line of eight changed."""
    path = rng.choice(sorted(each for each in SOURCES.rglob("*.py") if each.stat().st_size > 6000))
    lines = path.read_text().splitlines(keepends=True)
    first = rng.randrange(len(lines) - 16)
    before, name = lines[first : first + 16], f"value_{rng.randrange(100)}"
    after = [each if rng.random() > 1 / 8 else f"{each.rstrip()}  # {name} is new here\n" for each in before]
    output = tokens_of("".join(after))
    return [Lesson(tokens_of("".join(before) + "\nThe same with comments:\n"), output, params(0, len(output)))]


def stories(number: int) -> Callable[[random.Random], list[Lesson]]:
    """Stories go on as the embedded model tells them."""

    def make(rng: random.Random) -> list[Lesson]:
        asked = [SamplingParams(max_tokens=200, seed=rng.randrange(1 << 30), ignore_eos=True) for _ in range(number)]
        outputs = storyteller().generate(["Once upon a time there was a"] * number, asked, use_tqdm=False)
        lessons = []
        for place, output in enumerate(outputs):
            told = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            lessons.append(Lesson(told[:32], told[32:], params(place, len(told) - 32)))
        return lessons

    return make


def structured(number: int) -> Callable[[random.Random], list[Lesson]]:
    """Objects with long keys, by a schema."""

    def make(rng: random.Random) -> list[Lesson]:
        asked = SamplingParams(
            temperature=0, max_tokens=200, structured_output=StructuredOutput(json_schema=json.dumps(SCHEMA))
        )
        return [
            Lesson([rng.randrange(300, 1000) for _ in range(32)], None, replace(asked, seed=each))
            for each in range(number)
        ]

    return make


def mixed(rng: random.Random) -> list[Lesson]:
    """W2: nothing ever repeats."""
    requests = WORKLOADS["W2-32"].requests(rng.randrange(1 << 30))
    return [
        Lesson(
            each.prompt,
            [rng.randrange(300, 20000) for _ in range(each.num_output_tokens)],
            params(number, each.num_output_tokens),
        )
        for number, each in enumerate(requests)
    ]


MAKERS: dict[str, tuple[int, Callable[[random.Random], list[Lesson]]]] = {
    "edit": (1, edit),
    "story": (1, stories(1)),
    "story-8": (8, stories(8)),
    "json": (1, structured(1)),
    "json-8": (8, structured(8)),
    "draft": (1, stories(1)),
    "draft-8": (8, stories(8)),
    "W2-32": (32, mixed),
}
"""Each workload's slots, and what makes its lessons."""


DRAFTED = ("draft", "draft-8")
"""Those with a draft model."""


@cache
def storyteller() -> LLM:
    """The embedded model, as it comes."""
    return LLM()


@cache
def tokenizer() -> object:
    """The embedded model's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(DEMO_MODEL))


def tokens_of(text: str) -> list[int]:
    """The text's tokens."""
    token_ids: list[int] = tokenizer().encode(text, add_special_tokens=False)  # type: ignore[attr-defined]
    return token_ids


if __name__ == "__main__":
    main()

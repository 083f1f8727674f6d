"""The exactness suite's architectures on a device: two stages of `python -m benchmarks.gpu_trial`.

Each case prints a line of JSON: its name, whether it passed, a figure, and the traceback of a failure.
"""

import argparse
import copy
import json
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from tests import zoo
from tests.exactness.harness import Reference, assert_exact, has_windows, make_references, num_blocks_for
from tests.exactness.harness import run_teacher_forced as run
from tests.invariance.test_invariance import REQUESTS, run_lessons

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 8, "max_num_seqs": 12, "num_blocks": 400},
    "preempted": {"max_num_batched_tokens": 64, "max_num_seqs": 12},
    "prefix hits": {"max_num_seqs": 4, "num_blocks": 900},
}


@cache
def subject(name: str, dtype: str, device: str) -> PreTrainedModel:
    return copy.deepcopy(zoo.build(name)).to(device, DTYPES[dtype])


@cache
def lessons_of(name: str, dtype: str, device: str, number: int) -> list[Reference]:
    """Prompts, tokens, and the plain model's logits on that device, in that dtype."""
    if dtype == "float32":
        return make_references(name, subject(name, dtype, device), number)
    model, made = subject(name, dtype, device), []
    for lesson in lessons_of(name, "float32", device, number):
        logits = zoo.plain_logits(model, lesson.prompt + lesson.tokens)[len(lesson.prompt) - 1 : -1]
        made.append(Reference(lesson.prompt, lesson.tokens, logits.float().cpu()))
    return made


def exactness(name: str, dtype: str, device: str, configuration: str, number: int) -> str:
    """Float32 keeps the contract; bfloat16 ends, is finite, and shows how far it is from the plain model."""
    lessons, options = lessons_of(name, dtype, device, number), dict(CONFIGURATIONS[configuration])
    if configuration == "preempted":
        options["num_blocks"] = num_blocks_for(name, 160, block_size=16, budget=64)
    if configuration == "prefix hits":
        lessons = lessons * 2
    result = run(subject(name, dtype, device), lessons, **options)
    num_computed = sum(span.length for record in result.records for span in record.spans)
    num_owed = sum(len(each.prompt) + len(each.tokens) - 1 for each in lessons)
    if configuration == "preempted":
        assert result.num_preemptions > 0 or has_windows(name), "no sequence was preempted"
    if configuration == "prefix hits":
        assert num_computed < num_owed, "no prefix was found"
    if dtype == "float32":
        assert_exact(result)
    else:
        assert result.largest_difference < 1.0, "the logits have nothing to do with the plain model's"
    other = f", {len(result.wrong)} other tokens" if result.wrong else ""
    return f"logits differ by {result.largest_difference:.1e} of their range{other}"


def invariance(name: str, dtype: str, device: str, number: int) -> str:
    """A batch-invariant model gives a request the same bits alone and in a batch."""
    model, requests = subject(name, dtype, device), REQUESTS[:number]
    alone, engine = run_lessons(model, requests, num_blocks=500, max_num_seqs=1, enable_prefix_caching=False)
    together, _ = run_lessons(model, requests, num_blocks=500, max_num_seqs=16, max_num_batched_tokens=100)
    different = sum(not torch.equal(logits, together[each]) for each, logits in alone.items())
    is_claimed = engine.model_info.is_batch_invariant
    assert not (is_claimed and different), f"{different} of {number} requests differ, though none is said to"
    return f"{different} of {number} requests differ; {'' if is_claimed else 'not '}claimed"


def cases(stage: str, names: list[str], device: str, number: int) -> Iterator[tuple[str, Callable[[], str]]]:
    for dtype in DTYPES:
        for name in names:
            if stage == "invariance":
                yield f"{name}, {dtype}", lambda n=name, d=dtype: invariance(n, d, device, number)  # type: ignore[misc]
                continue
            for configuration in CONFIGURATIONS:
                yield (
                    f"{name}, {dtype}, {configuration}",
                    lambda n=name, d=dtype, c=configuration: exactness(n, d, device, c, number),  # type: ignore[misc]
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("exactness", "invariance"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--architectures", default=",".join(zoo.ARCHITECTURES))
    parser.add_argument("--requests", type=int, default=16)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("highest")  # no TensorFloat-32
    for name, case in cases(given.stage, given.architectures.split(","), given.device, given.requests):
        said: dict[str, Any] = {"name": name, "is_ok": True}
        try:
            said["figure"] = case()
        except Exception as error:
            said |= {"is_ok": False, "figure": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()

"""Recorded runs of a small model without a tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.record import StepRecord
from inflight.engine.engine import Engine
from inflight.observe.recorder import Recorder, observe_with
from tests import zoo

SHARED = list(range(100, 112))
PROMPTS = ([7, 8, 9], list(range(20, 50)), [*SHARED, 1, 2], [*SHARED, 3], [5] * 8, list(range(60, 73)), [5] * 8)
NUM_TOKENS = (14, 9, 30, 1, 12, 25, 3)
TIGHT = {"max_num_seqs": 3, "max_num_batched_tokens": 10, "block_size": 4, "num_blocks": 13}
"""Options that cause chunks, preemptions and prefix hits."""


def params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0, **options})


def run_recorded(
    path: Path,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    num_tokens: Sequence[int] = NUM_TOKENS,
    n: int = 1,
    model: PreTrainedModel | None = None,
    **options: Any,
) -> list[StepRecord]:
    """Run all prompts together, write a recording, and return the records in order.

    Several sequences of a request are sampled, because equal sequences would share blocks of their answers, too.
    """
    engine = Engine(model or zoo.build("llama"), EngineConfig(**{"speculation": "off"} | (options or TIGHT)))
    records: list[StepRecord] = []
    with Recorder(path, engine.config, engine.model_info) as recorder:
        engine.observer = observe_with(recorder.observe, None, records.append)
        for number, (prompt, count) in enumerate(zip(prompts, num_tokens, strict=True)):
            engine.submit(engine.inputs.accept(f"<{number}>", prompt, params(count, n=n, temperature=float(n > 1))))
        while engine.has_unfinished_requests:
            engine.step()
    return records

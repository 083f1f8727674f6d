"""What recording costs: all work for a step's record, compared with a median step of the embedded model in bfloat16.

python benchmarks/record_cost.py
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from inflight import LLM
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.cache_layout import CacheLayout
from inflight.contracts.step.record import StepRecord
from inflight.engine.step_watch import StepWatch
from inflight.observe.recorder import Recorder, describe_machine
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.scheduler import Limits, Scheduler
from inflight.scheduling.sequence import Request

NUM_STEPS = 5000


def main() -> None:
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    print("slots   median step   record and write   share")
    for num_slots in (1, 8, 64):
        step, record = median_step(num_slots), record_cost(num_slots)
        print(f"{num_slots:5} {step * 1e3:10.2f} ms {record * 1e6:15.1f} us {record / step:7.2%}")


def median_step(num_slots: int) -> float:
    """Return the seconds of an unrecorded step in which every slot decodes."""
    llm = LLM(dtype="bfloat16", max_num_seqs=num_slots, speculation="off")
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    prompts = [[number % 1000 + 10] * 16 for number in range(num_slots)]
    seconds: list[float] = []
    before = time.perf_counter()
    for delta in llm.stream(prompts, params):
        if delta.prompt_index == 0:
            seconds.append(time.perf_counter() - before)
            before = time.perf_counter()
    return statistics.median(seconds[10:])


def record_cost(num_slots: int) -> float:
    """Return the mean seconds for the record of such a step, including writing the file."""
    scheduler = Scheduler(
        BlockPool(num_slots * 16, CacheLayout(16)), Limits(max_num_seqs=num_slots, max_num_batched_tokens=2048)
    )
    for number in range(num_slots):
        scheduler.submit(Request(str(number), [number] * 16, 200))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, [[1] for _ in plan.spans])
    plan = scheduler.plan()
    assert plan is not None
    watch, config = StepWatch(scheduler), LLM().engine.config
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder) / "recording", config) as recorder:
        start = time.process_time()
        for step in range(NUM_STEPS):
            record: StepRecord = watch.record(watch.observe_plan(plan), step, time.monotonic(), 0.004321)
            recorder.observe(record)
        return (time.process_time() - start) / NUM_STEPS


if __name__ == "__main__":
    main()

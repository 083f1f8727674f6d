"""`profile_decode`: fills an engine with sequences, lets them decode, and measures the steps.

Decides which steps are measured and how: in rounds, each of which measures the machine, runs some uncounted steps, then
whole steps and steps with a clock at each phase in turn, and then steps under the profiler (`step_profile` says how
they are combined). So disturbances by other programs are spread over all kinds of steps. Sequences grow as they decode;
they start so short that halfway through the measurement they have the requested number of cached tokens.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from inflight.contracts.api.params import SamplingParams
from inflight.engine.engine import Engine
from inflight.execution.weights.formats import find_format
from inflight.profiling.machine import MachineMeter
from inflight.profiling.operators import OperatorTimes, PhaseTimes, profile_operators, time_phases
from inflight.profiling.step_profile import StepProfile, take_apart
from inflight.profiling.work import decode_work, has_prepacked_linears

MAX_ROUNDS = 5
SETTLING_STEPS = 3
READINGS_PER_ROUND = 2
GREEDY = SamplingParams(temperature=0)


def profile_decode(
    engine: Engine,
    num_sequences: int,
    num_cached_tokens: int,
    num_steps: int,
    params: SamplingParams = GREEDY,
    announce: Callable[[float], None] = lambda seconds: None,
) -> StepProfile:
    """Measure decode steps of an engine on an otherwise idle CPU, and divide a step into parts.

    Args:
        num_sequences: how many sequences decode together.
        num_cached_tokens: cached tokens of each sequence, halfway through the measurement.
        num_steps: how many steps of each kind are measured.
        params: how tokens are chosen; limits on the number of tokens do not apply.
        announce: receives about how many seconds the measured steps will take, before the first of them.

    Raises:
        ModelError: the model does not run packed.
        ValueError: the engine cannot hold these sequences at once, or is not on a CPU.
    """
    rounds = [len(range(number, num_steps, MAX_ROUNDS)) for number in range(min(MAX_ROUNDS, num_steps))]
    num_decodes = 2 + sum(SETTLING_STEPS + 1 + 3 * steps for steps in rounds)
    num_prompt_tokens = max(1, num_cached_tokens - num_decodes // 2)
    _check(engine, num_sequences, num_prompt_tokens + num_decodes + 1)
    executor = engine.runner.require_packed()
    model = engine.runner.model
    is_prepacked = has_prepacked_linears(model)
    meter = MachineMeter(model.dtype, find_format(engine.model_info.quantization) if is_prepacked else None)
    decodes = Decodes(engine, num_sequences, num_prompt_tokens, params)
    whole: list[float] = []
    phases: list[PhaseTimes] = []
    operators: list[OperatorTimes] = []
    lengths: list[list[int]] = []
    profile_operators(executor, decodes.step, 1)  # the profiler's first start is slow
    for steps in rounds:
        for _ in range(READINGS_PER_ROUND):
            meter.measure()
        for _ in range(SETTLING_STEPS):
            start = time.perf_counter()
            decodes.step()
        if not whole:
            announce((num_decodes - 2 - SETTLING_STEPS) * (time.perf_counter() - start))
        for _ in range(steps):
            start = time.perf_counter()
            decodes.step()
            whole.append(time.perf_counter() - start)
            lengths.append(decodes.lengths())
            phases.append(time_phases(engine, decodes.step))
        operators += profile_operators(executor, decodes.step, steps)
    decodes.end()
    middle = [round(statistics.median(of_sequence)) for of_sequence in zip(*lengths, strict=True)]
    work = decode_work(model, executor.specs, executor.backend, engine.config.kv_cache.block_size, middle)
    machine, step_seconds = meter.machine(), statistics.median(whole)
    parts, correction = take_apart(step_seconds, phases, operators, machine, work)
    return StepProfile(
        model=engine.model_info,
        num_threads=torch.get_num_threads(),
        num_sequences=num_sequences,
        num_cached_tokens=statistics.mean(middle) - 1,
        num_steps=num_steps,
        step_seconds=step_seconds,
        parts=parts,
        correction=correction,
        machine=machine,
        work=work,
    )


class Decodes:
    """Sequences of random tokens that all decode together, one step at a time."""

    def __init__(self, engine: Engine, num_sequences: int, num_prompt_tokens: int, params: SamplingParams) -> None:
        self._engine = engine
        self._names = [f"profiled {number}" for number in range(num_sequences)]
        params = replace(params, max_tokens=None, ignore_eos=True)
        rng = random.Random(0)
        for name in self._names:
            prompt = rng.choices(range(engine.model_info.vocab_size), k=num_prompt_tokens)
            engine.submit(engine.inputs.accept(name, prompt, params))
        waiting = set(self._names)
        while waiting:
            waiting.difference_update(self._run())

    def step(self) -> None:
        """Decode one token of every sequence. Raises `ValueError` if a sequence gets none."""
        if len(self._run()) != len(self._names):
            raise ValueError("the sequences did not all fit the cache at once; give it more blocks")

    def lengths(self) -> list[int]:
        """Return how many keys each sequence's next query attends to."""
        return [len(sequence.token_ids) for sequence in self._engine.scheduler.unfinished()]

    def end(self) -> None:
        """Abort all sequences, so that the engine is empty."""
        for name in self._names:
            self._engine.abort(name)

    def _run(self) -> list[str]:
        """Run one step; return the ids of the requests that got a token."""
        outputs = self._engine.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.finish_reason is not None:
                raise ValueError("a sequence reached the model's length while it was measured; take a shorter context")
        return [output.request_id for output in outputs]


def _check(engine: Engine, num_sequences: int, num_tokens: int) -> None:
    """Raise `ValueError` unless the engine can hold `num_sequences` sequences of `num_tokens` tokens at once."""
    info, config = engine.model_info, engine.config
    if not info.device.startswith("cpu"):
        raise ValueError(f"the model is on {info.device}; only steps on a CPU can be profiled so far")
    if num_tokens > info.max_model_len:
        raise ValueError(
            f"sequences grow to {num_tokens} tokens while they are measured; this model takes {info.max_model_len}"
        )
    num_slots = min(config.scheduling.max_num_seqs, config.scheduling.max_num_batched_tokens)
    if num_sequences > num_slots:
        raise ValueError(f"{num_sequences} sequences do not run at once: the engine has {num_slots} slots")
    num_blocks = num_sequences * engine.scheduler.block_pool.layout.max_num_blocks(num_tokens)
    if num_blocks > info.num_blocks:
        raise ValueError(f"the sequences need {num_blocks} blocks of the cache; it has {info.num_blocks}")

"""Measures the gain of iteration-level scheduling: each rung against static waves, same weights, alternating rounds.

The workload is the classic one: most requests are short and every eighth is long, so each static wave of eight waits
for one request. Besides seconds it reports steps, which do not depend on the machine.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch
from rich.table import Column, Table
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.execution.hf.load import ModelSource, load_model
from inflight.lessons import engine_batching, shared_prefix, static_batching
from inflight.lessons.methods import Method, Pace, Setting, warm_up
from inflight.lessons.run import LessonRequest, Run
from inflight.lessons.static_batching import left_pad
from inflight.prefix_store.inspection import clear, stored_fingerprints

NUM_SLOTS = 8
SECONDS_TO_SAVE = 60.0
NUM_PREFIX_TOKENS, NUM_SUFFIX_TOKENS, NUM_SHARED_NEW_TOKENS = 512, 16, 32

Advance: TypeAlias = Callable[[int], None]
"""Called with generated tokens."""

Contestant: TypeAlias = Callable[[Advance], tuple[int, list[list[int]]]]
"""Runs all requests once; returns the number of forward passes, and the tokens of each request."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One method: the seconds of each round, forward passes, and how many requests got different tokens than from the
    first method."""

    seconds: list[float]
    num_steps: int
    num_differing: int

    @property
    def median(self) -> float:
        """The median of the rounds' seconds."""
        return statistics.median(self.seconds)


def gpt2_with_random_weights(dtype: torch.dtype) -> PreTrainedModel:
    """Return GPT-2 (124 M parameters) with seeded random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config()).to(dtype).eval()


def without_generation_defaults(source: ModelSource, dtype: str) -> PreTrainedModel:
    """Load a model without the defaults of its `model.generate`: EOS ends no request, and nothing is sampled."""
    model = load_model(source, EngineConfig(dtype=dtype))
    model.generation_config = GenerationConfig()
    return model


def long_and_short_requests(count: int, vocab_size: int) -> list[LessonRequest]:
    """Return requests of 7 random tokens: every eighth asks for 100 new tokens, the others for 10."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(7)] for _ in range(count)]
    return [LessonRequest(prompt, 100 if number % 8 == 0 else 10) for number, prompt in enumerate(prompts)]


def sharing_requests(count: int, vocab_size: int) -> list[LessonRequest]:
    """Return requests that share 512 tokens, have 16 of their own, and ask for 32 new tokens each."""
    rng = random.Random(0)
    prefix = [rng.randrange(vocab_size) for _ in range(NUM_PREFIX_TOKENS)]
    suffixes = [[rng.randrange(vocab_size) for _ in range(NUM_SUFFIX_TOKENS)] for _ in range(count)]
    return [LessonRequest(prefix + suffix, NUM_SHARED_NEW_TOKENS) for suffix in suffixes]


SIZES = ((3, 32), (1, 32), (1, 16), (1, 8))
"""Rounds and requests, the best first."""


def size_for(
    model: PreTrainedModel, max_seconds: float, rounds: int | None = None, requests: int | None = None
) -> tuple[int, int, float]:
    """Rounds and requests, as given or the best within `max_seconds`, and their estimated seconds, from the measured
    pace."""
    pace = Pace.measure(model, NUM_SLOTS, NUM_PREFIX_TOKENS + NUM_SUFFIX_TOKENS)

    def seconds(rounds: int, requests: int) -> float:
        rungs = pace.seconds(long_and_short_requests(requests, 1), NUM_SLOTS)
        prompts = (requests + 4) * (NUM_PREFIX_TOKENS + NUM_SUFFIX_TOKENS) * pace.prompt_token
        steps = NUM_SHARED_NEW_TOKENS * max(1, requests / NUM_SLOTS) * pace.step
        return rounds * (5 * (rungs + steps) + prompts)  # five methods each

    sizes = [(rounds or own_rounds, requests or own_requests) for own_rounds, own_requests in SIZES]
    best = next((size for size in sizes if seconds(*size) <= max_seconds), sizes[-1])
    return *best, seconds(*best)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Methods that run the same requests.

    Attributes:
        num_tokens: tokens that one method generates in one round.
        prepare: unmeasured preparation before a method's run.
    """

    contestants: Mapping[str, Contestant]
    num_tokens: int
    prepare: Mapping[str, Callable[[], None]] = field(default_factory=dict)


def compare_rungs(model: PreTrainedModel, num_requests: int) -> Comparison:
    """Every rung on the long and short requests, and plain `model.generate` over the same waves. Warms them up."""
    setting = Setting(model, EngineConfig(max_num_seqs=NUM_SLOTS))
    requests = long_and_short_requests(num_requests, model.config.get_text_config().vocab_size)
    warm_up(setting.methods, requests)
    contestants = {name: partial(_run, method, requests) for name, method in setting.methods.items()}
    return _comparison({**contestants, "model.generate": partial(_generate_waves, model, requests)}, requests)


def compare_shared_prefix(model: PreTrainedModel, num_requests: int) -> Comparison:
    """Static waves, one batch that computes the common prefix once, and the engine, which finds the prefix by itself:
    in the prompt before ("cold"), in its cache ("warm"), or in files, as after a restart ("disk")."""
    vocab_size = model.config.get_text_config().vocab_size
    requests = sharing_requests(num_requests, vocab_size)
    num_chunks = NUM_PREFIX_TOKENS // shared_prefix.CHUNK_SIZE
    methods: dict[str, Method] = {
        "static": partial(static_batching.run, model, num_slots=num_requests),
        "shared prefix": partial(shared_prefix.generate_many, model, n_prefix_chunks=num_chunks),
    }
    prefix = requests[0].prompt_token_ids[:NUM_PREFIX_TOKENS]
    config = EngineConfig(max_num_seqs=max(NUM_SLOTS, num_requests), speculation="off")
    in_memory, on_disk = _PrefixEngine(model, config, prefix), _StoringEngine(model, config, prefix)
    methods |= {"engine, cold": in_memory.run, "engine, warm": in_memory.run, "engine, disk": on_disk.run}
    prepare = {
        "engine, cold": in_memory.forget,
        "engine, warm": in_memory.know_prefix,
        "engine, disk": on_disk.leave_prefix,
    }
    return _comparison({name: partial(_run, method, requests) for name, method in methods.items()}, requests, prepare)


class _PrefixEngine:
    """An engine whose cache has a prefix, or is empty."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, prefix: Sequence[int]) -> None:
        self.engine, self._prefix = Engine(model, config), prefix
        self.run = partial(engine_batching.run, self.engine)
        warm_up({"engine": self.run}, [LessonRequest(prefix, 2)] * 2)

    def forget(self) -> None:
        """Empty the cache."""
        self.engine.scheduler.block_pool.forget_all()

    def know_prefix(self) -> None:
        """Cache only the prefix."""
        self.forget()
        self.run([LessonRequest([*self._prefix, 0], 1)])


class _StoringEngine(_PrefixEngine):
    """An engine with a temporary prefix store."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, prefix: Sequence[int]) -> None:
        self._folder = TemporaryDirectory(prefix="inflight-prefixes-", ignore_cleanup_errors=True)
        super().__init__(model, config.replace(prefix_cache_dir=self._folder.name), prefix)

    def leave_prefix(self) -> None:
        """Keep the prefix only in the store."""
        self.forget()
        for holding in stored_fingerprints(Path(self._folder.name)):
            clear(holding, math.inf)
        self.know_prefix()
        self.engine.save_prefixes(SECONDS_TO_SAVE)
        self.forget()


def _comparison(
    contestants: Mapping[str, Contestant],
    requests: Sequence[LessonRequest],
    prepare: Mapping[str, Callable[[], None]] | None = None,
) -> Comparison:
    return Comparison(contestants, sum(request.max_new_tokens for request in requests), prepare or {})


def measure(
    comparison: Comparison, rounds: int, say: Callable[[str], None], advance: Advance = lambda num_tokens: None
) -> dict[str, Measured]:
    """Run all methods in turn, `rounds` times, so that changes in the machine's speed affect all alike.

    Args:
        say: is told of each run that has ended.
        advance: is told of tokens as they are generated.
    """
    seconds: dict[str, list[float]] = {name: [] for name in comparison.contestants}
    results: dict[str, tuple[int, list[list[int]]]] = {}
    for number in range(rounds):
        for name, run in comparison.contestants.items():
            comparison.prepare.get(name, lambda: None)()
            start = time.perf_counter()
            results[name] = run(advance)
            seconds[name].append(time.perf_counter() - start)
            say(f"round {number + 1} of {rounds}: {name} {seconds[name][-1]:.2f} s")
    expected = next(iter(results.values()))[1]
    return {
        name: Measured(seconds[name], num_steps, sum(a != b for a, b in zip(tokens, expected, strict=True)))
        for name, (num_steps, tokens) in results.items()
    }


def table_of(measured: Mapping[str, Measured]) -> Table:
    """Return a table of medians, speedups over the first method, and the ratio of its steps to each method's."""
    first = next(iter(measured.values()))
    headings = ("median\ns", "from\n", "to\n", "times\nfaster", "forward\npasses", "times\nfewer", "tokens\n")
    columns = (Column(heading, justify="right") for heading in headings)
    table = Table("method\n", *columns, box=None, pad_edge=False, header_style="bold")
    for name, each in measured.items():
        table.add_row(
            name,
            *(f"{seconds:.2f}" for seconds in (each.median, min(each.seconds), max(each.seconds))),
            f"{first.median / each.median:.2f}",
            str(each.num_steps),
            f"{first.num_steps / each.num_steps:.2f}",
            f"{each.num_differing} differ" if each.num_differing else "equal",
        )
    return table


def _run(method: Method, requests: Sequence[LessonRequest], advance: Advance) -> tuple[int, list[list[int]]]:
    told = 0

    def watch(run: Run) -> None:
        nonlocal told
        advance(run.num_generated - told)
        told = run.num_generated

    account = method(requests, watch=watch)
    watch(account)
    return len(account.steps), account.token_ids


def _generate_waves(
    model: PreTrainedModel, requests: Sequence[LessonRequest], advance: Advance
) -> tuple[int, list[list[int]]]:
    """Batching with plain `transformers`: `model.generate` over one left-padded wave after the other."""
    num_steps, token_ids = 0, []
    for first in range(0, len(requests), NUM_SLOTS):
        wave = requests[first : first + NUM_SLOTS]
        input_ids, attention_mask = left_pad([request.prompt_token_ids for request in wave], model.device)
        longest = max(request.max_new_tokens for request in wave)
        config = GenerationConfig(max_new_tokens=longest, do_sample=False, pad_token_id=0, eos_token_id=None)
        output = model.generate(input_ids, attention_mask=attention_mask, generation_config=config)
        rows = output[:, input_ids.shape[1] :].tolist()
        token_ids += [row[: request.max_new_tokens] for row, request in zip(rows, wave, strict=True)]
        num_steps += longest
        advance(sum(request.max_new_tokens for request in wave))
    return num_steps, token_ids

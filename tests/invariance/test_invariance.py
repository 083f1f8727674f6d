"""Bitwise batch invariance: a request's logits have the same bits in any batch and with any chunking.

The engine runs for real under a teacher (as in `tests/exactness`); every row of logits is compared with `torch.equal`
to that of the request running alone, whole, without a prefix cache.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.engine.engine import Engine
from tests import zoo
from tests.exactness.harness import Reference, Teacher, know_the_lessons
from tests.execution import this_cpu

ARCHITECTURES = ["llama", "gpt2", "mistral", "gemma2", "gpt_oss", "qwen3_moe"]
"""A Llama, a GPT-2, sliding windows, softcap, sinks, and mixtures of experts."""
PRECISIONS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4 exact": {"dtype": "bfloat16", "quantization": "int4", "quantization_arithmetic": "exact"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int4 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int4"},
}
EVERY_WAY = [
    *((name, precision) for name in ARCHITECTURES for precision in ("float32", "bfloat16")),
    ("llama", "int8"),
    ("qwen3_moe", "int8"),
    ("llama", "int4"),
    ("qwen3_moe", "int4"),
    ("llama", "int8 cache"),
    ("gemma2", "int4 cache"),
]
"""Models and precisions that run in each configuration; the others run with all of them at once."""
NUM_REQUESTS = 64
COMMON = 48  # tokens with which half of the requests begin: three blocks
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "two at a time": {"max_num_seqs": 2, "num_requests": 24},
    "five at a time": {"max_num_seqs": 5},
    "64 at a time": {"max_num_seqs": 64},
    "chunks of 1": {"max_num_seqs": 1, "max_num_batched_tokens": 1, "num_requests": 6},
    "chunks of 7": {"max_num_seqs": 3, "max_num_batched_tokens": 7, "num_requests": 24},
    "chunks of 33": {"max_num_seqs": 8, "max_num_batched_tokens": 33},
    "prefix hits": {"max_num_seqs": 4, "enable_prefix_caching": True},
    "a shared prefix in flight": {"max_num_seqs": 64, "enable_prefix_caching": True},
    "preemption": {"max_num_seqs": 16},
    "draft tokens": {"max_num_seqs": 5, "speculation": "lookup"},
}


def configured(name: str, configuration: str) -> dict[str, Any]:
    """The options that cause preemption depend on how much of a sequence a model keeps."""
    options = CONFIGURATIONS[configuration]
    if configuration == "preemption":
        return options | {"num_blocks": {"mistral": 12, "gemma2": 28, "gpt_oss": 40}.get(name, 24)}
    return options


def requests() -> list[Reference]:
    """Prompts and the teacher's tokens for them; half of the prompts have a common prefix."""
    rng = random.Random(0)
    common = [rng.randrange(zoo.VOCAB_SIZE) for _ in range(COMMON)]
    made = []
    for number in range(NUM_REQUESTS):
        own = [rng.randrange(zoo.VOCAB_SIZE) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 70)))]
        tokens = [rng.randrange(zoo.VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        made.append(Reference(common + own if number % 2 else own, tokens, torch.empty(0)))
    return made


REQUESTS = requests()


def teach(engine: Engine, lessons: Sequence[Reference], *, alone: bool = False) -> dict[int, Tensor]:
    """The logits of all lessons at each output position; `alone`: one by one, without a shared prefix."""
    teacher = Teacher(lessons)
    engine.runner.sampler = teacher  # type: ignore[assignment]
    for number, lesson in enumerate(lessons):
        params = SamplingParams(temperature=0, max_tokens=len(lesson.tokens), seed=number, ignore_eos=True)
        salt = str(number) if alone else None
        engine.submit(engine.inputs.accept(str(number), lesson.prompt, params, cache_salt=salt))
        if alone:
            finish(engine)
    finish(engine)
    rows = {number: teacher.logits[number, 0] for number in range(len(lessons))}
    return {number: torch.stack([each[i] for i in range(len(each))]) for number, each in rows.items()}


def finish(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.error is None, output.error


def run_lessons(
    model: PreTrainedModel, lessons: Sequence[Reference], **options: Any
) -> tuple[dict[int, Tensor], Engine]:
    """Teach all lessons to a new engine."""
    engine = Engine(model, EngineConfig(**{"speculation": "off"} | options))
    if engine.config.speculation.method != "off":
        know_the_lessons(engine, lessons)
    return teach(engine, lessons), engine


def needs(precision: str) -> None:
    this_cpu.needs(torch.float32 if precision == "float32" else torch.bfloat16)
    this_cpu.needs({"int8": torch.int8, "int4": torch.uint8, "int4 exact": torch.uint8}.get(precision, torch.float32))


def run(name: str, *, num_requests: int = NUM_REQUESTS, **options: Any) -> tuple[dict[int, Tensor], Engine]:
    """The same for a zoo model and all requests."""
    options = {"num_blocks": 500, "enable_prefix_caching": False} | options
    return run_lessons(zoo.build(name), REQUESTS[:num_requests], **options)


@cache
def alone(name: str, precision: str) -> dict[int, Tensor]:
    """Each request alone, one after the other."""
    return run(name, **PRECISIONS[precision], max_num_seqs=1)[0]


def assert_same_bits(actual: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    different = [number for number, logits in actual.items() if not torch.equal(logits, expected[number])]
    assert not different, f"{len(different)} of {len(actual)} requests differ: {different[:5]}"


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(("name", "precision"), EVERY_WAY)
@pytest.mark.thorough("llama-bfloat16", "llama-int8", "gemma2-int4")
def test_the_bits_do_not_depend_on_the_batch(name: str, precision: str, configuration: str) -> None:
    needs(precision)
    options = PRECISIONS[precision] | configured(name, configuration)
    logits, engine = run(name, **options)
    assert_same_bits(logits, alone(name, precision))
    assert engine.model_info.is_batch_invariant
    stats = engine.stats()
    assert bool(stats.num_preemptions) == (configuration == "preemption")
    assert bool(stats.num_accepted_tokens) == (configuration == "draft tokens")
    assert bool(stats.num_cached_tokens) == bool(options.get("enable_prefix_caching"))


def mixed(name: str) -> dict[str, Any]:
    """A run with chunks, shared prefixes and preemption at the same time."""
    num_blocks = configured(name, "preemption")["num_blocks"] // 2  # prefixes are shared
    return {"num_blocks": num_blocks, "max_num_batched_tokens": 33, "enable_prefix_caching": True}


def assert_mixed(engine: Engine) -> None:
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_cached_tokens > 0


@pytest.mark.parametrize(
    ("name", "precision"), sorted({(n, p) for n in ARCHITECTURES for p in PRECISIONS} - {*EVERY_WAY})
)
@pytest.mark.thorough("gemma2-int4", "gpt2-int8", "qwen3_moe")
def test_the_bits_do_not_depend_on_a_batch_of_all_kinds_at_once(name: str, precision: str) -> None:
    needs(precision)
    logits, engine = run(name, **PRECISIONS[precision], **mixed(name))
    assert_same_bits(logits, alone(name, precision))
    assert engine.model_info.is_batch_invariant
    assert_mixed(engine)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.thorough("llama", "gemma2-bfloat16")
def test_the_bits_do_not_depend_on_the_number_of_threads_and_the_block_size(name: str, precision: str) -> None:
    needs(precision)
    options = PRECISIONS[precision] | {"max_num_seqs": 16, "max_num_batched_tokens": 300, "block_size": 48}
    expected = alone(name, precision)  # with one thread
    with threads(2):
        actual, _ = run(name, **options)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.thorough("llama-bfloat16", "gemma2-float32")
def test_the_bits_do_not_depend_on_the_batch_over_several_tiles(name: str, precision: str) -> None:
    """The sequences are longer than the kernel's tiles of 256 positions, which sequences share and threads divide."""
    needs(precision)
    rng = random.Random(1)
    common = [rng.randrange(zoo.VOCAB_SIZE) for _ in range(530)]
    lessons = [
        Reference(
            common[: (0, 272, 512, 530)[number % 4]] + [rng.randrange(zoo.VOCAB_SIZE) for _ in range(length)],
            [rng.randrange(zoo.VOCAB_SIZE) for _ in range(4)],
            torch.empty(0),
        )
        for number, length in enumerate((3, 16, 1, 2, 600, 40, 17, 16, 250, 300, 1, 5))
    ]
    model = copy.deepcopy(zoo.build(name))
    model.config.max_position_embeddings = 1024
    options = PRECISIONS[precision] | {"num_blocks": 800, "max_num_seqs": 1, "enable_prefix_caching": False}
    expected, _ = run_lessons(model, lessons, **options)
    for change in (
        {"max_num_seqs": 12},
        {"max_num_seqs": 12, "max_num_batched_tokens": 100},
        {"max_num_seqs": 12, "enable_prefix_caching": True},
        {"max_num_seqs": 5, "enable_prefix_caching": True, "max_num_batched_tokens": 300},
    ):
        actual, _ = run_lessons(model, lessons, **(options | change))
        assert_same_bits(actual, expected)


def test_a_router_of_four_experts_keeps_the_promise() -> None:
    """DeepSeek's router takes the sigmoid of one score per expert. A row is narrower than a CPU vector, and torch's
    operator uses one of two routines for an element, depending on the position of its row, unless rows lie apart."""
    engine = Engine(zoo.build("deepseek_v3"), EngineConfig(num_blocks=500))
    several, _ = run("deepseek_v3", dtype="float32", max_num_seqs=5)
    expected = alone("deepseek_v3", "float32")
    assert engine.model_info.is_batch_invariant
    assert all(torch.equal(several[n], expected[n]) for n in several)


def test_the_reference_does_not_keep_the_promise_and_reports_that() -> None:
    """So the promise depends on the kernels, and these tests can fail."""
    logits, engine = run("llama", dtype="float32", max_num_seqs=4, attention_backend="torch")
    expected, _ = run("llama", dtype="float32", max_num_seqs=1, attention_backend="torch")
    assert any(not torch.equal(logits[number], expected[number]) for number in logits)
    assert not engine.model_info.is_batch_invariant

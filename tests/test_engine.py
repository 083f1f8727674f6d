"""The engine's loop: early ends, errors and interrupts, and what reading results costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.outputs import SequenceOutput
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.contracts.step.record import STEP_SIZES, StepRecord
from inflight.engine.engine import Engine
from tests import zoo
from tests.text.tokenizers_for_tests import byte_level

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def make_engine(**options: Any) -> Engine:
    return Engine(zoo.build("llama"), EngineConfig(speculation="off", **options))


def submit(engine: Engine, request_id: str, prompt: list[int], params: SamplingParams = GREEDY) -> None:
    engine.submit(engine.inputs.accept(request_id, prompt, params))


def drain(engine: Engine) -> list[SequenceOutput]:
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    engine.scheduler.block_pool.check([])
    return outputs


def tokens_of(outputs: list[SequenceOutput], request_id: str, index: int = 0) -> list[int]:
    return [t for o in outputs if (o.request_id, o.index) == (request_id, index) for t in o.new_token_ids]


def break_run(engine: Engine, monkeypatch: pytest.MonkeyPatch, at_step: int, error: BaseException) -> None:
    """Make the runner raise once, at step number `at_step`."""
    run, steps = engine.runner.run, iter(range(1_000_000))

    def broken(plan: StepPlan, masks: Any) -> StepTokens:
        if next(steps) == at_step:
            raise error
        return run(plan, masks)

    monkeypatch.setattr(engine.runner, "run", broken)


def test_an_error_in_the_forward_pass_ends_the_requests_of_that_step_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(max_num_seqs=2)
    for number in range(4):
        submit(engine, str(number), [number + 1] * 5)
    break_run(engine, monkeypatch, 3, RuntimeError("the device is on fire"))
    outputs = drain(engine)
    ends = {o.request_id: (o.finish_reason, o.error) for o in outputs if o.finish_reason}
    assert ends["0"] == ends["1"] == ("error", "RuntimeError('the device is on fire')")
    assert ends["2"] == ends["3"] == ("length", None)
    assert tokens_of(outputs, "3") == zoo.plain_greedy(zoo.build("llama"), [4] * 5, 8)


def test_non_finite_logits_fail_only_their_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    for number in range(3):
        submit(engine, str(number), [number + 1] * 5)
    forward = engine.runner.executor.forward

    def poisoned(*args: Any) -> torch.Tensor:
        logits = forward(*args).clone()
        logits[1, 7] = float("nan")
        return logits

    engine.step()
    monkeypatch.setattr(engine.runner.executor, "forward", poisoned)
    (failed,) = [output for output in engine.step() if output.finish_reason]
    monkeypatch.undo()
    assert (failed.request_id, failed.finish_reason) == ("1", "error")
    assert "not finite" in (failed.error or "")
    assert {o.finish_reason for o in drain(engine) if o.finish_reason} == {"length"}


def test_an_interrupt_restores_the_state_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    submit(engine, "a", [1, 2, 3])
    break_run(engine, monkeypatch, 2, KeyboardInterrupt())
    outputs = engine.step() + engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs += drain(engine)
    assert tokens_of(outputs, "a") == zoo.plain_greedy(zoo.build("llama"), [1, 2, 3], 8)


def test_a_failing_tokenizer_ends_only_the_request_that_needed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    engine = Engine(zoo.build("llama"), EngineConfig(), tokenizer)
    submit(engine, "needs", [1, 2, 3], SamplingParams(temperature=0, max_tokens=8, stop="never"))
    submit(engine, "other", [1, 2, 3])

    def broken(*_: object) -> str:
        raise RuntimeError("no such token")

    monkeypatch.setattr(tokenizer, "decode", broken)
    ends = {o.request_id: (o.finish_reason, o.error) for o in drain(engine) if o.finish_reason}
    assert ends == {"needs": ("error", "RuntimeError('no such token')"), "other": ("length", None)}


def test_a_model_without_its_own_eos_uses_that_of_the_tokenizer() -> None:
    tokenizer = byte_level()
    assert Engine(zoo.build("llama"), EngineConfig(), tokenizer).model_info.eos_token_ids == (tokenizer.eos_token_id,)
    assert Engine(zoo.build("llama"), EngineConfig()).model_info.eos_token_ids == ()


def test_an_aborted_request_is_reported_once_and_frees_everything() -> None:
    engine = make_engine(max_num_seqs=1)
    submit(engine, "running", [1, 2, 3], SamplingParams(temperature=0, max_tokens=50))
    submit(engine, "waiting", [1, 2, 3])
    engine.step()
    assert [(o.request_id, o.finish_reason) for o in engine.abort("running")] == [("running", "abort")]
    assert [(o.request_id, o.finish_reason) for o in engine.abort("waiting")] == [("waiting", "abort")]
    assert engine.abort("waiting") == engine.abort("unknown") == []
    assert drain(engine) == []


def test_a_request_id_that_is_in_use_is_refused() -> None:
    engine = make_engine()
    submit(engine, "a", [1])
    with pytest.raises(ValueError, match="'a' is in use"):
        submit(engine, "a", [1])


def sampled(prompts: list[list[int]], **options: Any) -> list[list[int]]:
    engine = make_engine(**options)
    for number, prompt in enumerate(prompts):
        submit(engine, str(number), prompt, SamplingParams(temperature=1.0, top_p=0.9, seed=number, max_tokens=40))
    outputs = drain(engine)
    if "num_blocks" in options:
        assert engine.scheduler.count.preemptions > 0
    return [tokens_of(outputs, str(number)) for number in range(len(prompts))]


def test_a_seeded_request_draws_the_same_tokens_in_any_batch_and_after_preemption() -> None:
    prompts = [[number + 1] * (10 + 7 * number) for number in range(6)]
    together = sampled(prompts)
    assert together == sampled(prompts, max_num_batched_tokens=8, block_size=4, num_blocks=26)
    assert together == sampled(prompts, max_num_seqs=1)
    assert len({tuple(tokens) for tokens in together}) == 6


def test_each_sequence_of_a_request_has_its_own_random_stream() -> None:
    engine = make_engine()
    submit(engine, "a", [1, 2, 3], SamplingParams(n=3, seed=5, max_tokens=20))
    submit(engine, "b", [1, 2, 3], SamplingParams(n=1, seed=5, max_tokens=20))
    outputs = drain(engine)
    streams = [tokens_of(outputs, "a", index) for index in range(3)]
    assert len({tuple(stream) for stream in streams}) == 3
    assert tokens_of(outputs, "b") == streams[0]


def test_eos_ends_a_sequence_unless_it_is_ignored_or_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("llama")
    plain = zoo.plain_greedy(model, [1, 2, 3], 20)
    eos = plain[5]
    first = plain.index(eos)
    monkeypatch.setattr(model.generation_config, "eos_token_id", [eos, 250])
    engine = make_engine()
    submit(engine, "stops", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    submit(engine, "ignores", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    submit(engine, "later", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20, min_tokens=first + 1))
    outputs = drain(engine)
    ends = {o.request_id: (o.finish_reason, o.stop_reason) for o in outputs if o.finish_reason}
    assert tokens_of(outputs, "stops") == plain[: first + 1]
    assert ends["stops"] == ("stop", None)
    assert tokens_of(outputs, "ignores") == plain
    later = tokens_of(outputs, "later")
    assert later[:first] == plain[:first]
    assert later[first] != eos


def test_a_stop_token_of_the_request_is_the_stop_reason() -> None:
    plain = zoo.plain_greedy(zoo.build("llama"), [1, 2, 3], 20)
    stop = plain[4]
    engine = make_engine()
    submit(engine, "a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop]))
    outputs = drain(engine)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    assert tokens_of(outputs, "a") == plain[: plain.index(stop) + 1]


def test_all_sequences_of_a_request_may_stop_in_the_same_step() -> None:
    plain = zoo.plain_greedy(zoo.build("llama"), [1, 2, 3], 20)
    engine = make_engine()
    submit(engine, "a", [1, 2, 3], SamplingParams(n=2, temperature=0, max_tokens=20, stop_token_ids=[plain[4]]))
    ends = [(o.index, o.finish_reason, o.stop_reason) for o in drain(engine) if o.finish_reason]
    assert ends == [(0, "stop", plain[4]), (1, "stop", plain[4])]


def test_records_describe_what_each_step_did() -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=2)
    records: list[StepRecord] = []
    engine.observer = records.append
    submit(engine, "long", list(range(1, 15)))
    submit(engine, "short", [1, 2])
    drain(engine)
    kinds = [[(span.request_id, span.kind, span.length) for span in record.spans] for record in records]
    assert kinds[0] == [("long", "chunk", 8)]
    assert kinds[1] == [("long", "prefill", 6), ("short", "prefill", 2)]
    assert kinds[2] == [("long", "decode", 1), ("short", "decode", 1)]
    assert [record.step for record in records] == list(range(len(records)))
    assert records[0].num_waiting == 1
    assert records[-1].num_blocks_used == 0


class _HostReads(TorchDispatchMode):
    """Counts the operators that make the host wait for a value on the device."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in self.NAMES:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_step_reads_only_its_tokens_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_num_batched_tokens=32)
    params: list[Callable[[int], SamplingParams]] = [
        lambda seed: SamplingParams(temperature=0, max_tokens=6, min_tokens=2, stop_token_ids=[3]),
        lambda seed: SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=seed, max_tokens=6),
    ]
    for number in range(6):
        submit(engine, str(number), list(range(1, 10 + 5 * number)), params[number % 2](number))
    num_lists = 0
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal num_lists
        num_lists += 1
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    num_steps_with_logits = 0
    with _HostReads() as reads:
        while engine.has_unfinished_requests:
            num_steps_with_logits += bool(engine.step())
    assert reads.seen == []
    assert num_lists == num_steps_with_logits > 0


def test_steps_are_counted_by_their_tokens() -> None:
    engine = make_engine()
    submit(engine, "a", [1] * 20, SamplingParams(temperature=0, max_tokens=4))
    drain(engine)
    stats = engine.stats()
    counted = dict(zip((*STEP_SIZES, None), stats.num_steps_by_size, strict=True))
    assert {size: number for size, number in counted.items() if number} == {1: 3, 32: 1}
    assert stats.num_step_tokens == 23

"""What a client gave up, or what it continues, is not computed again, whatever executor runs the model."""

from typing import Any

import pytest

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.outputs import SequenceOutput
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.engine.engine import Engine
from tests import others, zoo
from tests.scheduling.helpers import TOKEN, make_scheduler, run_to_the_end, step, submit

PROMPT = [(7 * n) % 60 + 2 for n in range(70)]
NUM_TOKENS = 8
MODELS = {"llama": "packed", "bloom": "rows", "qwen3_next": "packed", "falcon_h1": "packed", "rwkv": "sequential"}


class Session:
    """An engine, and what it computed."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model = zoo.build(name) if name in zoo.ARCHITECTURES else others.build(name)
        sizes = {"max_num_seqs": 2, "num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 16}
        self.engine = Engine(self.model, EngineConfig(dtype="float32", **sizes | options))
        assert self.engine.model_info.executor == MODELS[name]
        self.spans: list[tuple[int, int]] = []
        self.engine.observer = lambda record: self.spans.extend((span.start, span.length) for span in record.spans)

    def submit(self, request_id: str, prompt: list[int], **options: Any) -> None:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        self.engine.submit(self.engine.inputs.accept(request_id, prompt, params, **options))

    def run(self, request_id: str, prompt: list[int], **options: Any) -> list[int]:
        """Run a request to its end; return its tokens, which must be those of the plain model."""
        self.spans.clear()
        self.submit(request_id, prompt, **options)
        outputs: list[SequenceOutput] = []
        while self.engine.has_unfinished_requests:
            outputs += self.engine.step()
        tokens = [token for each in outputs for token in each.new_token_ids]
        assert tokens == zoo.plain_greedy(self.model, prompt, NUM_TOKENS)
        return tokens


@pytest.mark.parametrize("name", MODELS)
def test_a_client_that_gave_up_goes_on_where_the_prefill_stopped(name: str) -> None:
    session = Session(name)
    session.submit("given up", PROMPT)
    for _ in range(3):
        session.engine.step()
    session.engine.abort("given up")
    session.run("again", PROMPT)
    assert session.spans[0][0] == 48


@pytest.mark.parametrize("name", MODELS)
def test_the_next_turn_computes_only_what_is_new(name: str) -> None:
    session = Session(name)
    history = PROMPT[:40]
    for turn in range(3):
        begin, end = history, [*history, *session.run(f"turn {turn}", history)]
        if turn:
            assert session.spans[0][0] >= len(begin) - 3 - 4  # new tokens, the answer's last one, and part of a block
        history = [*end, 5, 6]


@pytest.mark.parametrize("name", ["qwen3_next", "rwkv"])
def test_ended_sequences_make_room_for_others(name: str) -> None:
    """Slots and blocks both run out; what is continued afterwards is right, or computed again."""
    session = Session(name, num_blocks=24)
    for number in range(4):
        session.run(f"{number}", [number + 2, *PROMPT[: 30 + 10 * number]])
    session.run("again", [3, *PROMPT[:40]])
    session.submit("long", PROMPT)
    session.submit("longer", [*PROMPT, 9])
    while session.engine.has_unfinished_requests:
        session.engine.step()
    assert session.engine.stats().num_preemptions == 0


def test_other_salts_continue_nothing() -> None:
    session = Session("qwen3_next")
    session.run("mine", PROMPT, cache_salt="a")
    session.run("yours", [*PROMPT, 1, 2], cache_salt="b")
    assert session.spans[0][0] == 0


def test_a_failed_step_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("qwen3_next")
    tokens = session.run("first", PROMPT)
    run = session.engine.runner.run

    def fail(plan: StepPlan, masks: Any) -> StepTokens:
        if plan.spans:
            raise RuntimeError
        return run(plan, masks)

    monkeypatch.setattr(session.engine.runner, "run", fail)
    session.submit("fails", [*PROMPT, *tokens, 4])
    (output,) = session.engine.step()
    assert output.finish_reason == "error"
    monkeypatch.setattr(session.engine.runner, "run", run)
    session.run("again", [*PROMPT, *tokens, 4])


def test_what_continues_an_ended_sequence_preempts_none() -> None:
    scheduler = make_scheduler(max_num_seqs=2, aging_steps=1000, sharing="slots", enable_prefix_caching=True)
    submit(scheduler, "a", [1, 2, 3], max_output=1)
    run_to_the_end(scheduler)
    submit(scheduler, "low", [4, 5], max_output=9, priority=5)
    step(scheduler)
    submit(scheduler, "a again", [1, 2, 3, TOKEN, 8], max_output=1, priority=0)
    assert (2, 3, 5) in step(scheduler)
    assert scheduler.count.preemptions == 0

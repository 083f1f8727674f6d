"""Structured output through the whole engine is valid or cut off by length, and does not affect other requests."""

import asyncio
import copy
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from inflight import LLM, AsyncLLM, InvalidRequestError, SamplingParams, StructuredOutput
from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.step.plan import StepPlan
from inflight.engine.admission import AcceptedRequest
from inflight.engine.input_processor import InputProcessor
from inflight.grammar import matcher
from inflight.grammar.constraints import Constraints
from tests import zoo
from tests.text.tokenizers_for_tests import byte_level

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"enum": ["Ann", "Ben"]}, "maxItems": 3},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time"
REGEX = r"[a-f]{3,9}-[0-9]{2}"
WISHES = {
    "schema": StructuredOutput(json_schema=json.dumps(SCHEMA)),
    "regex": StructuredOutput(regex=REGEX),
    "choice": StructuredOutput(choice=("yes", "no", "yes, perhaps")),
    "object": StructuredOutput(json_object=True),
    "grammar": StructuredOutput(grammar='start: "(" start ")" | "x"'),
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preemption": {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24},
}


def is_valid(kind: str, text: str) -> bool:
    match kind:
        case "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
            return True
        case "object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch(REGEX, text) is not None
        case "choice":
            return text in ("yes", "no", "yes, perhaps")
    depth = text.count("(")
    return text == "(" * depth + "x" + ")" * depth


def params_of(kind: str, seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=100, structured_output=WISHES[kind], **more)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_output_is_valid_or_is_cut_off_by_length(name: str) -> None:
    llm = LLM(**CONFIGURATIONS[name])
    kinds = [kind for kind in WISHES for _ in range(8)]
    params = [params_of(kind, seed) for seed, kind in enumerate(kinds)]
    free = SamplingParams(temperature=0, max_tokens=30)
    outputs = llm.generate([PROMPT] * (len(params) + 2), [free, *params, free], use_tqdm=False)
    finished = dict.fromkeys(WISHES, 0)
    for kind, output in zip(kinds, outputs[1:-1], strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason in ("stop", "length"), output.error
        if completion.finish_reason == "stop":
            assert is_valid(kind, completion.text), completion.text
            finished[kind] += 1
    assert all(number >= 6 for kind, number in finished.items() if kind != "object"), finished
    (alone,) = LLM().generate([PROMPT], free, use_tqdm=False)
    assert {output.outputs[0].text for output in (outputs[0], outputs[-1])} == {alone.outputs[0].text}
    if name == "preemption":
        assert llm.engine.scheduler.count.preemptions > 0
    llm.engine.scheduler.block_pool.check([])
    assert not llm.engine.inputs.constraints._matchers


def test_the_most_likely_allowed_token_is_chosen() -> None:
    """Greedy decoding takes the most likely allowed token at each position, in a batch with other constraints."""
    llm = LLM()
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=1000, structured_output=WISHES["choice"])
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    first = (output.outputs[0].logprobs or [])[0]
    allowed = [each for each in first if first[each].decoded_token in {"y", "ye", "yes", "n", "no"}]
    assert output.outputs[0].token_ids[0] == max(allowed, key=lambda each: first[each].logprob)


def test_each_sequence_of_a_request_has_its_own_grammar_state() -> None:
    (output,) = LLM().generate([PROMPT], params_of("regex", 1, n=6), use_tqdm=False)
    texts = {completion.text for completion in output.outputs}
    assert len(texts) > 1
    assert all(is_valid("regex", text) for text in texts)


def test_a_discarded_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(speculation="off")
    (expected,) = llm.generate([PROMPT], params_of("schema", 3), use_tqdm=False)
    engine, run, steps = llm.engine, llm.engine.runner.run, iter(range(1000))

    def interrupted(plan: StepPlan, masks: Any = None) -> Any:
        given = run(plan, masks)
        if next(steps) % 3 == 1:
            raise KeyboardInterrupt
        return given

    monkeypatch.setattr(engine.runner, "run", interrupted)
    engine.submit(engine.inputs.accept("0", expected.prompt_token_ids, params_of("schema", 3)))
    token_ids: list[int] = []
    num_interrupts = 0
    while engine.has_unfinished_requests:
        try:
            token_ids += [token for output in engine.step() for token in output.new_token_ids]
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts > 3
    assert token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("wish", "more", "reason"),
    [
        (StructuredOutput(json_schema='{"type": "nonsense"}'), {}, "nonsense"),
        (StructuredOutput(regex="(unclosed"), {}, "regex"),
        (WISHES["regex"], {"ignore_eos": True}, "ignore_eos is True"),
        (WISHES["regex"], {"min_tokens": 3}, "min_tokens is 3"),
        (WISHES["regex"], {"stop": "-"}, "stop is '-'"),
        (WISHES["regex"], {"stop_token_ids": [5]}, "stop_token_ids is"),
        (WISHES["regex"], {"bad_words": ["a"]}, "bad_words is"),
    ],
    ids=["schema", "regex", "ignore_eos", "min_tokens", "stop", "stop_token_ids", "bad_words"],
)
@pytest.mark.thorough("schema", "regex", "ignore_eos")
def test_impossible_constraints_are_refused_at_admission(
    wish: StructuredOutput, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        LLM().generate([PROMPT], SamplingParams(structured_output=wish, **more), use_tqdm=False)


def test_a_model_without_tokenizer_or_eos_is_refused() -> None:
    params = SamplingParams(structured_output=WISHES["choice"])
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        LLM(zoo.build("gpt2")).generate([[1]], params, use_tqdm=False)
    inner = copy.deepcopy(byte_level().inner)
    inner.eos_token = None
    with pytest.raises(InvalidRequestError, match="EOS"):
        LLM(zoo.build("gpt2"), inner).generate([[1]], params, use_tqdm=False)


def test_a_failing_grammar_ends_its_own_request_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM()
    constraints, add, narrow = (
        llm.engine.inputs.constraints,
        llm.engine.inputs.constraints.add,
        matcher.GrammarMatcher._narrow,
    )
    bad, broken = StructuredOutput(regex="a+"), set()

    def breaking(sequence_id: int, grammar: matcher.GrammarMatcher) -> None:
        add(sequence_id, grammar)
        if not broken:  # this is first called for the first request
            broken.add(constraints._matchers[sequence_id].matcher)

    def narrowing(self: Any, mask: Any, into: Any) -> Any:
        if self in broken:
            into[:] = 0
            return matcher.GrammarError("it became too complex")
        return narrow(self, mask, into)

    monkeypatch.setattr(constraints, "add", breaking)
    monkeypatch.setattr(matcher.GrammarMatcher, "_narrow", narrowing)
    params = [SamplingParams(structured_output=bad), params_of("schema", 1)]
    outputs = llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert (outputs[0].outputs[0].finish_reason, outputs[0].error) == ("error", "it became too complex")
    assert outputs[1].outputs[0].finish_reason in ("stop", "length")


def test_constraints_are_sent_over_the_pipe_to_an_engine_process() -> None:
    async def run() -> None:
        async with AsyncLLM() as llm:
            outputs = [output async for output in llm.generate(PROMPT, params_of("schema", 5))]
            completion = outputs[-1].outputs[0]
            assert completion.finish_reason == "length" or is_valid("schema", completion.text)
            wrong = SamplingParams(structured_output=StructuredOutput(regex="("))
            with pytest.raises(InvalidRequestError, match="regex"):
                _ = [output async for output in llm.generate(PROMPT, wrong)]

    asyncio.run(run())


@pytest.mark.parametrize("slow_field", ["structured_output", "bad_words"])
@pytest.mark.thorough
def test_other_requests_run_while_one_is_compiled_which_may_be_aborted(
    slow_field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"structured_output": WISHES["choice"], "bad_words": ["a", "the"]}[slow_field]
    is_compiled, compile_ = threading.Event(), InputProcessor.compile

    def slow(inputs: InputProcessor, accepted: AcceptedRequest) -> AcceptedRequest:
        assert accepted.is_compiled or is_compiled.wait(60)
        return compile_(inputs, accepted)

    async def last(llm: AsyncLLM, params: SamplingParams) -> RequestOutput:
        return [output async for output in llm.generate(PROMPT, params)][-1]

    async def run() -> None:
        async with AsyncLLM(in_process=True) as llm:
            params = SamplingParams(temperature=0, max_tokens=30, **{slow_field: asked})
            waiting, left = (asyncio.create_task(last(llm, params)) for _ in range(2))
            assert (await last(llm, SamplingParams(max_tokens=5))).finished
            left.cancel()
            assert (await llm.stats()).num_requests == 1
            is_compiled.set()
            text = (await waiting).outputs[0].text
            assert is_valid("choice", text) if slow_field == "structured_output" else not {"a", "the"} & {*text.split()}
            assert (await llm.stats()).num_requests == 2

    monkeypatch.setattr(InputProcessor, "compile", slow)
    asyncio.run(run())


def test_the_first_requests_may_be_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads get the same `Constraints`, though another thread asks for it while the first one makes it."""
    llm, is_being_made, may_be_made = LLM(), threading.Event(), threading.Event()
    make = Constraints.__init__

    def make_slowly(self: Constraints, *args: Any) -> None:
        is_being_made.set()
        assert may_be_made.wait(60)
        make(self, *args)

    monkeypatch.setattr(Constraints, "__init__", make_slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: llm.engine.inputs.constraints)
        assert is_being_made.wait(60)
        is_being_made.clear()
        second = pool.submit(lambda: llm.engine.inputs.constraints)
        is_made_twice = is_being_made.wait(0.2)  # it never comes, so waiting longer would show nothing more
        may_be_made.set()
    assert not is_made_twice
    assert first.result() is second.result() is llm.engine.inputs.constraints


def test_submitting_an_accepted_request_does_not_compile_its_grammar_again(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM()
    accepted = llm.engine.inputs.compile(llm.engine.inputs.accept("0", [5, 6], params_of("regex", 1)))
    monkeypatch.setattr(llm.engine.inputs.constraints._compiler, "compile", None)
    llm.engine.submit(accepted)
    outputs = []
    while llm.engine.has_unfinished_requests:
        outputs += llm.engine.step()
    assert outputs[-1].finish_reason == "stop"


def test_a_failed_mask_computation_ends_only_the_requests_that_need_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM()

    def failing(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("inflight.grammar.mask_worker.fill_masks", failing)
        params = [params_of("regex", 1), SamplingParams(max_tokens=5)]
        outputs = llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "no room" in (outputs[0].error or "")
    (output,) = llm.generate([PROMPT], params_of("regex", 1), use_tqdm=False)
    assert is_valid("regex", output.outputs[0].text)


def test_a_request_that_raises_in_the_check_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with AsyncLLM(in_process=True) as llm:
            with monkeypatch.context() as patch:
                patch.setattr("inflight.engine.input_processor.InputProcessor.accept", lambda *_, **__: 1 // 0)
                with pytest.raises(InvalidRequestError, match="ZeroDivisionError"):
                    _ = [output async for output in llm.generate(PROMPT)]
            assert [output async for output in llm.generate(PROMPT, SamplingParams(max_tokens=2))]

    asyncio.run(run())

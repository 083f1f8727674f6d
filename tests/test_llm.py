"""The offline `LLM`: prompts in, texts out."""

import gc
import os
import re
import signal
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inflight import LLM, InvalidRequestError, SamplingParams
from inflight.text import Tokenizer
from tests import zoo
from tests.settled import settled
from tests.text.tokenizers_for_tests import byte_level

GREEDY = SamplingParams(temperature=0, max_tokens=12)
WORDS = "42%"  # bytes that the tokenizer has not merged, because the model knows fewer tokens
PROMPTS = [[1, 2, 3], [4] * 30, [5, 6], [7] * 17, [8]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def llm(tokenizer: Tokenizer) -> LLM:
    return LLM(zoo.build("gpt2"), tokenizer.inner, max_num_seqs=3)


def plain(prompt: list[int], num_tokens: int = 12) -> list[int]:
    return zoo.plain_greedy(zoo.build("gpt2"), prompt, num_tokens)


def test_results_keep_the_order_of_the_prompts_and_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=number + 1) for number in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [
        plain(prompt, number + 1) for number, prompt in enumerate(PROMPTS)
    ]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_a_prompt_may_be_text_token_ids_or_a_dict(llm: LLM, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(WORDS)
    (expected,) = llm.generate(WORDS, GREEDY, use_tqdm=False)
    assert expected.prompt == WORDS
    assert expected.prompt_token_ids == token_ids
    for same in (token_ids, {"prompt_token_ids": token_ids}, {"prompt": WORDS}, [WORDS], [token_ids]):
        (output,) = llm.generate(same, GREEDY, use_tqdm=False)
        assert output.outputs[0] == expected.outputs[0]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_text_matches_the_tokens_and_streams_completely(llm: LLM, tokenizer: Tokenizer) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    streamed = [""] * len(PROMPTS)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for delta in llm.stream(PROMPTS, GREEDY):
        streamed[delta.prompt_index] += str(delta)
        tokens[delta.prompt_index] += delta.token_ids
    assert streamed == [output.outputs[0].text for output in outputs]
    assert tokens == [output.outputs[0].token_ids for output in outputs]
    together = tokenizer.decode(PROMPTS[0] + outputs[0].outputs[0].token_ids)
    assert together.endswith(outputs[0].outputs[0].text.rstrip("\ufffd"))


def test_an_llm_that_is_dropped_is_freed_with_its_engine() -> None:
    llm = LLM(zoo.build("gpt2"))
    engine, stream = weakref.ref(llm.engine), llm.stream(PROMPTS, GREEDY)
    next(stream)
    del llm, stream
    while engine() is not None:  # its thread ends after the step that runs
        gc.collect()


def test_streams_of_several_prompts_are_interleaved(llm: LLM) -> None:
    order = [delta.prompt_index for delta in llm.stream(PROMPTS[:3], GREEDY)]
    assert order[:3] == [0, 1, 2]
    assert order[3:6] == [0, 1, 2]


def test_leaving_a_stream_early_frees_everything(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    assert not settled(llm).has_unfinished_requests
    llm.engine.scheduler.block_pool.check([])


def test_two_concurrent_streams_each_get_their_own_outputs(tokenizer: Tokenizer) -> None:
    llm = LLM(zoo.build("gpt2"), tokenizer.inner, max_num_seqs=3, speculation="off")
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    tokens: tuple[list[int], list[int]] = ([], [])
    for a, b in zip(first, second, strict=True):
        tokens[0].extend(a.token_ids)
        tokens[1].extend(b.token_ids)
    assert tokens == (plain(PROMPTS[0]), plain(PROMPTS[1]))


def test_an_interrupt_of_a_caller_that_waits_aborts_its_requests_alone(llm: LLM) -> None:
    held = llm.stream(PROMPTS[0], GREEDY)
    token_ids = next(held).token_ids
    begun = threading.Event()

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    waits = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where tests run in background
    waits.start()
    llm.engine.observer = lambda record: begun.set()

    def generate() -> None:
        while True:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    with pytest.raises(KeyboardInterrupt):
        generate()
    llm.engine.observer = None
    waits.join()
    signal.signal(signal.SIGINT, before)
    assert token_ids + [token_id for delta in held for token_id in delta.token_ids] == plain(PROMPTS[0])
    assert not settled(llm).has_unfinished_requests


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_engine_whose_thread_is_left_is_made_again(
    tokenizer: Tokenizer, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(zoo.build("gpt2"), tokenizer.inner, max_num_seqs=3)

    def left(*_: object) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(llm.engine.runner, "run", left)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == list(map(plain, PROMPTS))
    assert llm.stats().num_crashes == 1


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_text_exactly_and_no_step_runs_after_it(tokenizer: Tokenizer, include: bool) -> None:
    llm = LLM(zoo.build("gpt2"), tokenizer.inner, max_num_seqs=3, speculation="off")
    (whole,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[3:6]
    assert stop not in text[:5]
    steps: list[object] = []
    llm.engine.observer = steps.append
    params = SamplingParams(temperature=0, max_tokens=12, stop=stop, include_stop_str_in_output=include)
    (cut,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    llm.engine.observer = None
    completion = cut.outputs[0]
    assert completion.text == text[: 6 if include else 3]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == whole.outputs[0].token_ids[: len(steps)]
    assert len(steps) < 12


def test_the_stop_token_is_not_part_of_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    token = whole.outputs[0].token_ids[6]
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, stop_token_ids=[token]), use_tqdm=False)
    first = whole.outputs[0].token_ids.index(token)
    assert cut.outputs[0].token_ids == whole.outputs[0].token_ids[: first + 1]
    assert cut.outputs[0].stop_reason == token
    (before,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=first), use_tqdm=False)
    assert cut.outputs[0].text == before.outputs[0].text


def test_metric_times_are_in_order(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        metrics = output.metrics
        times = (
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
            metrics.finished_time,
        )
        assert None not in times
        assert list(times) == sorted(times)  # type: ignore[type-var]


def test_chat_uses_the_chat_template(llm: LLM, tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }} {% endfor %}"
    messages = [{"role": "user", "content": WORDS}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
    assert tokenizer.decode(answer.prompt_token_ids) == "u: 42% "
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False, chat_template=template)
    assert [output.outputs[0] for output in two] == [answer.outputs[0]] * 2
    wordy = "{{ mood }} " + template
    (moody,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=wordy, chat_template_kwargs={"mood": "7"})
    assert tokenizer.decode(moody.prompt_token_ids) == "7 u: 42% "
    with pytest.raises(ValueError, match=r"LLM\.chat has no option 'template'"):
        llm.chat(messages, GREEDY, template=template)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_a_chat_without_parameters_ends_where_the_context_is_full() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = byte_level()
    llm = LLM(zoo.build("gpt2"), tokenizer.inner, max_model_len=60)
    (answer,) = llm.chat([{"role": "user", "content": WORDS}], use_tqdm=False, chat_template=template)
    assert answer.outputs[0].finish_reason == "length"
    assert len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) == 60
    chat = {"messages": [{"role": "user", "content": WORDS}], "chat_template": template}
    (same,) = llm.generate(chat, use_tqdm=False)
    given = same.outputs[0]
    assert given.finish_reason == "stop" or len(same.prompt_token_ids) + len(given.token_ids) == 60
    (text,) = llm.generate(WORDS, use_tqdm=False)
    assert len(text.outputs[0].token_ids) == SamplingParams().max_tokens


def test_truncate_prompt_tokens_keeps_the_last_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=4)
    (output,) = llm.generate(list(range(10, 40)), params, use_tqdm=False)
    assert output.prompt_token_ids == [36, 37, 38, 39]
    assert output.outputs[0].token_ids == plain([36, 37, 38, 39], 5)


@pytest.mark.parametrize(
    ("prompts", "params", "sentence"),
    [
        ([[1], []], GREEDY, "prompt 1: the prompt is empty"),
        ([[1], [2], [10**6]], GREEDY, "prompt 2: the prompt contains token id 1000000"),
        ([[1], [-1]], GREEDY, "prompt 1: the prompt contains token id -1"),
        ([[1], [1.5]], GREEDY, "prompt 1: the prompt contains 1.5"),
        ([[1], None], GREEDY, "prompt 1: the prompt is a NoneType"),
        ([[1], {"text": "x"}], GREEDY, "prompt 1: a prompt given as a dict"),
        ([[1], [1] * 300], GREEDY, "prompt 1: the prompt has 300 tokens"),
        ([[1], [2]], [GREEDY], "2 prompts came with 1 sampling_params"),
        ([1], {"temperature": 0}, "it must be SamplingParams"),
        ([[1]], [None], "sampling_params is or contains None"),
        ([[1], b"ab"], GREEDY, "prompt 1: the prompt is a bytes"),
        (np.array([1, 2]), GREEDY, "the prompt is a ndarray"),
        ([np.array([1, 2])], GREEDY, "prompt 0: the prompt is a ndarray"),
        ([{"messages": "hi"}], GREEDY, "prompt 0: messages is 'hi'"),
        ([{"messages": [1]}], GREEDY, "prompt 0: messages is [1]"),
        (None, GREEDY, "the prompt is a NoneType"),
        ("", GREEDY, "the prompt is empty"),
    ],
)
def test_a_bad_prompt_is_named_by_its_index_and_nothing_runs(
    llm: LLM, prompts: Any, params: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_unfinished_requests


def test_a_request_too_large_for_the_cache_is_refused_and_an_open_ended_one_stops_at_capacity() -> None:
    llm = LLM(zoo.build("gpt2"), num_blocks=2, block_size=16)
    with pytest.raises(ValueError, match="can only serve a sequence of 33"):
        llm.generate([1] * 20, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    (output,) = llm.generate([1] * 20, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].token_ids == plain([1] * 20, 13)


@pytest.mark.parametrize("messages", ["hi", [], None])
def test_an_invalid_chat_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="a chat is a list of dicts"):
        llm.chat(messages)


@pytest.mark.parametrize("source", [123, torch.nn.Linear(2, 2), b"model"])
def test_an_invalid_model_is_refused(source: Any) -> None:
    with pytest.raises(ValueError, match="it must be a hub id, a folder, or a transformers PreTrainedModel"):
        LLM(source)


def test_an_interrupt_outside_a_step_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("inflight.observe.progress.tqdm.update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert not settled(llm).has_unfinished_requests


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_seqs": 4}, "LLM has no option 'max_seqs'; did you mean 'max_num_seqs'?"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"dtype": "float16"}, "float16 is unusably slow on a CPU"),
        ({"max_model_len": 10_000}, "max_model_len is 10000; this model accepts at most 256"),
        ({"block_size": 0}, "block_size is 0"),
        ({"kv_cache_memory": 10}, "the cache may take 10 bytes"),
    ],
)
def test_bad_options_are_refused_with_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        LLM(zoo.build("gpt2"), **options)


def test_a_saved_folder_loads_with_or_without_its_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    zoo.build("gpt2").save_pretrained(tmp_path)
    bare = LLM(tmp_path)
    assert bare.tokenizer is None
    (output,) = bare.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == plain(PROMPTS[0])
    assert output.outputs[0].text == ""
    with pytest.raises(ValueError, match="the prompt is text, but this model has no tokenizer"):
        bare.generate(WORDS, GREEDY)
    with pytest.raises(ValueError, match="there is no tokenizer in"):
        LLM(tmp_path, str(tmp_path))
    tokenizer.inner.save_pretrained(tmp_path)
    assert LLM(str(tmp_path)).generate(WORDS, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_the_generation_config_of_the_model_sets_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("gpt2")
    for name, value in {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.3}.items():
        monkeypatch.setattr(model.generation_config, name, value)
    llm = LLM(model)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)
    assert any("repetition_penalty=1.3" in note for note in llm.model_info.notes)


def test_the_progress_bar_shows_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert re.search(r"5/5 .*60 tokens, \d+ tokens/s", capsys.readouterr().err)


def test_half_a_surrogate_pair_and_a_bare_priority_are_refused_in_a_sentence(llm: LLM) -> None:
    for prompt in ("half \ud800", {"prompt": "half \ud800"}):
        with pytest.raises(
            InvalidRequestError, match=r"has '\\ud800' at place 5; it must be text that UTF-8 can encode"
        ):
            llm.generate(prompt, GREEDY)
    with pytest.raises(InvalidRequestError, match="priority is 1; it must be a list"):
        llm.generate(PROMPTS[0], GREEDY, priority=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n is 16385"):
        SamplingParams(n=16385)


def test_an_id_that_was_accepted_twice_is_submitted_once(llm: LLM) -> None:
    first, second = (llm.engine.inputs.accept("twice", [1, 2, 3], GREEDY) for _ in range(2))
    llm.engine.submit(first)
    with pytest.raises(InvalidRequestError, match="request_id 'twice' is in use"):
        llm.engine.submit(second)
    llm.engine.abort("twice")
    assert not llm.engine.has_unfinished_requests


def test_many_sequences_take_no_more_work_for_each() -> None:
    """What is looked at for one sequence does not grow with the number of its siblings."""
    llm = LLM(zoo.build("llama"), max_num_seqs=8)
    num_looks: list[int] = []
    for n in (100, 400):
        lines = 0

        def count(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return (
                count if frame.f_code.co_filename.endswith(("scheduler.py", "collector.py", "reporting.py")) else None
            )

        before = sys.gettrace()
        sys.settrace(count)
        try:
            llm.engine.submit(llm.engine.inputs.accept("many", [1, 2, 3], SamplingParams(n=n, max_tokens=2)))
            while llm.engine.has_unfinished_requests:
                llm.engine.step()
        finally:
            sys.settrace(before)
        num_looks.append(lines)
    assert num_looks[1] < 6 * num_looks[0]

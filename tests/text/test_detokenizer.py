"""The deltas of a stream add up to the whole text, for any tokenizer, tokens and split."""

import codecs
from collections.abc import Sequence
from itertools import chain, pairwise, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.text import IncrementalDetokenizer, Tokenizer
from tests.text.tokenizers_for_tests import ALL

codecs.register_error("one_by_one", lambda error: ("\ufffd", error.start + 1))

every_tokenizer = pytest.mark.parametrize("tokenizer", ALL.values(), ids=ALL.keys())
texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["The quick fox ", "你好。世界", "😀👨‍👩‍👧 ", "🇩🇪", "e\u0301", " \n", "<tool>", "</s>"]),
    ),
    max_size=8,
).map("".join)
cut_points = st.lists(st.integers(0, 60), max_size=12)


def flat(groups: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(groups))


def token_ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, including some without a token, and runs of byte tokens that are mostly UTF-8."""
    token_of_byte = {byte: token_id for token_id, byte in tokenizer.byte_of_token.items()}
    by_chance = st.integers(0, tokenizer.vocab_size + 3).map(lambda token_id: [token_id])
    if not token_of_byte:
        return st.lists(by_chance, max_size=60).map(flat)
    in_runs = st.one_of(st.binary(max_size=3), st.sampled_from(["é", "字", "😀", "\ufffd"]).map(str.encode))
    runs = in_runs.map(lambda run: [token_of_byte[byte] for byte in run])
    return st.lists(st.one_of(by_chance, runs), max_size=40).map(flat)


def repaired(tokenizer: Tokenizer, token_ids: Sequence[int], skip: bool, complete: bool = False) -> list[int]:
    """`token_ids` with U+FFFD for byte tokens that form no character; `complete`: an incomplete last one is dropped."""
    token_of_byte = {byte: token_id for token_id, byte in tokenizer.byte_of_token.items()}
    result: list[int] = []
    run = b""
    for token_id in token_ids:
        if tokenizer.byte_of_token and not tokenizer.decode([token_id, token_id], skip):
            continue  # no text, so that it does not end a run
        if token_id in tokenizer.byte_of_token:
            run += bytes([tokenizer.byte_of_token[token_id]])
        else:
            result += [*(token_of_byte[byte] for byte in run.decode(errors="one_by_one").encode()), token_id]
            run = b""
    if complete:
        run = run.decode(errors="one_by_one").encode() if not _incomplete(run) else run[: -_incomplete(run)]
    return result + [token_of_byte[byte] for byte in run.decode(errors="one_by_one").encode()]


def _incomplete(run: bytes) -> int:
    """The number of bytes at the end of `run` that begin a character and do not complete it."""
    return next((n for n in (1, 2, 3) if run[-n:] and _begins_a_character(run[-n:])), 0)


def _begins_a_character(run: bytes) -> bool:
    try:
        return codecs.utf_8_decode(run) == ("", 0)
    except UnicodeDecodeError:
        return False


def whole_text(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool = True) -> str:
    known = [token_id for token_id in [*prompt, *output] if tokenizer.has_text(token_id, False)]
    text = tokenizer.decode(repaired(tokenizer, known, skip), skip)
    known_prompt = [token_id for token_id in prompt if tokenizer.has_text(token_id, False)]
    prompt_text = tokenizer.decode(repaired(tokenizer, known_prompt, skip, complete=True), skip)
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt_text, text, strict=False)))
    return text[num_common:]


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], cuts: Sequence[int], skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    bounds = [0, *sorted(min(cut, len(output)) for cut in cuts), len(output)]
    return [*(detokenizer.append(output[a:b]) for a, b in pairwise(bounds)), detokenizer.finish()]


@every_tokenizer
@given(text=texts, num_prompt_tokens=st.integers(0, 40), cuts=cut_points)
def test_text_streams_completely(tokenizer: Tokenizer, text: str, num_prompt_tokens: int, cuts: list[int]) -> None:
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
    assert tokenizer.decode(repaired(tokenizer, token_ids, skip=True)) == tokenizer.decode(token_ids)
    deltas = stream(tokenizer, prompt, output, cuts)
    assert "".join(deltas) == whole_text(tokenizer, prompt, output)
    assert "".join(deltas).count("\ufffd") <= text.count("\ufffd"), "half a character was shown"


@every_tokenizer
@given(data=st.data(), cuts=cut_points, skip=st.booleans())
def test_any_tokens_stream_completely(tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    prompt = data.draw(token_ids_of(tokenizer))
    output = data.draw(token_ids_of(tokenizer))
    assert "".join(stream(tokenizer, prompt, output, cuts, skip)) == whole_text(tokenizer, prompt, output, skip)


@every_tokenizer
@given(data=st.data())
def test_no_more_than_half_a_character_is_held_back(tokenizer: Tokenizer, data: st.DataObject) -> None:
    output = data.draw(token_ids_of(tokenizer))
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    shown = ""
    for num_tokens, token_id in enumerate(output, start=1):
        shown += detokenizer.append([token_id])
        assert whole_text(tokenizer, [], output[:num_tokens])[len(shown) :].strip("\ufffd") == ""
        assert len(whole_text(tokenizer, [], output[:num_tokens])) - len(shown) <= 3


def test_invalid_bytes_and_straddling_tokens_do_not_block() -> None:
    byte_level = ALL["straddling"]
    invalid = byte_level.inner.convert_tokens_to_ids("ÿ")  # byte 0xFF
    detokenizer = IncrementalDetokenizer(byte_level, [])
    assert detokenizer.append([invalid] * 100) == "\ufffd" * 99
    assert detokenizer.finish() == "\ufffd"

    first_byte, straddle = byte_level.inner.convert_tokens_to_ids("ð"), 256  # 0xF0; the rest of an emoji and 0xF0
    detokenizer = IncrementalDetokenizer(byte_level, [first_byte])
    assert [detokenizer.append([straddle]) for _ in range(50)] == ["😀"] * 50
    assert detokenizer.finish() == "\ufffd"


def test_an_invalid_byte_does_not_affect_its_neighbours() -> None:
    tokenizer = ALL["byte_fallback"]
    token_of_byte = {byte: token_id for token_id, byte in tokenizer.byte_of_token.items()}
    token_ids = [token_of_byte[byte] for byte in "字".encode() + b"\xff" + "😀".encode()]
    assert tokenizer.decode(token_ids) == "\ufffd" * 8
    assert "".join(stream(tokenizer, [], token_ids, range(8))) == "字\ufffd😀"


def test_first_output_token_keeps_its_space() -> None:
    for name in ("byte_level", "byte_fallback", "metaspace", "word_piece"):
        tokenizer = ALL[name]
        token_ids = tokenizer.encode("The quick brown fox")
        split = next(n for n in range(1, len(token_ids)) if tokenizer.decode(token_ids[:n]) == "The quick")
        assert "".join(stream(tokenizer, token_ids[:split], token_ids[split:], [])) == " brown fox", name


def test_special_tokens_are_skipped_unless_requested() -> None:
    tokenizer = ALL["byte_fallback"]
    word, end, reserved, tool = tokenizer.inner.convert_tokens_to_ids(["▁quick", "</s>", "<reserved>", "<tool>"])
    tokens = [word, reserved, tool, word, 10_000_000, end]
    assert stream(tokenizer, [word], tokens, range(6)) == ["", " quick", "", "<tool>", " quick", "", "", ""]
    shown = "".join(stream(tokenizer, [word], tokens, [], skip=False))
    assert shown == " quick<reserved><tool> quick</s>"


def test_finish_may_be_called_again() -> None:
    tokenizer = ALL["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert detokenizer.append(tokenizer.encode("😀")[:-1]) == ""
    assert [detokenizer.finish(), detokenizer.finish()] == ["\ufffd", ""]


class CountingTokenizer(Tokenizer):
    num_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


@every_tokenizer
def test_cost_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("The lazy 你 😀 dog. " * 400)

    def num_decoded(num_prompt_tokens: int, num_output_tokens: int, at_once: int) -> int:
        counting = CountingTokenizer(tokenizer.inner)
        assert counting.byte_of_token == tokenizer.byte_of_token
        counting.num_decoded = 0
        detokenizer = IncrementalDetokenizer(counting, token_ids[:num_prompt_tokens])
        for start in range(0, num_output_tokens, at_once):
            detokenizer.append(token_ids[start : min(start + at_once, num_output_tokens)])
        return counting.num_decoded

    assert num_decoded(4000, 0, 1) <= 30
    assert num_decoded(0, 2000, 1) <= 2.1 * num_decoded(0, 1000, 1) <= 2.1 * 1000 * 35
    assert num_decoded(0, 2000, 2000) <= 2000 * 4


@every_tokenizer
def test_cost_of_tokens_without_text_does_not_grow(tokenizer: Tokenizer) -> None:
    counting = CountingTokenizer(tokenizer.inner)
    special = counting.eos_token_id
    assert special is not None
    detokenizer = IncrementalDetokenizer(counting, [special] * 10_000)
    for _ in range(1000):
        assert detokenizer.append([special]) == ""
    assert counting.num_decoded <= 10

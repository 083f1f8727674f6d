"""The text of a sequence ends at its stop string, at the same token and character for any arrival of its tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.contracts.api.structured_output import Reasoning
from inflight.text import OutputText, Tokenizer
from tests.text.test_detokenizer import cut_points, token_ids_of, whole_text
from tests.text.test_stop_strings import first_stop, pieces_of
from tests.text.tokenizers_for_tests import ALL

TOKENIZER = ALL["byte_level"]
STORY = "The quick brown fox jumps over 😀😃 the lazy dog."


def test_a_stop_string_inside_a_token_drops_the_rest() -> None:
    token_ids = TOKENIZER.encode(STORY)
    output = OutputText(TOKENIZER, [], ["ox j", "lazy"])
    delta = output.append(token_ids)
    assert delta == output.text == "The quick brown f"
    assert output.stop_reason == "ox j"
    num_tokens = output.num_tokens_until_stop
    assert "ox j" in TOKENIZER.decode(token_ids[:num_tokens])
    assert "ox j" not in TOKENIZER.decode(token_ids[: num_tokens - 1])
    assert (output.append(token_ids), output.finish(), output.text) == ("", "", delta)
    assert output.num_tokens_until_stop == num_tokens


def test_the_stop_string_can_be_included_in_the_output() -> None:
    output = OutputText(TOKENIZER, [], ["😀😃 t"], include_stop_str_in_output=True)
    assert output.append(TOKENIZER.encode(STORY)) == "The quick brown fox jumps over 😀😃 t"


def test_text_without_a_stop_string_is_complete() -> None:
    token_ids = TOKENIZER.encode(STORY)
    for stop in ([], ["dogs"]):
        output = OutputText(TOKENIZER, [], stop)
        output.append(token_ids)
        output.finish()
        assert (output.text, output.stop_reason, output.num_tokens_until_stop) == (STORY, None, len(token_ids))


def test_held_back_text_is_released_at_the_end() -> None:
    output = OutputText(TOKENIZER, [], ["dog.\n"])
    assert output.append(TOKENIZER.encode(STORY)).endswith("lazy ")
    assert output.finish() == "dog."
    assert output.finish() == ""


def test_a_stop_string_is_found_in_held_back_text() -> None:
    output = OutputText(TOKENIZER, [], ["x\ufffd"])
    output.append([*TOKENIZER.encode("ax"), *TOKENIZER.encode("😀")[:1]])
    assert (output.stop_reason, output.finish(), output.stop_reason, output.text) == (None, "", "x\ufffd", "a")


def test_a_stop_string_before_min_tokens_is_ignored() -> None:
    token_ids = TOKENIZER.encode("abab")
    assert len(token_ids) == 4
    for min_tokens, text in [(0, ""), (1, "ab"), (2, "ab"), (3, "abab")]:
        output = OutputText(TOKENIZER, [], ["ab"], min_tokens=min_tokens)
        output.append(token_ids)
        output.finish()
        assert output.text == text


def test_no_tokens_give_no_text() -> None:
    for tokenizer in ALL.values():
        half_a_character = tokenizer.encode("😀")[:-1]
        assert OutputText(tokenizer, half_a_character, ["\ufffd"]).finish() == ""


def test_special_tokens_are_not_text() -> None:
    token_ids = [*TOKENIZER.encode("dog"), TOKENIZER.eos_token_id]
    shown = []
    for skip_special_tokens in (True, False):
        output = OutputText(TOKENIZER, [], ["</s>"], skip_special_tokens=skip_special_tokens)
        shown.append((output.append(token_ids), output.stop_reason))
    assert shown == [("dog", None), ("dog", "</s>")]


@pytest.mark.parametrize("tokenizer", ALL.values(), ids=ALL.keys())
@given(
    data=st.data(),
    cuts=cut_points,
    stop=st.lists(st.sampled_from(["a", "e ", "\ufffd\ufffd", "字", "T", "x"]), max_size=3),
)
def test_any_split_of_any_tokens_gives_the_same_text(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], stop: list[str]
) -> None:
    prompt, token_ids = data.draw(token_ids_of(tokenizer)), data.draw(token_ids_of(tokenizer))
    output = OutputText(tokenizer, prompt, stop)
    deltas = [output.append(piece) for piece in pieces_of(token_ids, cuts)] + [output.finish()]
    text = whole_text(tokenizer, prompt, token_ids) if token_ids else ""
    expected = first_stop(text, stop)
    assert "".join(deltas) == output.text == (text if expected is None else text[: expected[0]])
    assert output.stop_reason == (None if expected is None else expected[1])

    one_by_one = OutputText(tokenizer, prompt, stop)
    for token_id in token_ids:
        one_by_one.append([token_id])
    one_by_one.finish()
    assert one_by_one.text == output.text
    assert one_by_one.num_tokens_until_stop == output.num_tokens_until_stop


MARKED = st.lists(st.sampled_from(["<t>", "</t>", "<", "</t", " ", "\n", "stop", "s", "op", "a", "字"]), max_size=12)


@given(
    text=MARKED.map("".join),
    begin=st.sampled_from(["", "<t>"]),
    cuts=cut_points,
    stop=st.sampled_from(["stop", "\n", "<"]),
)
def test_stop_strings_count_behind_reasoning_alone(text: str, begin: str, cuts: list[int], stop: str) -> None:
    start, rest = 0, text  # of the answer
    is_reasoning = not begin
    while is_reasoning or (begin and rest.lstrip().startswith(begin)):
        end = rest.find("</t>")
        rest = "" if end < 0 else rest[end + len("</t>") :].lstrip()
        start, is_reasoning = len(text) - len(rest), False
    if not rest:
        start = len(text)
    place = text.find(stop, start)
    token_ids = TOKENIZER.encode(text)
    for pieces in (pieces_of(token_ids, cuts), [[each] for each in token_ids]):
        output = OutputText(TOKENIZER, [], [stop], reasoning=Reasoning(begin=begin, end="</t>"))
        shown = "".join(output.append(piece) for piece in pieces) + output.finish()
        assert shown == output.text == (text if place < 0 else text[:place])
        assert output.stop_reason == (None if place < 0 else stop)

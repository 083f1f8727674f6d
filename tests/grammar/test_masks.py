"""One matcher: its mask allows exactly the possible next tokens; EOS, padding and special tokens; rollback and
copies."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.structured_output import StructuredOutput
from inflight.grammar import GrammarCompiler, GrammarError
from inflight.text.tokenizer import Tokenizer
from tests.grammar.helpers import NUM_PADDING, TOKENIZERS, WIDE, allowed, compiler, ids, matcher, spelled, write
from tests.text.tokenizers_for_tests import ALL

BYTE_LEVEL = TOKENIZERS["byte_level"]
EOS = 2
ASKED = {
    "schema": {"json_schema": json.dumps({"type": "object", "properties": {"the": {"enum": ["quick", "dog"]}}})},
    "object": {"json_object": True},
    "regex": {"regex": "(The|the) [a-zü]{3,9}( dog)?"},
    "choice": {"choice": ("The quick brown fox", "The quick brown ox", "über")},
    "grammar": {"grammar": 'start: "(" start ")" | "fox" | <s>'},
}


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
@pytest.mark.parametrize("kind", ASKED)
def test_a_mask_allows_exactly_the_tokens_that_are_accepted(kind: str, tokenizer_name: str) -> None:
    tokenizer, rng = TOKENIZERS[tokenizer_name], random.Random(0)
    here = matcher(tokenizer, **ASKED[kind])
    for _ in range(25):
        if here.is_finished:
            break
        accepted = [each for each in range(tokenizer.vocab_size + NUM_PADDING) if here.clone().accept(each)]
        assert allowed(here, tokenizer) == accepted
        assert here.accept(rng.choice([each for each in accepted if each != tokenizer.eos_token_id]))


def test_a_mask_allows_every_token_that_begins_the_rest_of_a_choice() -> None:
    """Compares masks with bytes, without a grammar library: every token whose bytes begin the rest of a choice."""
    text = "The quick brown fox"
    here, left = matcher(BYTE_LEVEL, choice=(text,)), text
    while left:
        begins = [i for i in range(4, BYTE_LEVEL.vocab_size - 2) if left.startswith(BYTE_LEVEL.decode([i]) or "\0")]
        assert allowed(here, BYTE_LEVEL) == begins
        assert here.accept(begins[-1])
        left = left[len(BYTE_LEVEL.decode([begins[-1]])) :]
    assert allowed(here, BYTE_LEVEL) == [EOS]


def test_a_rejected_token_changes_nothing() -> None:
    here = matcher(BYTE_LEVEL, regex="ab+")
    a, b = spelled(BYTE_LEVEL, "ab")
    for token_id in (b, EOS, BYTE_LEVEL.vocab_size + 1, BYTE_LEVEL.vocab_size + NUM_PADDING, 10**9, -1):
        assert not here.accept(token_id)
    assert allowed(here, BYTE_LEVEL) == [a]
    assert here.accept(a)


def test_eos_is_allowed_where_the_text_is_complete() -> None:
    here = matcher(BYTE_LEVEL, regex="ab?")
    assert write(here, BYTE_LEVEL, "a") == 1
    assert here.may_stop
    assert not here.is_finished, "it may go on"
    assert EOS in allowed(here, BYTE_LEVEL)
    other = here.clone()
    assert other.accept(EOS)
    assert other.is_finished
    assert not other.accept(EOS), "after the end there is nothing"
    assert write(here, BYTE_LEVEL, "b") == 1
    assert here.may_stop
    assert here.is_finished, "nothing may follow"
    assert allowed(here, BYTE_LEVEL) == [EOS]


def test_an_object_is_finished_after_its_closing_brace() -> None:
    here = matcher(BYTE_LEVEL, json_object=True)
    assert write(here, BYTE_LEVEL, '{"a": [1, {}]') == 13
    assert not here.may_stop
    assert write(here, BYTE_LEVEL, "}") == 1
    assert here.is_finished


def test_a_model_may_have_several_eos_ids_or_none() -> None:
    a = spelled(BYTE_LEVEL, "a")[0]
    several = compiler(BYTE_LEVEL, [1, EOS, 10**6]).compile(StructuredOutput(regex="a+"))
    assert several.accept(a)
    assert {1, EOS} < set(allowed(several, BYTE_LEVEL))
    assert several.accept(1)
    assert several.is_finished
    none = compiler(BYTE_LEVEL, []).compile(StructuredOutput(regex="a|ab"))
    assert none.accept(a)
    assert none.may_stop
    assert allowed(none, BYTE_LEVEL) == spelled(BYTE_LEVEL, "b"), "nothing stands for an end"
    assert write(none, BYTE_LEVEL, "b") == 1
    assert none.is_finished


def test_an_eos_named_in_a_grammar_does_not_end_the_text_early() -> None:
    with pytest.raises(InvalidRequestError, match="lets no token of this model's come next"):
        matcher(BYTE_LEVEL, grammar='start: </s> "a"')


def test_a_grammar_cannot_request_padding() -> None:
    with pytest.raises(InvalidRequestError, match="lets no token of this model's come next"):
        matcher(BYTE_LEVEL, grammar=f"start: <[{BYTE_LEVEL.vocab_size + 3}]>")


def test_special_tokens_are_allowed_only_by_name() -> None:
    special = BYTE_LEVEL.inner.convert_tokens_to_ids("<reserved>")
    named, text = matcher(BYTE_LEVEL, grammar="start: <reserved>"), matcher(BYTE_LEVEL, choice=("<reserved>",))
    assert allowed(named, BYTE_LEVEL) == [special]
    assert special not in allowed(text, BYTE_LEVEL)
    assert write(text, BYTE_LEVEL, "<") == 1
    anything = matcher(BYTE_LEVEL, regex="(.|\n)*")
    assert not {0, 1, special} & set(allowed(anything, BYTE_LEVEL))


def test_a_vocabulary_may_be_narrower_than_that_of_the_tokenizer() -> None:
    narrow = BYTE_LEVEL.vocab_size - 100
    here = GrammarCompiler(BYTE_LEVEL, narrow, [EOS]).compile(StructuredOutput(regex=".*"))
    words = np.empty(-(-narrow // 32), dtype=np.int32)
    here.fill_mask(words)
    assert EOS in ids(words)
    assert max(ids(words)) == narrow - 1
    assert not here.accept(narrow)


def test_copies_of_a_matcher_are_independent() -> None:
    one = matcher(BYTE_LEVEL, choice=("ab", "ac"))
    assert write(one, BYTE_LEVEL, "a") == 1
    two = one.clone()
    assert write(one, BYTE_LEVEL, "b") == 1
    assert one.is_finished
    assert allowed(two, BYTE_LEVEL) == sorted(spelled(BYTE_LEVEL, "bc"))
    assert write(two, BYTE_LEVEL, "c") == 1


def test_json_allows_no_endless_whitespace() -> None:
    for text in ('{"a": 1}', '{\n    "a": [\n\t1,\r\n 2\n]\n}', '{ "a" : {} }'):
        here = matcher(BYTE_LEVEL, json_object=True)
        assert write(here, BYTE_LEVEL, text) == len(spelled(BYTE_LEVEL, text))
        assert here.is_finished
    here = matcher(BYTE_LEVEL, json_object=True)
    assert write(here, BYTE_LEVEL, "{\n" + 200 * " ") == 82


@pytest.mark.parametrize(
    ("format_", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0001-01-31", "1999-12-31", "2023-10-29"], ["2023-02-29", "1900-02-29"]),
        ("date", ["2023-02-28"], ["0000-01-01", "2023-04-31", "2023-13-01", "0000-02-29"]),
        ("date-time", ["2024-02-29T23:59:59Z"], ["2024-02-29T23:59:60Z", "2023-02-29T00:00:00Z"]),
        ("time", ["12:30:00.5+02:00"], ["12:30:60Z", "24:00:00Z"]),
    ],
)
def test_dates_are_valid_calendar_dates(format_: str, good: list[str], bad: list[str]) -> None:
    here = matcher(BYTE_LEVEL, json_schema=json.dumps({"type": "string", "format": format_}))
    for text, is_good in [(text, True) for text in good] + [(text, False) for text in bad]:
        other = here.clone()
        is_taken = write(other, BYTE_LEVEL, f'"{text}"') == len(text) + 2
        assert is_taken == is_good, text


@pytest.mark.parametrize("tokenizer", [ALL["word_piece"], ALL["slow_bytes"]], ids=["word_piece", "slow_bytes"])
def test_tokenizers_with_unknown_bytes_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"this model's tokenizer allows no structured output: .+"):
        matcher(tokenizer, json_object=True)


def byte_level_with(vocabulary: dict[str, int], added: list[str]) -> Tokenizer:
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_tokenizer_may_have_gaps_in_its_ids() -> None:
    tokenizer = byte_level_with({"a": 0, "b": 5}, [])
    with pytest.raises(InvalidRequestError, match="no structured output: there are gaps between its token ids"):
        GrammarCompiler(tokenizer, 8, []).compile(StructuredOutput(regex="a"))


def test_added_tokens_stand_for_their_text() -> None:
    """The library reads an added "é" as GPT-2's stand-in for a byte, so the token is excluded instead of writing a
    wrong byte."""
    tokenizer = byte_level_with({"a": 0, "Ã": 1, "©": 2}, ["aa", "é"])
    here = compiler(tokenizer, []).compile(StructuredOutput(regex="(aa|é)*x?"))
    assert tokenizer.decode([1, 2]) == "é"
    assert allowed(here, tokenizer) == [0, 1, 3]


def test_a_grammar_that_becomes_too_complex_is_an_error_of_its_sequence() -> None:
    here = matcher(BYTE_LEVEL, grammar=WIDE)
    bracket = spelled(BYTE_LEVEL, "(")
    assert allowed(here, BYTE_LEVEL) == bracket
    assert not here.accept(bracket[0])
    with pytest.raises(GrammarError, match=r"cannot be followed any further: .*max is 2000"):
        allowed(here, BYTE_LEVEL)
    assert not here.is_finished, "it did not end well"
    assert not here.accept(EOS)

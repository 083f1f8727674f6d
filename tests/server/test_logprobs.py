"""The formats of log-probabilities, from made-up outputs: order, ties, infinities, tokens with equal text."""

import pytest

from inflight.contracts.api.outputs import Logprob
from inflight.server.openai import logprobs
from inflight.text.detokenizer import IncrementalDetokenizer
from tests.text.tokenizers_for_tests import ALL

POSITIONS = [
    None,
    {7: Logprob(-2.0, 3, " b"), 5: Logprob(-0.5, 1, "a"), 6: Logprob(-1.0, 2, " b")},
    {8: Logprob(float("-inf"), 99, "�"), 5: Logprob(0.0, 1, "a")},
]


def test_log_probabilities_of_a_completion() -> None:
    assert logprobs.of_completion([4, 7, 8], POSITIONS, 2, None, logprobs.TextOffsets(None, start=10)) == {
        "tokens": ["token_id:4", " b", "�"],
        "token_logprobs": [None, -2.0, -9999.0],
        "top_logprobs": [None, {"a": -0.5, " b": -1.0}, {"a": 0.0, "�": -9999.0}],
        "text_offset": [10, 20, 22],
    }
    for num_top, expected in ((0, {" b": -2.0}), (1, {"a": -0.5, " b": -2.0})):
        told = logprobs.of_completion([7], POSITIONS[1:2], num_top, None, logprobs.TextOffsets(None))
        assert told["top_logprobs"] == [expected]


@pytest.mark.parametrize("name", ["byte_level", "straddling", "byte_fallback", "metaspace"])
def test_the_bytes_of_tokens_joined_are_the_text_and_no_token_begins_behind_it(name: str) -> None:
    tokenizer, text = ALL[name], " The fox 😀🦊." if name != "metaspace" else " The fox."
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    positions = [{each: Logprob(-1.0, 1, tokenizer.text_of(each))} for each in token_ids]
    written = IncrementalDetokenizer(tokenizer, [])
    whole = written.append(token_ids) + written.finish()
    entries = logprobs.of_chat(token_ids, positions, 0, tokenizer)
    joined = b"".join(bytes(each["bytes"]) for each in entries).decode()
    assert joined.replace(" ", "") == whole.replace(" ", "")  # a word by itself has no space before it
    places = logprobs.of_completion(token_ids, positions, 0, tokenizer, logprobs.TextOffsets(tokenizer))["text_offset"]
    for place, following, entry in zip(places, [*places[1:], len(whole)], entries, strict=True):
        assert place <= following <= len(whole)
        assert "\ufffd" in entry["token"] or whole[place:following].strip() == entry["token"].strip()


def test_log_probabilities_of_a_chat() -> None:
    first, second = logprobs.of_chat([7, 8], POSITIONS[1:], 2, None)
    assert first == {
        "token": " b",
        "logprob": -2.0,
        "bytes": [32, 98],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": " b", "logprob": -1.0, "bytes": [32, 98]},
        ],
    }
    assert second["logprob"] == -9999.0
    assert logprobs.of_chat([7], POSITIONS[1:2], 0, None)[0]["top_logprobs"] == []


def test_log_probabilities_of_a_prompt() -> None:
    assert logprobs.of_prompt(POSITIONS) == [
        None,
        {
            "7": {"logprob": -2.0, "rank": 3, "decoded_token": " b"},
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "6": {"logprob": -1.0, "rank": 2, "decoded_token": " b"},
        },
        {
            "8": {"logprob": -9999.0, "rank": 99, "decoded_token": "�"},
            "5": {"logprob": 0.0, "rank": 1, "decoded_token": "a"},
        },
    ]

"""The formats of log-probabilities, from made-up outputs: order, ties, infinities, tokens with equal text."""

from inflight.contracts.outputs import Logprob
from inflight.server.openai import logprobs

POSITIONS = [
    None,
    {7: Logprob(-2.0, 3, " b"), 5: Logprob(-0.5, 1, "a"), 6: Logprob(-1.0, 2, " b")},
    {8: Logprob(float("-inf"), 99, "�"), 5: Logprob(0.0, 1, "a")},
]


def test_log_probabilities_of_a_completion() -> None:
    assert logprobs.of_completion([4, 7, 8], POSITIONS, 2, None, offset=10) == {
        "tokens": ["token_id:4", " b", "�"],
        "token_logprobs": [None, -2.0, -9999.0],
        "top_logprobs": [None, {"a": -0.5, " b": -1.0}, {"a": 0.0, "�": -9999.0}],
        "text_offset": [10, 20, 22],
    }
    assert logprobs.of_completion([7], POSITIONS[1:2], 0, None)["top_logprobs"] == [{" b": -2.0}]
    assert logprobs.of_completion([7], POSITIONS[1:2], 1, None)["top_logprobs"] == [{"a": -0.5, " b": -2.0}]


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

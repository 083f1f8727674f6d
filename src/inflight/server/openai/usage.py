"""`usage`: how many tokens a request took, and about how large its answer is. Knows outputs, not answers."""

from collections.abc import Sequence
from typing import Any

from inflight.contracts.outputs import RequestOutput

BYTES_OF_SCORE = 40
"""About what a log-probability takes in JSON."""


def usage_of(
    outputs: Sequence[RequestOutput],
    num_left_out: int = 0,
    *,
    is_predicted: bool = False,
    num_thought_tokens: int | None = None,
) -> dict[str, Any]:
    """Return `usage` of finished outputs, not counting `num_left_out` tokens of each sequence (not requested).

    Args:
        is_predicted: whether to tell how many tokens were guessed, by a prediction or otherwise, and right or wrong.
        num_thought_tokens: how many tokens were thoughts, if the model may think.
    """
    num_completion = sum(len(each.token_ids) - num_left_out for output in outputs for each in output.outputs)
    counts = usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        num_completion,
        sum(output.metrics.num_cached_tokens for output in outputs),
    )
    details = {}
    if num_thought_tokens is not None:
        details["reasoning_tokens"] = num_thought_tokens
    if is_predicted:
        num_accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        num_rejected = sum(output.metrics.num_guessed_tokens for output in outputs) - num_accepted
        details["accepted_prediction_tokens"] = num_accepted
        details["rejected_prediction_tokens"] = num_rejected
    return counts | ({"completion_tokens_details": details} if details else {})


def size_of_answer(outputs: Sequence[RequestOutput]) -> int:
    """Return about how many bytes must be gone through to make an answer of these outputs."""
    size = 0
    for output in outputs:
        positions = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
        size += BYTES_OF_SCORE * sum(len(each) * len(each[-1] or ()) for each in positions if each)
        size += sum(len(each.text) for each in output.outputs)
    return size


def usage(num_prompt: int, num_completion: int, num_cached: int | None = None) -> dict[str, Any]:
    """Return `usage` of the given counts; `num_cached`, tokens found in the prefix cache, is known only at the end."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": None if num_cached is None else {"cached_tokens": num_cached},
    }

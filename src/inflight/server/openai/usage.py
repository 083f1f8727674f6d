"""`usage`: how many tokens a request took. Knows outputs, not the answers that are made of them."""

from collections.abc import Sequence
from typing import Any

from inflight.contracts.outputs import RequestOutput


def usage_of(outputs: Sequence[RequestOutput], num_left_out: int = 0) -> dict[str, Any]:
    """Return `usage` of finished outputs, not counting `num_left_out` tokens of each sequence (not requested)."""
    num_completion = sum(len(each.token_ids) - num_left_out for output in outputs for each in output.outputs)
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        num_completion,
        sum(output.metrics.num_cached_tokens for output in outputs),
    )


def usage(num_prompt: int, num_completion: int, num_cached: int | None = None) -> dict[str, Any]:
    """Return `usage` of the given counts; `num_cached`, tokens found in the prefix cache, is known only at the end."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": None if num_cached is None else {"cached_tokens": num_cached},
    }

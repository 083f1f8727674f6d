"""The workloads are those of the published figures."""

import pytest

from benchmarks.workloads import WORKLOADS, num_ideal_steps, num_static_steps


@pytest.mark.parametrize(
    ("name", "num_slots", "num_prompt_tokens", "num_output_tokens", "ideal_steps", "static_steps"),
    [
        ("W1", 8, 224, 680, 130, 400),
        ("W2-8", 8, 3342, 1065, 179, 445),
        ("W2-32", 32, 3342, 1065, 149, 149),
        ("W3", 16, 16896, 1024, 64, 64),
    ],
)
def test_workloads_have_the_published_sizes(
    name: str, num_slots: int, num_prompt_tokens: int, num_output_tokens: int, ideal_steps: int, static_steps: int
) -> None:
    workload = WORKLOADS[name]
    assert workload.num_slots == num_slots
    assert workload.num_prompt_tokens == num_prompt_tokens
    assert workload.num_output_tokens == num_output_tokens
    assert num_ideal_steps(workload) == ideal_steps
    assert num_static_steps(workload) == static_steps


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_have_the_same_lengths_and_new_tokens_in_every_round(name: str) -> None:
    workload = WORKLOADS[name]
    requests = workload.requests(0)
    assert [(len(request.prompt), request.num_output_tokens) for request in requests] == workload.lengths
    assert requests == workload.requests(0)
    assert all(300 <= token < 20000 for request in requests for token in request.prompt)
    assert max(len(request.prompt) + request.num_output_tokens for request in requests) == workload.max_model_len
    others = workload.requests(1)
    assert all(mine.prompt[:7] != theirs.prompt[:7] for mine, theirs in zip(requests, others, strict=True))


def test_requests_of_w3_share_only_the_common_prefix() -> None:
    prompts = [request.prompt for request in WORKLOADS["W3"].requests(0)]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 32

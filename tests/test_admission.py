"""Admission refuses invalid requests with a sentence that names the value and what is accepted, and resolves the
rest."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.cache_layout import ALL_TOKENS
from inflight.engine.admission import make_request
from inflight.scheduling.sequence import Request

EOS = 2
VOCAB_SIZE = 100


def model_info(max_model_len: int = 20, num_blocks: int = 10, block_size: int = 4) -> ModelInfo:
    return ModelInfo(
        model_class="TinyForCausalLM",
        num_parameters=1,
        checkpoint_dtype="float32",
        dtype="float32",
        device="cpu",
        executor="packed",
        proved_on="the model itself",
        attention_backend="reference",
        quantization=None,
        attention_calls=("1 x 16",),
        logits_error=0.0,
        attention_error=0.0,
        is_batch_invariant=True,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        recompute_beyond=None,
        can_share_prefixes=True,
        block_size=block_size,
        num_blocks=num_blocks,
        cache_groups=(ALL_TOKENS,),
        max_cached_len=num_blocks * block_size,
        kv_bytes_per_token=64,
        kv_bytes_per_lasting_token=64,
        eos_token_ids=(EOS,),
        notes=(),
    )


def request_of(prompt: Sequence[int], info: ModelInfo | None = None, **options: Any) -> Request:
    return make_request("r", prompt, SamplingParams(**options), info or model_info())


def refusal_of(prompt: Sequence[int], info: ModelInfo | None = None, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        request_of(prompt, info, **options)
    return str(caught.value)


# ------------------------------------------------------------------------------------- accepted requests


def test_an_admitted_request_has_everything_that_the_scheduler_needs() -> None:
    params = SamplingParams(n=3, max_tokens=4, min_tokens=2, stop_token_ids=[9])
    assert make_request("r", [5, 6, 7], params, model_info()) == Request(
        request_id="r",
        prompt_token_ids=[5, 6, 7],
        max_num_tokens=7,
        min_output_tokens=2,
        stop_token_ids=frozenset({EOS, 9}),
        num_sequences=3,
        params=params,
    )


def test_the_prompt_is_copied() -> None:
    prompt = [5, 6]
    request = request_of(prompt)
    prompt.append(7)
    assert request.prompt_token_ids == [5, 6]


@pytest.mark.parametrize(
    "prompt",
    [(5, 6), range(5, 7), np.array([5, 6]), [np.int64(5), np.uint8(6)]],
    ids=["tuple", "range", "array", "list"],
)
def test_any_sequence_of_integers_is_a_prompt_and_numpy_integers_become_python_integers(prompt: Sequence[int]) -> None:
    request = request_of(prompt)
    assert request.prompt_token_ids == [5, 6]
    assert [type(token) for token in request.prompt_token_ids] == [int, int]


def test_the_first_and_last_ids_of_the_vocabulary_are_accepted() -> None:
    assert request_of([0, VOCAB_SIZE - 1]).prompt_token_ids == [0, VOCAB_SIZE - 1]


def test_eos_ends_a_sequence_in_addition_to_the_requested_stop_tokens() -> None:
    assert request_of([5]).stop_token_ids == {EOS}
    assert request_of([5], stop_token_ids=[7, 8]).stop_token_ids == {EOS, 7, 8}


def test_ignore_eos_leaves_only_the_requested_stop_tokens() -> None:
    assert request_of([5], ignore_eos=True).stop_token_ids == frozenset()
    assert request_of([5], ignore_eos=True, stop_token_ids=[7]).stop_token_ids == {7}
    assert request_of([5], ignore_eos=True, stop_token_ids=[EOS]).stop_token_ids == {EOS}, "asked for by its number"


@pytest.mark.parametrize(("num_kept", "kept"), [(1, [7]), (2, [6, 7]), (3, [5, 6, 7]), (9, [5, 6, 7])])
def test_truncation_keeps_the_last_tokens_of_the_prompt(num_kept: int, kept: list[int]) -> None:
    request = request_of([5, 6, 7], truncate_prompt_tokens=num_kept, max_tokens=4)
    assert request.prompt_token_ids == kept
    assert request.max_num_tokens == len(kept) + 4


def test_truncation_admits_a_prompt_that_would_be_too_long() -> None:
    assert request_of([5] * 30, truncate_prompt_tokens=19).max_num_tokens == 20


# ------------------------------------------------------------------------------------- length limits


def test_without_max_tokens_a_sequence_may_fill_the_context() -> None:
    assert request_of([5, 6, 7], max_tokens=None).max_num_tokens == 20


def test_without_max_tokens_a_cache_smaller_than_the_context_sets_the_limit() -> None:
    """The last generated token needs no place in the cache, so 3 blocks of 4 serve 13 tokens."""
    assert request_of([5, 6, 7], model_info(num_blocks=3), max_tokens=None).max_num_tokens == 13
    assert request_of([5] * 12, model_info(num_blocks=3), max_tokens=None).max_num_tokens == 13


def test_max_tokens_counts_from_the_end_of_the_prompt() -> None:
    assert request_of([5, 6, 7], max_tokens=1).max_num_tokens == 4
    assert request_of([5, 6, 7], max_tokens=17).max_num_tokens == 20


def test_max_tokens_beyond_the_context_is_reduced_to_the_context() -> None:
    assert request_of([5, 6, 7], max_tokens=18).max_num_tokens == 20
    assert request_of([5, 6, 7], max_tokens=10**9).max_num_tokens == 20


def test_max_tokens_that_just_fits_the_cache_is_accepted_and_one_more_is_refused() -> None:
    info = model_info(num_blocks=3)
    assert request_of([5, 6, 7], info, max_tokens=10).max_num_tokens == 13
    assert refusal_of([5, 6, 7], info, max_tokens=11) == (
        "the prompt has 3 tokens and would grow to 14; the whole cache can only serve a sequence of 13 "
        "(3 blocks of 4 tokens); a larger kv_cache_memory, or a kv_cache_dtype of fewer bits, makes room for more"
    )


def test_max_tokens_needs_no_more_cache_than_the_context_allows() -> None:
    assert request_of([5], model_info(max_model_len=13, num_blocks=3), max_tokens=100).max_num_tokens == 13


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_that_the_cache_cannot_hold_is_refused(max_tokens: int | None) -> None:
    assert refusal_of([5] * 13, model_info(num_blocks=3), max_tokens=max_tokens) == (
        "the prompt has 13 tokens and would grow to 14; the whole cache can only serve a sequence of 13 "
        "(3 blocks of 4 tokens); a larger kv_cache_memory, or a kv_cache_dtype of fewer bits, makes room for more"
    )


def test_a_prompt_that_leaves_room_for_one_token_is_accepted_and_a_longer_one_is_refused() -> None:
    assert request_of([5] * 19).max_num_tokens == 20
    assert refusal_of([5] * 20) == (
        "the prompt has 20 tokens; with at least one to be generated, at most 19 are accepted (max_model_len is 20)"
    )


# ------------------------------------------------------------------------------------- invalid prompts


@pytest.mark.parametrize("prompt", [[], (), np.array([], dtype=np.int64)], ids=["list", "tuple", "array"])
def test_an_empty_prompt_is_refused(prompt: Sequence[int]) -> None:
    assert refusal_of(prompt) == "the prompt is empty; it must have at least one token"


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 10**30])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    sentence = f"token id {token_id}; the model's vocabulary has the ids from 0 to 99"
    assert refusal_of([5, token_id, 6]) == f"the prompt contains {sentence}"


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 10**30])
def test_a_stop_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    sentence = f"token id {token_id}; the model's vocabulary has the ids from 0 to 99"
    assert refusal_of([5], stop_token_ids=[6, token_id]) == f"stop_token_ids contains {sentence}"


@pytest.mark.parametrize("wrong", [1.0, float("nan"), None, "a", "7", [7], np.float64(1.0)], ids=repr)
def test_a_token_id_that_is_not_an_integer_is_refused(wrong: Any) -> None:
    assert refusal_of([5, wrong]) == f"the prompt contains {wrong!r}, which is not a token id (an integer)"


def test_a_text_is_not_a_sequence_of_token_ids() -> None:
    assert refusal_of("hello") == "the prompt contains 'h', which is not a token id (an integer)"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", [None, 5, np.array([[5, 6]])], ids=["None", "5", "a batch of one, as tokenizers make"]
)
def test_a_prompt_that_is_not_a_sequence_of_integers_is_refused(prompt: Any) -> None:
    assert "prompt" in refusal_of(prompt)

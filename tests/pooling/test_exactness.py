"""Texts in one packed row get the output of plain `transformers` for each alone, with the same bits in any batch."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.pooling import PooledText, PoolingPlan
from inflight.execution.attention import AttentionSpec
from inflight.execution.executors.counting import FROM_ZERO
from inflight.execution.preparation import packed_proof
from inflight.execution.preparation.attention_calls import FoundCalls
from tests.pooling.checkpoints import (
    CLASSIFIERS,
    FAMILIES,
    MAX_POSITIONS,
    TextRunner,
    classifier,
    draw_ids,
    make_model,
)

LENGTHS = (1, 30, 2, 150, 7, 64, 1, 17, 100)
TOLERANCE, BFLOAT16_TOLERANCE = 1e-5, 5e-2
STATES = PoolingPlan("embed", ("cls", "mean", "lasttoken", "max"))
"""Without normalisation, and with modes that see every token: whatever is wrong shows."""


def embedding_of(model: PreTrainedModel, token_ids: list[int], **inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([token_ids]), **inputs).last_hidden_state[0].float()
    return torch.cat([states[0], states.mean(0), states[-1], states.amax(0)])


def logits_of(model: PreTrainedModel, token_ids: list[int], **inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), **inputs).logits[0].float()
    return logits


def texts_of(*lengths: int) -> list[PooledText]:
    return [PooledText(ids) for ids in draw_ids(*lengths)]


def relative_error(actual: object, expected: torch.Tensor) -> float:
    return float((torch.tensor(actual) - expected).norm() / expected.norm())


def assert_plain(
    runner: TextRunner,
    texts: list[PooledText],
    plain: Callable[[list[int]], torch.Tensor],
    tolerance: float = TOLERANCE,
) -> None:
    """All texts at once, and one by one, against the plain model; and the same bits in any order and number."""
    together = runner.run(texts)
    for text, own in zip(texts, together, strict=True):
        assert relative_error(own, plain(text.token_ids)) < tolerance
        assert runner.run([text]) == [own]
    assert runner.run(texts[::-1]) == together[::-1]
    assert runner.run(texts[::2]) == together[::2]


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_plain_transformers(family: str) -> None:
    model = make_model(family)
    runner = TextRunner(model, EngineConfig(), STATES)
    assert runner.info.is_batch_invariant
    assert runner.info.is_recorded == (family != "gpt2")  # which asks for values of tensors
    assert_plain(runner, texts_of(*LENGTHS), lambda ids: embedding_of(model, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_may_be_as_long_as_the_model_allows(family: str) -> None:
    model = make_model(family)
    runner = TextRunner(model, EngineConfig(max_num_batched_tokens=32), STATES)
    longest = runner.info.max_model_len
    assert longest == MAX_POSITIONS - (2 if "roberta" in family else 0)
    (text,) = texts_of(longest)
    assert relative_error(runner.run([text])[0], embedding_of(model, text.token_ids)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_padding_token_in_a_text_is_what_it_is_to_the_plain_model(family: str) -> None:
    """RoBERTa gives it a position of its own."""
    model = make_model(family)
    padding = model.config.pad_token_id
    texts = texts_of(20, 9, 30)
    texts[1].token_ids[4] = padding
    texts[2].token_ids[0] = texts[2].token_ids[-1] = padding
    runner = TextRunner(model, EngineConfig(), STATES)
    assert_plain(runner, texts, lambda ids: embedding_of(model, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str) -> None:
    model = make_model(family).to(torch.bfloat16)
    runner = TextRunner(model, EngineConfig(), STATES)
    assert runner.info.dtype == "bfloat16"
    assert runner.info.proved_on == "a float32 proxy"
    assert_plain(runner, texts_of(1, 30, 90), lambda ids: embedding_of(model, ids), BFLOAT16_TOLERANCE)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_backends_give_the_same(family: str, backend: str) -> None:
    model = make_model(family)
    runner = TextRunner(model, EngineConfig(attention_backend=backend), STATES)
    texts = texts_of(*LENGTHS)
    for text, own in zip(texts, runner.run(texts), strict=True):
        assert relative_error(own, embedding_of(model, text.token_ids)) < TOLERANCE


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classifiers_are_those_of_plain_transformers(family: str) -> None:
    model = classifier(family, 3)
    runner = TextRunner(model, EngineConfig(), PoolingPlan("classify", labels=("a", "b", "c")))
    assert_plain(runner, texts_of(*LENGTHS), lambda ids: logits_of(model, ids))


def test_tokens_of_a_second_text_have_another_type() -> None:
    model = classifier("bert", 3)  # one logit alone may be small by chance, and its relative error large
    runner = TextRunner(model, EngineConfig(), PoolingPlan("classify", labels=("a", "b", "c")))
    ids = draw_ids(12)[0]
    types = [0] * 5 + [1] * 7
    single, pair = runner.run([PooledText(ids), PooledText(ids, types)])
    assert relative_error(pair, logits_of(model, ids, token_type_ids=torch.tensor([types]))) < TOLERANCE
    assert relative_error(single, logits_of(model, ids)) < TOLERANCE
    assert single != pair


# ----------------------------------------------------------------------- what is wrong is refused at load


def load_with(change: Callable[[AttentionSpec], AttentionSpec], family: str, dtype: torch.dtype) -> TextRunner:
    """Load a model whose attention calls are taken for others."""
    found = packed_proof.find_calls

    def find(model: PreTrainedModel, length: int) -> FoundCalls:
        calls = found(model, length)
        return calls._replace(specs=tuple(map(change, calls.specs)))

    with mock.patch.object(packed_proof, "find_calls", find):
        return TextRunner(make_model(family).to(dtype), EngineConfig(), STATES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_direction_is_refused(family: str) -> None:
    right = packed_proof.is_causal
    with (
        mock.patch.object(packed_proof, "is_causal", lambda plain: not right(plain)),
        pytest.raises(ModelError, match="does not give the plain model's results"),
    ):
        TextRunner(make_model(family), EngineConfig(), STATES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("family", ["modernbert", "gemma3, bidirectional"])
def test_a_window_that_is_off_by_one_is_refused(family: str, by: int, dtype: torch.dtype) -> None:
    """In bfloat16, which would hide it, by the proxy."""
    from dataclasses import replace

    def change(spec: AttentionSpec) -> AttentionSpec:
        return spec if spec.window is None else replace(spec, window=spec.window + by)

    with pytest.raises(ModelError, match="does not give the plain model's results"):
        load_with(change, family, dtype)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_positions_counted_from_zero_are_refused(family: str) -> None:
    with (
        mock.patch.object(packed_proof, "counting_of", return_value=FROM_ZERO),
        pytest.raises(ModelError, match="does not give the plain model's results"),
    ):
        TextRunner(make_model(family), EngineConfig(), STATES)


def test_a_model_with_position_biases_is_refused() -> None:
    from transformers import MPNetConfig, MPNetModel

    model = MPNetModel(MPNetConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ModelError, match=r"cannot run as a packed row|takes no position_ids|does its attention itself"):
        TextRunner(model.eval(), EngineConfig(), STATES)


def test_the_callers_model_stays_as_it_is() -> None:
    model = classifier("bert", 2)
    before = logits_of(model, draw_ids(9)[0])
    TextRunner(model, EngineConfig(), PoolingPlan("classify", labels=("a", "b")))
    assert torch.equal(logits_of(model, draw_ids(9)[0]), before)

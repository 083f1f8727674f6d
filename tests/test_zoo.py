"""The promises of the zoo: its models are sensitive to broken attention, and its way of breaking attention is
correct."""

import pytest
import torch

from tests import zoo
from tests.zoo import Mutation

every_architecture = pytest.mark.parametrize("name", zoo.ARCHITECTURES)


def test_every_architecture_has_a_factor() -> None:
    assert zoo.FACTORS.keys() == zoo.ARCHITECTURES.keys()
    assert set(zoo.FACTORS.values()) <= set(zoo.FACTOR_LADDER)


@every_architecture
def test_packed_rows_with_the_correct_mask_match_the_plain_model(name: str) -> None:
    assert zoo.packing_noise(zoo.build(name)) < 2e-5


@every_architecture
@pytest.mark.thorough("llama", "gemma2", "gpt2", "deepseek")
def test_mutations_change_most_argmaxes_and_output_is_varied(name: str) -> None:
    measured = zoo.sensitivity(zoo.build(name))
    assert measured.suffices(min_share=0.5, min_distinct=20), measured


@every_architecture
def test_every_mechanism_of_attention_matters(name: str) -> None:
    """The shares are smaller than above: if all layers have windows, a lost block or a shift reaches only some
    positions."""
    model = zoo.build(name)
    shares = {mutation.name: zoo.share_changed(model, mutation) for mutation in zoo.mechanisms(model)}
    assert min(shares.values()) >= 0.2, shares


def test_mechanisms_are_those_of_the_architecture() -> None:
    common = {Mutation.LOST_BLOCK, Mutation.SHIFTED_POSITIONS}
    assert set(zoo.mechanisms(zoo.build("llama"))) == common
    assert set(zoo.mechanisms(zoo.build("mistral"))) == common | {Mutation.NO_WINDOW}
    assert set(zoo.mechanisms(zoo.build("gemma2"))) == common | {Mutation.NO_WINDOW, Mutation.NO_SOFTCAP}
    assert set(zoo.mechanisms(zoo.build("gpt_oss"))) == common | {Mutation.NO_WINDOW, Mutation.NO_SINKS}


def test_matrices_with_the_usual_deviation_are_not_sensitive_enough() -> None:
    """The measure can fail: with the usual deviation, GPT-2 repeats its input regardless of attention."""
    assert not zoo.sensitivity(zoo.draw("gpt2", factor=1, seed=0)).suffices()


def test_find_factor_reproduces_the_table() -> None:
    """Checks one architecture on the first rung and one above it; all of them would take half a minute."""
    assert {name: zoo.find_factor(name) for name in ("stablelm", "llama")} == {"stablelm": 4, "llama": 8}


@every_architecture
def test_two_builds_are_equal_bit_for_bit(name: str) -> None:
    random_state = torch.random.get_rng_state()
    first, second = zoo.build(name), zoo.draw(name, zoo.FACTORS[name], seed=0)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert first is not second
    states = first.state_dict(), second.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    sequence = zoo.sample_sequences()[0]
    assert torch.equal(zoo.plain_logits(first, sequence), zoo.plain_logits(second, sequence))


def test_different_seeds_give_different_models() -> None:
    sequence = zoo.sample_sequences()[0]
    assert not torch.equal(
        zoo.plain_logits(zoo.build("llama"), sequence), zoo.plain_logits(zoo.build("llama", 1), sequence)
    )


@every_architecture
def test_plain_greedy_follows_plain_logits_and_leaves_the_model_unchanged(name: str) -> None:
    model, prompt = zoo.build(name), zoo.sample_sequences()[1]
    prompt[5] = model.generation_config.pad_token_id  # a token like any other
    with zoo.attention_implementation(model, zoo.MUTANT):
        tokens = zoo.plain_greedy(model, prompt, 24)
        logits = zoo.plain_logits(model, prompt + tokens)
        assert model.config._attn_implementation == zoo.MUTANT
    assert model.config._attn_implementation == "eager"
    assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_longrope_changes_beyond_its_original_length() -> None:
    model, sequence = zoo.build("phi3_longrope"), zoo.sample_sequences()[0]
    length = zoo.ORIGINAL_MAX_POSITIONS
    short, long = zoo.plain_logits(model, sequence[:length]), zoo.plain_logits(model, sequence[: length + 1])[:length]
    assert (short.argmax(-1) != long.argmax(-1)).float().mean() > 0.4


def test_the_final_softcap_has_an_effect() -> None:
    model = zoo.build("gemma2")
    cap = model.config.final_logit_softcapping
    assert 0.75 * cap < zoo.plain_logits(model, zoo.sample_sequences()[0]).abs().max() < 0.95 * cap

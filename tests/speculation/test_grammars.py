"""Draft tokens do not change the output under a grammar, whichever tokens it allows next: added and special tokens, in
vocabularies of bytes, of parts of characters and with byte fallback."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from inflight import LLM, SamplingParams, StructuredOutput
from inflight.contracts.api.structured_output import Reasoning
from tests.grammar.helpers import NUM_PADDING, TOKENIZERS, allowed, matcher
from tests.speculation.oracle import make_rows_free
from tests.speculation.random_requests import generate, said

PIECES = [
    *('"abc"', '" the dog"', '"grün 😀"', "<tool>", "<reserved>", "/[a-c]{1,3}/", "/[0-9a-z ]{0,9}/"),
    *('("x" | "xyz")', '("b" | <tool>)', '"c"?', '(<tool> "a"){2}'),
]
GRAMMARS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(lambda pieces: f"start: {' '.join(pieces)}")
REASONING = st.sampled_from([None, None, Reasoning(end="<tool>", max_tokens=9), Reasoning(end="</s>")])


@cache
def engines(name: str) -> tuple[LLM, LLM]:
    """The same model twice: without draft tokens, and with every draft token of its own drafters computed."""
    inner = TOKENIZERS[name].inner
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    models = [LlamaForCausalLM(LlamaConfig(vocab_size=len(inner) + NUM_PADDING, **shape)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, speculating = LLM(models[0], inner, speculation="off"), LLM(models[1], inner)
    make_rows_free(speculating.engine)
    return plain, speculating


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.thorough("straddling")
def test_draft_tokens_change_nothing_in_any_grammar(name: str) -> None:
    plain, speculating = engines(name)

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.builds(StructuredOutput, grammar=GRAMMARS, reasoning=REASONING), min_size=1, max_size=6))
    def check(wanted: list[StructuredOutput]) -> None:
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=60, structured_output=each)
            for seed, each in enumerate(wanted)
            for temperature in (0.0, 1.0)
        ]
        prompts = ["The quick brown fox"] * len(params)
        expected = generate(plain, prompts, params)
        for _ in range(2):  # the second time what the first gave is looked up, too
            for output, right in zip(generate(speculating, prompts, params), expected, strict=True):
                assert said(output) == said(right)
                assert output.error is None

    check()
    assert speculating.engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("name", TOKENIZERS)
def test_looking_ahead_leaves_a_matcher_as_it_is(name: str) -> None:
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=30, deadline=None)
    @given(st.data(), GRAMMARS)
    def check(data: st.DataObject, grammar: str) -> None:
        looked_at = matcher(tokenizer, grammar=grammar)
        left_alone = looked_at.clone()
        for _ in range(40):
            forced = looked_at.forced()
            looked_at.num_allowed([*forced, tokenizer.eos_token_id, 5])
            choices = allowed(left_alone, tokenizer)
            assert allowed(looked_at, tokenizer) == choices
            token_id = data.draw(st.sampled_from(choices))
            assert looked_at.accept(token_id) == left_alone.accept(token_id) is True
            if looked_at.is_finished:
                break

    check()

"""The embedded demo model: its files, its tokenizer, the grammar of its training data, and what it learned of that."""

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight import LLM, SamplingParams
from inflight.server.chat_format.answer_template import call_format_of
from inflight.server.chat_format.families import HERMES
from tests import zoo
from tools.story_cast import SLOTS
from tools.story_grammar import draw_request, generate_chat, generate_story, parses, split_sentences
from tools.story_rules import RULES
from tools.train_demo_model import ASSISTANT, BOS, EOS, FOLDER, render, sample_stories


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto").eval()


def told_sentences(stories: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [sentence for _ in range(stories) for sentence in split_sentences(generate_story(rng))]


# --- the files ------------------------------------------------------------------------------------------------------


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in Path(FOLDER).iterdir() if path.is_file()) <= 8_000_000


def test_weights_load_as_float32() -> None:
    assert {parameter.dtype for parameter in model().parameters()} == {torch.float32}


def test_without_any_option_its_greedy_tokens_are_the_plain_models() -> None:
    prompts = ["Once upon a time", "In a quiet village", "One morning, a fox", "Long ago, there was a brave owl"]
    outputs = LLM().generate(prompts, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == zoo.plain_greedy(model(), tokenizer()(prompt)["input_ids"], 60)


def test_generation_config_ends_at_both_tokens() -> None:
    config = model().generation_config
    assert config.eos_token_id == tokenizer().convert_tokens_to_ids(["</s>", "<|end|>"])
    assert config.pad_token_id == tokenizer().pad_token_id
    assert (config.do_sample, config.temperature, config.top_p) == (True, 0.8, 0.95)


def test_no_file_names_a_path_of_the_machine_that_made_it() -> None:
    texts = [path.read_text("utf-8") for path in Path(FOLDER).iterdir() if path.suffix in {".json", ".md", ".jinja"}]
    assert not any(re.search(r"/(home|work|tmp|root)/", text) for text in texts)


# --- the tokenizer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Once upon a time",
        " two  spaces, and\n\nnew lines\r\n\tand tabs ",
        "🦊 a fox, 👩‍👩‍👧 a family, 中文也可以, naïve café",
        "it 's odd , isn 't it ?",
        "".join(map(chr, range(1, 256))),
    ],
)
def test_any_text_survives_a_round_trip_through_the_tokenizer(text: str) -> None:
    ids = tokenizer()(text)["input_ids"]
    assert ids[0] == tokenizer().bos_token_id
    assert tokenizer().decode(ids[1:]) == text
    assert tokenizer().decode(ids, skip_special_tokens=True) == text


def test_every_byte_is_in_the_vocabulary() -> None:
    pieces = {piece for piece in tokenizer().get_vocab() if len(piece) == 1}
    assert len(pieces) >= 256


def test_chat_template_is_what_the_model_was_trained_on() -> None:
    for seed in range(20):
        chat = generate_chat(random.Random(seed))
        assert tokenizer().apply_chat_template(chat, tokenize=False) == BOS + render(chat)
    prompt = tokenizer().apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == BOS + render(chat[:1]) + ASSISTANT


def test_chat_template_refuses_an_unknown_role() -> None:
    with pytest.raises(Exception, match="unknown role poet"):
        tokenizer().apply_chat_template([{"role": "poet", "content": "Be brief."}], tokenize=False)


def test_chat_template_tells_the_model_about_tools_in_the_form_of_hermes() -> None:
    weather = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        for arguments in ({"city": "Rome"}, '{"city": "Oslo"}')
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Fine."},
    ]
    written = tokenizer().apply_chat_template(chat, tools=[weather], tokenize=False, add_generation_prompt=True)
    preamble, *turns = written.removeprefix(BOS).split("<|end|>")
    learned = call_format_of(tokenizer().chat_template)
    assert learned is not None
    assert HERMES.calls is not None
    assert replace(learned, name=HERMES.calls.name) == HERMES.calls
    assert preamble.startswith("<|user|>Tools:\n<tools>\n" + json.dumps(weather) + "\n</tools>\n")
    assert turns == [
        "<|user|>Be brief.",
        "<|user|>How is it?",
        '<|assistant|><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "<|user|><tool_response>\nsunny\n</tool_response>",
        "<|assistant|>Fine.",
        ASSISTANT,
    ]


# --- the grammar ----------------------------------------------------------------------------------------------------


def test_every_symbol_in_the_grammar_has_a_meaning() -> None:
    for texts in RULES.values():
        for symbol in re.findall(r"\{([\w.]+)\}", " ".join(texts)):
            slot, _, form = symbol.partition(".")
            assert symbol in RULES or all(form in item for item in SLOTS[slot]), symbol


def test_the_grammar_recognises_its_own_stories() -> None:
    assert [sentence for sentence in told_sentences(150, seed=1) if not parses(sentence)] == []


def test_stories_differ_in_length_and_in_words() -> None:
    lengths = {len(split_sentences(generate_story(random.Random(seed)))) for seed in range(300)}
    assert set(range(2, 16)) <= lengths
    assert len(set(told_sentences(1000, seed=2))) > 5000


def test_a_granted_request_contains_what_was_asked_for() -> None:
    request = draw_request(random.Random(0))
    assert request.asked
    assert request.granted_by("A story about " + " and ".join(request.asked) + ".")
    assert not request.granted_by("A story about nothing.")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("One day, Mia saw that her red kite was gone.", "One day, Mia saw that his red kite was gone."),
        ("One day, Mia saw that her red boots were gone.", "One day, Mia saw that her red boots was gone."),
        ("Wherever Mia went, she took her old map along.", "Wherever Mia went, he took her old map along."),
        ("His greatest treasure was an old map.", "His greatest treasure was a old map."),
        ('"Thank you, Otto," said Mia.', '"Thank you, Mia," said Mia.'),
        ("Mia did not give up, but crawled under the branches.", "Mia did not give up, but crawl under the branches."),
        ("Mia thanked Otto with all her heart.", "mia thanked Otto with all her heart."),
        ("Mia told Otto the whole story.", "Mia told Otto whole the story."),
        ("The end.", "The end"),
    ],
)
def test_the_grammar_is_strict(right: str, wrong: str) -> None:
    assert parses(right)
    assert not parses(wrong)


def test_shuffled_words_are_not_a_sentence() -> None:
    rng = random.Random(3)
    sentences = [sentence for sentence in told_sentences(60, seed=3) if len(sentence.split()) > 4]
    shuffled = [" ".join(rng.sample(words, len(words))) for words in map(str.split, sentences)]
    assert sum(map(parses, shuffled)) <= 0.01 * len(shuffled)


def test_a_quotation_stays_in_its_sentence() -> None:
    text = '"Oh no! Where is it?" asked Mia. "Here it is." The end.'
    assert split_sentences(text) == ['"Oh no! Where is it?" asked Mia.', '"Here it is."', "The end."]


# --- the model ------------------------------------------------------------------------------------------------------


def test_sampled_sentences_parse() -> None:
    torch.manual_seed(0)
    stories = sample_stories(model(), tokenizer(), 12)
    sentences = [sentence for story in stories for sentence in split_sentences(story)][:60]
    assert len(sentences) == 60
    assert sum(map(parses, sentences)) >= 0.95 * len(sentences)
    assert len(set(sentences)) >= 45


def test_greedy_continuation_of_once_upon_a_time_is_a_story() -> None:
    prompt = tokenizer()("Once upon a time", return_tensors="pt")
    ids = model().generate(**prompt, max_new_tokens=300, do_sample=False)[0]
    assert tokenizer().decode(ids[-1]) == EOS
    story = tokenizer().decode(ids, skip_special_tokens=True)
    assert len(split_sentences(story)) > 1

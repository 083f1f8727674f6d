"""Every end-of-turn token ends a sequence, wherever it is declared. An id without a token is not an error by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from inflight import LLM, SamplingParams
from inflight.cli import app
from inflight.contracts.api.errors import ModelError
from inflight.text import Tokenizer
from inflight.text.tokenizer_files import read_tokenizer
from tests.gguf.files import tiny, write, write_vocabulary

MARKS = ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "</s>", "<|im_end|>", "<|start|>", "<|end|>"]
ID = {mark: 257 + place for place, mark in enumerate(MARKS)}
NO_TOKEN = 2**32 - 1
CHATML = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}CLOSED{% endfor %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}"
    "{{ '<|eot_id|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}"
)
KEY = "tokenizer.ggml.{}_token_id".format


def closed_by(mark: str) -> str:
    """A chat template that writes this behind every message."""
    return CHATML.replace("CLOSED", mark)


def tokenizer(template: str | None, eos: str | None = "<|end_of_text|>") -> PreTrainedTokenizerFast:
    """Bytes, the word "is", and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({each: i for i, each in enumerate([*alphabet, "is"])}, [("i", "s")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)


def says(llm: LLM, mark: str, **options: Any) -> tuple[int, str | None]:
    """How many tokens a model gives that says nothing but this mark, and why it ends."""
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={ID[mark]: 100}, **options)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    return len(output.outputs[0].token_ids), output.outputs[0].finish_reason


@pytest.mark.parametrize(
    ("template", "ids", "ends"),
    [
        (None, {}, {"<|end_of_text|>": KEY("eos")}),
        (None, {"eot": ID["<|eot_id|>"]}, {"<|end_of_text|>": KEY("eos"), "<|eot_id|>": KEY("eot")}),
        (
            closed_by("<|eot_id|>\n"),
            {"eot": ID["<|eot_id|>"], "eom": ID["<|eom_id|>"]},
            {"<|end_of_text|>": KEY("eos"), "<|eot_id|>": f"{KEY('eot')}, chat template", "<|eom_id|>": KEY("eom")},
        ),
        (closed_by("<end_of_turn>"), {}, {"<|end_of_text|>": KEY("eos"), "<end_of_turn>": "chat template"}),
        (closed_by("\n <|eot_id|>\n"), {}, {"<|end_of_text|>": KEY("eos"), "<|eot_id|>": "chat template"}),
        (closed_by("<|end_of_text|>"), {"eot": NO_TOKEN}, {"<|end_of_text|>": f"{KEY('eos')}, chat template"}),
        (closed_by("<|eot_id|>"), {"eos": NO_TOKEN}, {"<|eot_id|>": "chat template"}),
        (closed_by("<|end|><|end_of_text|>"), {}, {"<|end_of_text|>": f"{KEY('eos')}, chat template"}),
        (HARMONY, {"eos": ID["<|eot_id|>"]}, {"<|eot_id|>": f"{KEY('eos')}, chat template"}),
        (closed_by("\n### End <|eot_id|>"), {}, {"<|end_of_text|>": KEY("eos")}),
        ("{{ raise_exception('never') }}", {}, {"<|end_of_text|>": KEY("eos")}),
        ("{{ messages[0].content }}<|eot_id|>", {}, {"<|end_of_text|>": KEY("eos")}),
    ],
)
def test_a_file_s_ends_are_what_its_keys_and_its_template_say(
    template: str | None, ids: dict[str, int], ends: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_vocabulary(path, tokenizer(template), "gpt-2", ids)
    read = read_tokenizer(str(path))
    assert read is not None
    assert read.ends() == {ID[mark]: names for mark, names in ends.items()}


@pytest.mark.parametrize(
    ("template", "eos", "configured", "ends"),
    [
        (None, "</s>", [], {"</s>": "tokenizer"}),
        (None, "</s>", ["<|im_end|>"], {"<|im_end|>": "configuration"}),
        (None, None, [], {}),
        (
            closed_by(" </s>"),
            "</s>",
            ["<|im_end|>"],
            {"<|im_end|>": "configuration", "</s>": "tokenizer, chat template"},
        ),
        (
            closed_by("<|end|><|im_end|>"),
            None,
            ["</s>", "<|im_end|>"],
            {"</s>": "configuration", "<|im_end|>": "configuration, chat template"},
        ),
        (closed_by("<|end|>"), "</s>", [], {"</s>": "tokenizer", "<|end|>": "chat template"}),
        (
            closed_by("<|end|></s>"),
            "</s>",
            ["<|im_end|>"],
            {"<|im_end|>": "configuration", "</s>": "tokenizer, chat template"},
        ),
    ],
)
def test_a_folder_s_ends_are_those_of_its_configuration_tokenizer_and_template(
    template: str | None, eos: str | None, configured: list[str], ends: dict[str, str]
) -> None:
    found = Tokenizer(tokenizer(template, eos)).ends([ID[mark] for mark in configured])
    assert found == {ID[mark]: names for mark, names in ends.items()}


def test_a_file_s_model_stops_at_each_of_them(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ids = {"eot": ID["<|eot_id|>"], "padding": NO_TOKEN, "unknown": 320, "bos": NO_TOKEN}
    model = tiny("llama", num_hidden_layers=1)
    write(path, model, lambda name: "F32", tokenizer(closed_by("<end_of_turn>")), ids=ids)
    llm = LLM(str(path), dtype="float32", num_blocks=60)
    ends = {"<|end_of_text|>", "<|eot_id|>", "<end_of_turn>"}
    assert {mark: says(llm, mark) for mark in MARKS} == {
        mark: (1, "stop") if mark in ends else (20, "length") for mark in MARKS
    }
    assert says(llm, "<|eot_id|>", ignore_eos=True) == (20, "length")
    assert any("names no pre-tokenizer" in note for note in llm.model_info.notes)
    for options in ([], ["--load"]):
        shown = CliRunner().invoke(app, ["info", str(path), *options]).output
        assert "tokenizer.ggml.eot_token_id)" in shown
        assert "<end_of_turn> (chat template)" in shown
        assert "names no pre-tokenizer" in shown
    summary = json.loads(CliRunner().invoke(app, ["info", "--json", str(path)]).output)
    assert summary["eos_token_ids"] == list(llm.model_info.eos_token_ids)


def test_a_loaded_model_stops_where_its_template_closes_an_answer() -> None:
    model = tiny("llama", num_hidden_layers=1)
    model.generation_config.eos_token_id = ID["<|im_end|>"]
    llm = LLM(model, tokenizer=tokenizer(closed_by("</s>"), "</s>"), num_blocks=60)
    assert [says(llm, mark) for mark in ("<|im_end|>", "</s>", "<|end|>")] == [(1, "stop"), (1, "stop"), (20, "length")]
    assert llm.model_info.eos_named_by == ("configuration", "tokenizer, chat template")


@pytest.mark.parametrize("role", ["eos", "eot", "eom"])
def test_an_end_outside_the_vocabulary_is_refused_by_its_key(role: str, tmp_path: Path) -> None:
    path, size = tmp_path / "model.gguf", 257 + len(MARKS)
    write_vocabulary(path, tokenizer(None), "gpt-2", {role: size})
    with pytest.raises(ModelError, match=rf"the file's '{KEY(role)}' is {size}, which is not below {size}"):
        read_tokenizer(str(path))
    said = json.loads(CliRunner().invoke(app, ["info", "--json", str(path)]).output)["notes"]
    assert KEY(role) in said[0], "and the rest of the header is shown"


@pytest.mark.parametrize("number", [NO_TOKEN, 257 + len(MARKS)])
def test_a_role_that_is_not_used_may_have_any_id(number: int, tmp_path: Path) -> None:
    path, inner = tmp_path / "model.gguf", tokenizer(None)
    for role in ("padding", "unknown", "bos"):
        write_vocabulary(path, inner, "gpt-2", {role: number})
        read = read_tokenizer(str(path))
        assert read is not None
        assert read.encode("this") == Tokenizer(inner).encode("this")
    inner.bos_token = "<|start|>"  # the file now asks for one before every text
    write_vocabulary(path, inner, "gpt-2", {"bos": number})
    with pytest.raises(ModelError, match=rf"the file's '{KEY('bos')}' is {number}"):
        read_tokenizer(str(path))

"""Loading, encoding, chats, and the messages of errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.contracts.api.errors import InvalidRequestError, ModelError
from inflight.text.tokenizer_files import read_tokenizer
from tests.text.tokenizers_for_tests import ALL, byte_fallback

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('No such\nrole') }}"
    "{% endif %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}{% if mood %} ({{ mood }}){% endif %}"
)
MESSAGES = [{"role": "user", "content": "The dog"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ALL["byte_fallback"].inner.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_is_loaded(folder: Path) -> None:
    tokenizer, original = read_tokenizer(str(folder)), ALL["byte_fallback"]
    assert tokenizer is not None
    assert tokenizer.encode(" The dog 你") == original.encode(" The dog 你")
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (2, original.vocab_size)
    assert tokenizer.encode("The dog")[0] == 1, "the tokenizer's own special tokens are added"
    assert tokenizer.decode(tokenizer.encode("The dog , and")) == "The dog , and", "no clean-up of spaces"
    assert tokenizer.decode(tokenizer.encode("The dog"), skip_special_tokens=False) == "<s> The dog"


def test_a_folder_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    assert read_tokenizer(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert read_tokenizer(str(tmp_path)) is None


def test_broken_files_are_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0",\n "model')
    with pytest.raises(ModelError, match=r"cannot load the tokenizer of '.*': .+") as caught:
        read_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def test_files_without_a_vocabulary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ModelError, match="its files hold no vocabulary"):
        read_tokenizer(str(tmp_path))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        read_tokenizer(str(tmp_path / "absent"))


def test_the_chat_template_is_applied() -> None:
    tokenizer = byte_fallback()
    tokenizer.inner.chat_template = TEMPLATE

    def text(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False).replace(" ", "")

    assert text(tokenizer.chat(MESSAGES)) == "<s>user:Thedog</s><s>assistant:"
    assert text(tokenizer.chat(MESSAGES, add_generation_prompt=False)) == "<s>user:Thedog</s>"
    assert text(tokenizer.chat(MESSAGES, chat_template_kwargs={"mood": "calm"})).endswith("<s>assistant:(calm)")
    assert text(tokenizer.chat(MESSAGES, chat_template="{{ messages[0].content }}")) == "Thedog"
    assert text(tokenizer.chat(MESSAGES, add_generation_prompt=False, continue_final_message=True)) == "<s>user:Thedog"


IN_PARTS = (
    "{% for m in messages %}<s>{{ m.role }}: {% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}</s>{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [IN_PARTS, IN_PARTS.replace("m.content %}", "m.content | selectattr('type', 'equalto', 'text') %}")]
)
def test_a_template_that_reads_parts_gets_texts_in_parts(template: str) -> None:
    """As those of many multimodal models do, which lose a plain text without an error."""
    tokenizer = byte_fallback()
    tokenizer.inner.chat_template = template
    history = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "Woof"}]}]
    assert tokenizer.render_chat(history) == "<s>user: The dog</s><s>assistant: Woof</s>"
    assert history[0] == MESSAGES[0], "the caller's messages stay as they are"
    either = "{% if m.content is string %}{{ m.content }}{% else %}in parts{% endif %}"
    assert (
        tokenizer.render_chat(MESSAGES, chat_template=f"{{% for m in messages %}}{either}{{% endfor %}}") == "The dog"
    )


def test_the_template_of_a_processor_is_the_models(folder: Path) -> None:
    """Older multimodal checkpoints have it in a file of the processor alone."""
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": IN_PARTS}))
    tokenizer = read_tokenizer(str(folder))
    assert tokenizer is not None
    assert tokenizer.render_chat(MESSAGES) == "<s>user: The dog</s>"


def test_bad_chats_are_refused() -> None:
    tokenizer = byte_fallback()
    with pytest.raises(InvalidRequestError, match="has no chat template"):
        tokenizer.chat(MESSAGES)
    tokenizer.inner.chat_template = TEMPLATE
    with pytest.raises(InvalidRequestError, match=r"^the chat template cannot write these messages: No such role$"):
        tokenizer.chat([{"role": "wizard", "content": "The dog"}])
    with pytest.raises(InvalidRequestError, match="at least one message"):
        tokenizer.chat([])


def test_has_text_is_false_for_special_and_unknown_ids() -> None:
    tokenizer = ALL["byte_fallback"]
    end, reserved, tool, word = tokenizer.inner.convert_tokens_to_ids(["</s>", "<reserved>", "<tool>", "▁quick"])
    assert [tokenizer.has_text(i) for i in (end, reserved, tool, word)] == [False, False, True, True]
    assert [tokenizer.has_text(i, skip_special_tokens=False) for i in (end, reserved)] == [True, True]
    for tokenizer in ALL.values():
        assert [tokenizer.has_text(i) for i in (-1, 10_000_000, 2**70)] == [False, False, False]


def test_only_byte_fallback_has_byte_tokens() -> None:
    for name, tokenizer in ALL.items():
        assert len(tokenizer.byte_of_token) == (256 if name == "byte_fallback" else 0)


def test_the_import_is_light() -> None:
    code = "import sys, inflight.text; sys.exit(bool({'transformers', 'tokenizers', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0

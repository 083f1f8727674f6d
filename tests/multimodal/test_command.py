"""Images on the command line."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from inflight import LLM
from inflight.contracts.api.errors import InvalidRequestError
from inflight.demo_model import DEMO_MODEL
from inflight.text.processor_files import has_processor
from tests.cli.test_chat import Terminal
from tests.command import Command, command
from tests.multimodal.models import image, with_processor
from tests.server.test_serve_command import served

__all__ = ["command"]

OPTIONS = ["--max-tokens", 4, "--temperature", 0, "--num-blocks", 100]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, beside two images."""
    model, processor = with_processor("llava")
    folder = tmp_path_factory.mktemp("images") / "model"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    image(0).save(folder.parent / "a page.png")
    image(1).save(folder.parent / "other.png")
    return folder


def test_generate_answers_about_an_image(folder: Path, tmp_path: Path, command: Command) -> None:
    options = ["--image", folder.parent / "a page.png", "-m", folder, *OPTIONS]
    done = command("generate", "What is it?", *options)
    assert done.returncode == 0, done.stderr
    parts = [{"type": "image", "image": image(0)}, {"type": "text", "text": "What is it?"}]
    assert done.stdout == "".join(f"{text}\n" for text in answers(folder, [parts]))
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "A"}]}')
    refused = command("generate", "--file", tmp_path / "chat.jsonl", *options)
    assert refused.returncode != 0
    assert "a chat has its images, sounds and videos in its messages" in refused.stderr
    refused = command("generate", "What is it?", "--video", folder.parent / "a page.png", "-m", folder, *OPTIONS)
    assert "the model's processor reads no videos" in refused.stderr
    assert "text, images" in command("info", "-m", folder).stdout


def answers(folder: Path, turns: list[Any]) -> list[str]:
    """What the library answers to the turns of a chat."""
    llm, messages = LLM(folder, num_blocks=100), list[dict[str, Any]]()
    params = replace(llm.get_default_sampling_params(), temperature=0, max_tokens=4)
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        (output,) = llm.chat(messages, params, use_tqdm=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    return [message["content"] for message in messages[1::2]]


def test_a_chat_has_the_images_that_are_attached(folder: Path, command: Command) -> None:
    lines = ["/image ~/a page.png", "/image ~/other.png", "/image", "/image ~/a page.png"]
    lines += [f"/image  {folder.parent / 'other.png'} ", "What are they?", "And why?"]
    done = command("chat", "-m", folder, *OPTIONS, stdin="\n".join(lines), HOME=str(folder.parent))
    assert done.returncode == 0, done.stderr
    images: list[dict[str, Any]] = [{"type": "image", "image": image(number)} for number in range(2)]
    turns = [[*images, {"type": "text", "text": "What are they?"}], "And why?"]
    assert done.stdout == "".join(f"{text}\n" for text in answers(folder, turns))
    told = [line.partition("next message: ")[2] for line in done.stderr.splitlines() if "next message" in line]
    assert told == ["1)", "2)", "0)", "1)", "2)"]


def test_a_chat_goes_on_without_an_image_that_cannot_be_read(folder: Path) -> None:
    terminal = Terminal("-m", str(folder), *map(str, OPTIONS))
    for path in ("~nobody/a.png", str(folder / "config.json"), str(folder)):
        terminal.until("> ")
        terminal.type(f"/image {path}\n")
        terminal.until("inflight: an image cannot be read: ")
    terminal.until("> ")
    terminal.type(f"/image {folder.parent / 'a page.png'}\n")
    terminal.until("(images of the next message: 1)")
    terminal.until("> ")
    terminal.type("What is it?\n")
    terminal.until("(cut: max_tokens")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_a_chat_refuses_images_for_a_model_of_texts(command: Command) -> None:
    done = command("chat", stdin="/help\n/image page.png\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "/image PATH " in done.stderr
    assert "there can be no images: LlamaForCausalLM has no encoder for them" in done.stderr


def test_the_server_reads_images(folder: Path) -> None:
    """Its process has torch then, which processors need."""
    data = base64.b64encode((folder.parent / "a page.png").read_bytes()).decode()
    image_part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [image_part, {"type": "text", "text": "What is it?"}]
    (text,) = answers(folder, [[{"type": "image", "image": image(0)}, content[1]]])
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    with served(str(folder), "--num-blocks", "100") as (_, client):
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == text
    both = ("--model", f"one={folder}", "--model", "two=inflight-demo", "--num-blocks", "100")
    with served(*both) as (_, client):
        answer = client.post("/v1/chat/completions", json={**body, "model": "one"}).json()
        assert answer["choices"][0]["message"]["content"] == text


def test_a_checkpoint_with_a_processor_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        if name != "org/sees" or file != "preprocessor_config.json":
            raise OSError
        return file

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert has_processor(folder)
    assert not has_processor(tmp_path)
    assert has_processor("org/sees", "main")
    assert not has_processor("org/reads", "main")
    assert len(asked) == 4


def test_a_text_only_model_says_that_it_reads_no_images(folder: Path) -> None:
    llm = LLM(str(DEMO_MODEL), num_blocks=64)
    with pytest.raises(InvalidRequestError, match="reads no images and no sounds"):
        llm.generate({"prompt": "a", "images": [folder.parent / "a page.png"]}, use_tqdm=False)

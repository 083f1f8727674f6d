"""Images on the command line."""

from dataclasses import replace
from pathlib import Path

from inflight import LLM
from tests.command import Command, command
from tests.multimodal.models import image, with_processor

__all__ = ["command"]


def test_generate_answers_about_an_image(tmp_path: Path, command: Command) -> None:
    model, processor = with_processor("llava")
    folder, page = tmp_path / "model", tmp_path / "page.png"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    image(0).save(page)
    options = ["-m", folder, "--max-tokens", 4, "--temperature", 0, "--num-blocks", 100]
    done = command("generate", "What is it?", "--image", page, *options)
    assert done.returncode == 0, done.stderr
    parts = [{"type": "image", "image": image(0)}, {"type": "text", "text": "What is it?"}]
    llm = LLM(folder, num_blocks=100)
    params = replace(llm.get_default_sampling_params(), temperature=0, max_tokens=4)
    (expected,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    assert done.stdout == expected.outputs[0].text + "\n"
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "A"}]}')
    refused = command("generate", "--file", tmp_path / "chat.jsonl", "--image", page, *options)
    assert refused.returncode != 0
    assert "a chat has its images in its messages" in refused.stderr
    assert "text, images" in command("info", "-m", folder).stdout

"""Sounds over HTTP and on the command line, with a tiny GLM-ASR."""

import base64
import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from inflight import LLM, AsyncLLM, SamplingParams
from tests.command import Command, command
from tests.multimodal.models import plain_answer
from tests.multimodal.sounds import file_of, sound, with_sounds
from tests.server.serving import RunningServer

__all__ = ["command"]

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
ASKED = "Please transcribe this audio into text"
"""What the processor of GLM-ASR asks by itself."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model, processor = with_sounds()
    limit = {"audio": 1}
    llm = AsyncLLM(copy.deepcopy(model), processor, in_process=True, num_blocks=400, limit_mm_per_prompt=limit)
    folder = tmp_path_factory.mktemp("sounds")
    (folder / "talk.wav").write_bytes(file_of(sound(0)))
    with RunningServer(llm, model_name="m", allowed_local_media_path=str(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def llm() -> LLM:
    model, processor = with_sounds()
    return LLM(copy.deepcopy(model), processor, num_blocks=100)


def answer(llm: LLM, text: str) -> str:
    """What the model answers to a message about a sound, offline."""
    parts = [{"type": "audio", "audio": file_of(sound(0))}, {"type": "text", "text": text}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    return output.outputs[0].text


def test_an_answer_is_that_of_the_plain_model(llm: LLM) -> None:
    model, processor = with_sounds()
    text = "<s><audio>What is this?</s>"
    inputs = processor(text=text, audio=[sound(0)], return_tensors="pt")
    (output,) = llm.generate({"prompt": text, "audios": [sound(0)]}, GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == plain_answer(copy.deepcopy(model), inputs, NUM_TOKENS)
    assert llm.model_info.input_modalities == ("audio",)


def test_the_chat_in_the_terminal(server: RunningServer, llm: LLM, tmp_path: Path, command: Command) -> None:
    (tmp_path / "talk.wav").write_bytes(file_of(sound(0)))
    lines = f"/audio {tmp_path / 'talk.wav'}\nWhat is this?\n"
    done = command("chat", "--url", server.url, "--max-tokens", NUM_TOKENS, "--temperature", 0, stdin=lines)
    assert done.stdout == answer(llm, "What is this?") + "\n", done.stderr
    assert "(sounds of the next message: 1)" in done.stderr


@pytest.mark.parametrize("sent", ["data", "data URL", "address"])
def test_chat_completions(server: RunningServer, llm: LLM, sent: str) -> None:
    data = base64.b64encode(file_of(sound(0))).decode()
    part: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    if sent != "data":
        file = f"file://{server.app.state.settings.allowed_local_media_path}/talk.wav"
        url = file if sent == "address" else f"data:audio/wav;base64,{data}"
        part = {"type": "audio_url", "audio_url": {"url": url}}
    content: list[Any] = [part, {"type": "text", "text": "What is this?"}]
    messages: list[Any] = [{"role": "user", "content": content}]
    options: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
    assert server.client.chat.completions.create(**options).choices[0].message.content == answer(llm, "What is this?")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages[0]["content"] = [picture, *content]
    mixed = server.http.post("/v1/chat/completions", json=options)
    assert mixed.headers["x-inflight-ignored-fields"] == "image"
    messages[0]["content"] = content * 2
    refused = server.http.post("/v1/chat/completions", json=options).json()["error"]["message"]
    assert refused == "messages: the prompt has 2 sounds; at most 1 are accepted (limit_mm_per_prompt)"


def test_responses(server: RunningServer, llm: LLM) -> None:
    data = base64.b64encode(file_of(sound(0))).decode()
    content = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "input_text", "text": "What is this?"},
    ]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": NUM_TOKENS, "temperature": 0}
    (message,) = server.http.post("/v1/responses", json=body).json()["output"]
    assert message["content"][0]["text"] == answer(llm, "What is this?")


def test_transcriptions(server: RunningServer, llm: LLM) -> None:
    create = server.client.audio.transcriptions.create
    options: Any = {"model": "m", "file": ("a.wav", file_of(sound(0))), "temperature": 0}
    options["extra_body"] = {"max_completion_tokens": NUM_TOKENS}
    expected = answer(llm, ASKED)
    whole = create(**options)
    assert whole.text == expected
    assert whole.usage.total_tokens == whole.usage.input_tokens + NUM_TOKENS
    assert create(**options, response_format="text") == expected + "\n"
    assert create(**options, prompt="Who speaks?").text == answer(llm, "Who speaks?").lstrip()
    events = list(create(**options, stream=True))
    assert [event.type for event in events][-1] == "transcript.text.done"
    assert events[-1].text == "".join(event.delta for event in events[:-1]) == expected


def test_a_transcription_is_refused_by_name(server: RunningServer) -> None:
    def refused(fields: dict[str, str], content: bytes | None = b"RIFF") -> Any:
        files = {} if content is None else {"file": ("a.wav", content)}
        response = server.http.post("/v1/audio/transcriptions", data=fields, files=files)
        assert response.status_code == 400, response.text
        return response.json()["error"]

    assert refused({}, None)["param"] == "file"
    assert "a sound cannot be read: it has no format that libsndfile knows" in refused({})["message"]
    assert "response_format is 'verbose_json'" in refused({"response_format": "verbose_json"})["message"]
    assert refused({"temperature": "warm"})["param"] == "temperature"
    assert refused({"n": "2"})["param"] == "n"
    assert (
        "a language is given, but the model's processor takes none"
        in refused({"language": "en"}, file_of(sound(0)))["message"]
    )
    assert server.http.post("/v1/audio/transcriptions", data={"model": "x"}, files={"file": b"a"}).status_code == 404
    odd = server.http.post("/v1/audio/transcriptions", content=b"x", headers={"content-type": "multipart/form-data"})
    assert odd.status_code == 400


def test_a_text_only_model_transcribes_nothing() -> None:
    with RunningServer(AsyncLLM(num_blocks=400), model_name="m") as server:
        with pytest.raises(openai.BadRequestError, match="LlamaForCausalLM reads no sounds here"):
            server.client.audio.transcriptions.create(model="m", file=("a.wav", file_of(sound(0))))
        part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1, "return_token_ids": True}
        response = server.http.post("/v1/chat/completions", json=body)
        assert response.headers["x-inflight-ignored-fields"] == "audio"
        assert server.llm.tokenizer is not None
        shown = server.llm.tokenizer.decode(response.json()["prompt_token_ids"])
        assert "[audio omitted: it cannot be read here]" in shown


def test_generate_answers_about_a_sound(tmp_path: Path, command: Command) -> None:
    model, processor = with_sounds()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    (tmp_path / "a sound.wav").write_bytes(file_of(sound(0)))
    options = ["-m", tmp_path / "model", "--max-tokens", NUM_TOKENS, "--temperature", 0, "--num-blocks", 100]
    done = command("generate", "What is it?", "--audio", tmp_path / "a sound.wav", *options)
    assert done.returncode == 0, done.stderr
    llm = LLM(tmp_path / "model", num_blocks=100)
    parts = [{"type": "audio", "audio": tmp_path / "a sound.wav"}, {"type": "text", "text": "What is it?"}]
    params = replace(llm.get_default_sampling_params(), temperature=0, max_tokens=NUM_TOKENS)
    (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    assert done.stdout == f"{output.outputs[0].text}\n"
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "A"}]}))
    refused = command("generate", "--file", tmp_path / "chat.jsonl", "--audio", tmp_path / "a sound.wav", *options)
    assert "a chat has its images, sounds and videos in its messages" in refused.stderr

"""Images over the three APIs, with the real clients."""

import base64
import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from inflight import LLM, AsyncLLM, SamplingParams
from tests.command import Command, command
from tests.multimodal.models import image, with_processor
from tests.server.serving import RunningServer

__all__ = ["command"]

NUM_TOKENS = 6
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}</s>{% endfor %}"
)
OMITTED = "[image omitted: it cannot be read here]"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    model, processor = with_processor("llava")
    processor = copy.copy(processor)
    processor.chat_template = TEMPLATE
    limit = {"image": 2}
    llm = AsyncLLM(copy.deepcopy(model), processor, in_process=True, num_blocks=400, limit_mm_per_prompt=limit)
    with RunningServer(llm, model_name="m") as running:
        yield running


def data(number: int) -> str:
    file = io.BytesIO()
    image(number).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url(number: int) -> str:
    return f"data:image/png;base64,{data(number)}"


@pytest.fixture(scope="module")
def expected() -> str:
    """What the model says about an image, offline."""
    model, processor = with_processor("llava")
    llm = LLM(copy.deepcopy(model), processor, num_blocks=100)
    prompt = {"prompt": "<s>user: What is <image> this?</s>", "images": [image(0)]}
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
    return output.outputs[0].text


def test_chat_completions(server: RunningServer, expected: str) -> None:
    content: list[Any] = [
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": {"url": url(0), "detail": "high"}},
        {"type": "text", "text": " this?"},
    ]
    messages: list[Any] = [{"role": "user", "content": content}]
    options: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = server.client.chat.completions.create(**options)
    assert answer.choices[0].message.content == expected
    again = server.client.chat.completions.create(**options)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 16, "neither encoded nor prefilled again"
    with server.client.chat.completions.create(**options, stream=True) as stream:
        assert "".join(each.choices[0].delta.content or "" for each in stream if each.choices) == expected


def test_responses(server: RunningServer, expected: str) -> None:
    content: list[Any] = [
        {"type": "input_text", "text": "What is "},
        {"type": "input_image", "image_url": url(0), "detail": "auto"},
        {"type": "input_text", "text": " this?"},
    ]
    answer = server.client.responses.create(
        model="m", input=[{"role": "user", "content": content}], max_output_tokens=NUM_TOKENS, temperature=0
    )
    assert answer.output_text == expected
    assert server.http.get(f"/v1/responses/{answer.id}").status_code == 200


def test_messages(server: RunningServer, expected: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": data(0)}
    content: list[Any] = [
        {"type": "text", "text": "What is "},
        {"type": "image", "source": source},
        {"type": "text", "text": " this?"},
    ]
    messages: list[Any] = [{"role": "user", "content": content}]
    greedy = {"temperature": 0}
    answer = client.messages.create(model="m", max_tokens=NUM_TOKENS, messages=messages, extra_body=greedy)
    assert answer.content[0].text == expected  # type: ignore[union-attr]
    assert client.messages.count_tokens(model="m", messages=messages).input_tokens == (
        answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    )


def test_the_chat_in_the_terminal(server: RunningServer, tmp_path: Path, command: Command) -> None:
    file, options = tmp_path / "a page.png", ["--max-tokens", NUM_TOKENS, "--temperature", 0]
    image(0).save(file)
    lines = f"/image {file}\nWhat is this?\n"
    done = command("chat", "--url", server.url, *options, stdin=lines)
    content: list[Any] = [
        {"type": "image_url", "image_url": {"url": url(0)}},
        {"type": "text", "text": "What is this?"},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "temperature": 0}
    (choice,) = server.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert done.stdout == choice["message"]["content"] + "\n", done.stderr
    for path, message in ((tmp_path / "absent.png", "No such file"), (Path(__file__), "is not the name of one")):
        refused = command("chat", "--url", server.url, stdin=f"/image {path}\n")
        assert refused.returncode == 2
        assert "an image cannot be read: " in refused.stderr
        assert message in refused.stderr


def test_an_image_in_a_tool_result_reaches_the_model(server: RunningServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}

    def prompt_tokens(number: int | None) -> int:
        part = (
            {"type": "text", "text": ""} if number is None else {"type": "image_url", "image_url": {"url": url(number)}}
        )
        messages = [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [part]},
        ]
        response = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens"])

    assert prompt_tokens(0) == prompt_tokens(None) + 16


def test_other_images_are_refused_or_left_out(server: RunningServer) -> None:
    def post(part: dict[str, Any], **headers: str) -> Any:
        messages = [{"role": "user", "content": [{"type": "text", "text": "A"}, part]}]
        return server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}, headers=headers)

    broken = post({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    assert broken.status_code == 400
    assert "messages: an image cannot be read" in broken.json()["error"]["message"]
    remote = post({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}})
    assert remote.status_code == 200
    assert remote.headers["x-inflight-ignored-fields"] == "image_url"
    spoofed = post({"type": "text", "text": "\ufdd0" + "0" * 32 + "\ufdd0"})
    assert spoofed.status_code == 200
    assert spoofed.headers["x-inflight-ignored-fields"] == "image"


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_more_images_than_the_limit_are_refused_before_they_are_read(server: RunningServer, path: str) -> None:
    broken = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    address = f"data:image/png;base64,{broken['data']}"
    parts: dict[str, Any] = {
        "chat/completions": {"type": "image_url", "image_url": {"url": address}},
        "responses": {"type": "input_image", "image_url": address},
        "messages": {"type": "image", "source": broken},
    }
    turns = [{"role": "user", "content": [parts[path]] * 3}]
    body = {"input": turns} if path == "responses" else {"messages": turns, "max_tokens": 1}
    refused = server.http.post(f"/v1/{path}", json=body)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.endswith("the prompt has 3 images; at most 2 are accepted (limit_mm_per_prompt)")


def test_a_text_only_model_gets_a_text_instead_of_an_image(command: Command) -> None:
    with RunningServer(AsyncLLM(num_blocks=400), model_name="m") as server:
        content = [{"type": "text", "text": "A"}, {"type": "image_url", "image_url": {"url": url(0)}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "return_token_ids": True}
        response = server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.headers["x-inflight-ignored-fields"] == "image"
        assert server.llm.tokenizer is not None
        assert OMITTED in server.llm.tokenizer.decode(response.json()["prompt_token_ids"])
        refused = command("chat", "--url", server.url, stdin="/image page.png\n")
        assert "there can be no images: m reads none" in refused.stderr


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain(server: RunningServer, expected: str, api: str) -> None:
    """Its own blocks, and those of the API."""
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make agents")
    model = langchain.ChatOpenAI(
        model="m",
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        max_tokens=NUM_TOKENS,
        temperature=0,
        use_responses_api=api == "responses",
    )
    for block in (
        {"type": "image", "base64": data(0), "mime_type": "image/png"},
        {"type": "image_url", "image_url": {"url": url(0)}},
    ):
        parts = [{"type": "text", "text": "What is "}, block, {"type": "text", "text": " this?"}]
        assert model.invoke([("user", parts)]).text == expected

"""Images by address, from a host and a folder that the operator allows."""

import asyncio
import base64
import copy
import gzip
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, AsyncLLM
from inflight.contracts.api.errors import InvalidRequestError
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.addresses import MAX_ADDRESSES, Addresses
from tests.multimodal.models import image, with_processor
from tests.multimodal.test_server import NUM_TOKENS, TEMPLATE, expected
from tests.multimodal.test_server import data as encoded
from tests.server.serving import RunningServer

__all__ = ["expected"]

HEADER = "x-inflight-ignored-fields"
PNG = base64.b64decode(encoded(0))
PATHS = ["chat/completions", "responses", "messages"]


class Host(ThreadingHTTPServer):
    """Serves images and trouble; `asked` has the paths of all requests, and `hangs` answers only when `release` is
    set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.is_hanging, self.release = threading.Event(), threading.Event()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        path = self.path.strip("/").partition("?")[0]
        self.server.asked.append((path, {name.lower(): value for name, value in self.headers.items()}))
        if path == "hangs":
            self.server.is_hanging.set()
            self.server.release.wait(60)
        content = PNG if path != "zipped" else gzip.compress(PNG)
        self.send_response({"moved": 302, "absent": 404}.get(path, 200))
        if path == "moved":
            self.send_header("Location", "/image")
        if path == "zipped":
            self.send_header("Content-Encoding", "gzip")
        if path != "endless":
            self.send_header("Content-Length", str(len(content) + (path == "short") - 5 * (path == "long")))
        self.end_headers()
        try:
            self.wfile.write(content)
            while path == "endless":
                self.wfile.write(bytes(2**16))
        except OSError:
            pass

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.release.set()
        running.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image, a link to it, and a link to one outside."""
    outside = tmp_path_factory.mktemp("outside")
    inside = outside / "a folder"
    inside.mkdir()
    for each in (outside, inside):
        image(0).save(each / "a page.png")
    (inside / "link.png").symlink_to(inside / "a page.png")
    (inside / "escape.png").symlink_to(outside / "a page.png")
    os.mkfifo(inside / "pipe.png")
    (inside / "loop").symlink_to(inside / "loop")
    return inside


def serving(**settings: Any) -> RunningServer:
    model, processor = with_processor("llava")
    processor = copy.copy(processor)
    processor.chat_template = TEMPLATE
    limit = {"image": 2}
    llm = AsyncLLM(copy.deepcopy(model), processor, in_process=True, num_blocks=400, limit_mm_per_prompt=limit)
    return RunningServer(llm, model_name="m", **settings)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving(allowed_media_domains=("127.0.0.1",), allowed_local_media_path=str(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def strict(folder: Path) -> Iterator[RunningServer]:
    with serving(allowed_media_domains=("127.0.0.1",), strict=True) as running:
        yield running


def content(path: str, *urls: str) -> list[dict[str, Any]]:
    """A question about images, in the form of one of the three APIs."""
    text = "input_text" if path == "responses" else "text"
    parts: dict[str, Any] = {
        "chat/completions": lambda url: {"type": "image_url", "image_url": {"url": url}},
        "responses": lambda url: {"type": "input_image", "image_url": url},
        "messages": lambda url: {"type": "image", "source": {"type": "url", "url": url}},
    }
    return [{"type": text, "text": "What is "}, *map(parts[path], urls), {"type": text, "text": " this?"}]


def ask(server: RunningServer, *urls: str, path: str = PATHS[0]) -> Any:
    turns = [{"role": "user", "content": content(path, *urls)}]
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body = {"input" if path == "responses" else "messages": turns, limit: NUM_TOKENS, "temperature": 0}
    return server.http.post(f"/v1/{path}", json=body if path == "responses" else {**body, "model": "m"})


def text_of(response: Any) -> str:
    answer = response.json()
    assert response.status_code == 200, answer
    assert HEADER not in response.headers
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    return str((answer["output"][0] if "output" in answer else answer)["content"][0]["text"])


def refused(response: Any) -> str:
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize("path", PATHS)
def test_an_allowed_host_and_folder_are_read(
    server: RunningServer, strict: RunningServer, host: Host, folder: Path, expected: str, path: str
) -> None:
    assert text_of(ask(server, host.url("image?key=secret"), path=path)) == expected
    assert text_of(ask(strict, host.url("image"), path=path)) == expected
    assert text_of(ask(server, (folder / "a page.png").as_uri(), path=path)) == expected
    assert text_of(ask(server, f"file://localhost{(folder / 'link.png')}", path=path)) == expected
    _, headers = host.asked[-1]
    assert headers["accept-encoding"] == "identity"
    moved = refused(ask(server, host.url("moved"), path=path))
    assert "127.0.0.1: the answer has status 302, a redirect, which is not followed" in moved


def test_an_image_in_a_tool_result_is_fetched_for_counting_too(server: RunningServer, host: Host) -> None:
    def tokens(source: dict[str, Any]) -> int:
        parts = [{"type": "text", "text": "A page"}, {"type": "image", "source": source}]
        result = {"type": "tool_result", "tool_use_id": "c", "content": parts}
        call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        turns = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": [call]}]
        body = {"model": "m", "messages": [*turns, {"role": "user", "content": [result]}]}
        return int(server.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])

    sent = {"type": "base64", "media_type": "image/png", "data": encoded(0)}
    assert tokens({"type": "url", "url": host.url("image")}) == tokens(sent)

    def tokenized(url: str) -> Any:
        body = {"messages": [{"role": "user", "content": content(PATHS[0], url)}]}
        return server.http.post("/tokenize", json=body).json()["tokens"]

    assert tokenized(host.url("image")) == tokenized(f"data:image/png;base64,{encoded(0)}")


def test_an_image_has_the_cache_of_its_content_and_is_fetched_once(server: RunningServer, host: Host) -> None:
    first = ask(server, f"data:image/png;base64,{encoded(0)}").json()
    host.asked.clear()
    again = ask(server, host.url("other?name=1")).json()
    assert again["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert ask(server, *[host.url("image")] * 2).status_code == 200
    assert [path for path, _ in host.asked] == ["other", "image"]
    limit = "messages: the prompt has 3 images; at most 2 are accepted (limit_mm_per_prompt)"
    assert refused(ask(server, *(host.url(f"image?{i}") for i in range(3)))) == limit
    assert len(host.asked) == 2, "too many are not fetched"


@pytest.mark.parametrize("path", PATHS)
def test_other_addresses_are_left_out_or_refused(
    server: RunningServer, strict: RunningServer, host: Host, folder: Path, path: str
) -> None:
    host.asked.clear()
    left_out = ask(server, host.url("image", "localhost"), path=path)
    assert (left_out.status_code, left_out.headers[HEADER]) == (200, content(path, "")[1]["type"])
    escaped = ask(server, (folder / "escape.png").as_uri(), path=path)
    assert (escaped.status_code, escaped.headers[HEADER]) == (200, content(path, "")[1]["type"])
    message = refused(ask(strict, host.url("image", "localhost"), path=path))
    assert "has an address; this server fetches only what --allowed-media-domains allows" in message
    assert "--allowed-local-media-path allows" in refused(ask(strict, (folder / "a page.png").as_uri(), path=path))
    assert not host.asked


def test_what_the_model_does_not_read_is_not_fetched(server: RunningServer, host: Host) -> None:
    host.asked.clear()
    parts = [{"type": "audio_url", "audio_url": {"url": host.url("a.wav")}}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    response = server.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.headers[HEADER], host.asked) == (200, "audio", [])


def test_a_host_that_hangs_holds_up_nothing_else(server: RunningServer, host: Host, expected: str) -> None:
    host.is_hanging.clear()
    host.release.clear()
    with ThreadPoolExecutor(1) as pool:
        try:
            hanging = pool.submit(ask, server, host.url("hangs"))
            assert host.is_hanging.wait(60)
            assert ask(server).status_code == 200
            assert text_of(ask(server, host.url("image"))) == expected
            assert not hanging.done()
        finally:
            host.release.set()
        assert text_of(hanging.result(60)) == expected


def fetch(host: Host, path: str, addresses: Addresses | None = None) -> bytes | InvalidRequestError:
    addresses = addresses or Addresses(["127.0.0.1"])
    address = addresses.allowed("image", host.url(f"{path}?key=secret") if "/" not in path else path)
    assert address is not None
    (fetched,) = asyncio.run(addresses.fetch({address})).values()
    assert "secret" not in str(fetched)
    return fetched


def test_what_cannot_be_fetched_is_told_with_host_and_cause(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert fetch(host, "image") == PNG
    assert fetch(host, "zipped") == gzip.compress(PNG), "is not unpacked"
    long = fetch(host, "long")  # what follows may come in the same packet
    assert long == PNG[:-5] or "the connection failed (ClientResponseError)" in str(long)
    named = "an image cannot be read: 127.0.0.1: "
    assert str(fetch(host, "absent")) == named + "the answer has status 404"
    assert str(fetch(host, "short")) == named + "the connection failed (ClientPayloadError)"
    small = Addresses(["127.0.0.1"], str(folder))
    small.max_bytes = 1000
    assert str(fetch(host, "endless", small)) == named + "what the request fetches has more than 1000 bytes"
    file = (folder / "a page.png").as_uri()
    large = "an image cannot be read: the file: what the request fetches has more than 1000 bytes"
    assert str(fetch(host, file, small)) == large
    absent = "an image cannot be read: the file: there is no such file"
    assert str(fetch(host, folder.as_uri() + "/absent.png", small)) == absent
    assert str(fetch(host, folder.as_uri() + "/pipe.png", small)) == absent
    host.release.clear()
    impatient = Addresses(["127.0.0.1"])
    impatient.max_seconds = 0.01
    assert str(fetch(host, "hangs", impatient)) == named + "it took longer than 0.01 seconds"
    host.release.set()


def test_the_bytes_of_a_request_are_limited_together(host: Host) -> None:
    addresses = Addresses(["127.0.0.1"])
    addresses.max_bytes = len(PNG) + 1

    def urls(number: int) -> set[Any]:
        return {addresses.allowed("image", host.url(f"image?{i}")) for i in range(number)}

    fetched = asyncio.run(addresses.fetch(urls(2)))
    assert sorted(isinstance(each, bytes) for each in fetched.values()) == [False, True]
    host.asked.clear()
    with pytest.raises(InvalidRequestError, match="the prompt has 257 images and sounds by address, above 256"):
        asyncio.run(addresses.fetch(urls(MAX_ADDRESSES + 1)))
    assert not host.asked


def test_an_address_is_judged_by_its_host(folder: Path) -> None:
    addresses = Addresses(["Images.example", "bücher.example", "::1"], str(folder))
    page = f"{folder}/a%20page.png"
    for allowed in (
        *("http://images.example/a", "HTTPS://IMAGES.EXAMPLE:8443/a", "https://evil@images.example/"),
        *("http://xn--bcher-kva.example/", "http://BÜCHER.example", "http://[::1]:80/", "http://[0:0::1]/"),
        *(f"file://{page}", f"file:{page}", f"FILE://LOCALHOST{page}", f"file://{folder}/x/../a%20page.png"),
    ):
        assert addresses.allowed("image", allowed) is not None, allowed
    for other in (
        *("http://images.example@evil/", "http://images.example:80@evil/", "http://evil/images.example"),
        *("http://evil#@images.example/", "http://evil?@images.example/", "http://evil\\@images.example/"),
        *("http://images.example\\@evil/", "http://images.example.evil/", "http://a.images.example/"),
        *(
            "http://images.example./",
            "http://images.example:99999/",
            "http://%69mages.example/",
            "http:///images.example",
        ),
        *("http://[::2]/", "http://[::1%25eth0]/", "ftp://images.example/", "//images.example/", "images.example", ""),
        *(f"file://evil{page}", f"file://{folder}/../a%20page.png", f"file://{folder}/%2e%2e/a%20page.png"),
        *(
            f"file://{folder}/escape.png",
            f"file://{folder}-2/a",
            "file:///%00",
            "file://",
            f"file://{folder}/loop/../..",
        ),
        "http://images.example/" + "a" * 8192,
    ):
        assert addresses.allowed("image", other) is None, other
    assert Addresses().allowed("image", "http://images.example/") is None
    assert Addresses().allowed("image", "file:///etc/passwd") is None


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for domain in ("https://a.example", "a.example:80", "*.a.example", "a.example,b.example", "a/b", ""):
        with pytest.raises(ValueError, match=r"it must be a host, such as 'example\.com'"):
            ServerSettings(allowed_media_domains=(domain,))
    with pytest.raises(ValueError, match="which is not a folder"):
        ServerSettings(allowed_local_media_path=str(tmp_path / "absent"))
    ServerSettings(allowed_media_domains=("[::1]", "a_b.example"), allowed_local_media_path=str(tmp_path))


def test_nothing_is_fetched_offline() -> None:
    model, processor = with_processor("llava")
    llm = LLM(copy.deepcopy(model), processor, num_blocks=100)
    for url in ("https://example.com/a.png?key=secret", "file:///a.png"):
        with pytest.raises(InvalidRequestError, match=r"URLs are not fetched here; download it, and give its path$"):
            llm.generate({"prompt": "<image>", "images": [url]}, use_tqdm=False)

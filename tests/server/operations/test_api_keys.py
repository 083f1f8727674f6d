"""API keys: which headers carry them, where they are configured, and what a request without one is answered."""

import hmac
import re
from pathlib import Path

import aiohttp
import anthropic
import openai
import pytest

from inflight.server.operations.api_keys import ApiKeys, read_api_keys
from tests.coroutines import run
from tests.server.operations.serving import COMPLETIONS, SmallServer, client_of, connected, read_answer, serving

KEYS = ["sk-first", "sk-second"]


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"Authorization": "Bearer sk-first"}, True),
        ({"authorization": "bearer   sk-second "}, True),
        ({"x-api-key": "sk-second"}, True),
        ({"X-API-Key": "sk-first", "Authorization": "Basic c2stZmlyc3Q="}, True),
        ({}, False),
        ({"Authorization": "Bearer "}, False),
        ({"Authorization": "Bearer sk-firs"}, False),
        ({"Authorization": "Bearer sk-firstt"}, False),
        ({"Authorization": "Bearer SK-FIRST"}, False),
        ({"Authorization": "Bearer sk-first sk-second"}, False),
        ({"Authorization": "sk-first"}, False),
        ({"Authorization": "Bearer wrong", "x-api-key": "sk-first"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "\u00e9" * 1000}, False),
        ({"Cookie": "x-api-key=sk-first"}, False),
    ],
)
def test_only_requests_with_one_of_the_keys_are_accepted(headers: dict[str, str], is_let_in: bool) -> None:
    async def check() -> None:
        server = SmallServer()
        async with client_of(ApiKeys(KEYS).middleware(server.app)) as client:
            async with client.post(COMPLETIONS, data=b"abc", headers=headers) as answer:
                assert answer.status == (200 if is_let_in else 401)
                if not is_let_in:
                    error = (await answer.json())["error"]
                    assert error.keys() == {"message", "type", "param", "code"}
                    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert "sk-" not in await answer.text()
            assert server.num_calls == is_let_in

    run(check())


def test_every_key_is_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return known == given

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = ApiKeys(["first", "a very much longer second", "third"])
    for key, fits in ((b"first", True), (b"third", True), (b"", False), (b"another", False)):
        compared.clear()
        assert keys.accepts(key) is fits
        assert len(compared) == 3
        assert {len(digest) for pair in compared for digest in pair} == {32}
        assert not {b"first", key} & {digest for pair in compared for digest in pair}, "no key itself is compared"


def test_operator_paths_need_no_key_and_similar_paths_do() -> None:
    async def check() -> None:
        app = ApiKeys(KEYS).middleware(SmallServer().app)
        statuses = {}
        async with serving(app) as url, connected(url) as (reader, writer):
            for path in (
                "/health",
                "/metrics?x=1",
                "/version",
                "/v1/models",
                "/none",
                "/health/",
                "//health",
                "/Health",
            ):
                writer.write(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
                statuses[path], *_ = await read_answer(reader)
        assert [path for path, status in statuses.items() if status != 401] == ["/health", "/metrics?x=1", "/version"]
        async with client_of(ApiKeys(KEYS, is_open={"/health"}.__contains__).middleware(SmallServer().app)) as client:
            async with client.get("/metrics") as answer:
                assert answer.status == 401
            async with client.get("/metrics", headers={"x-api-key": KEYS[0]}) as answer:
                assert answer.status == 200

    run(check())


def test_a_websocket_without_a_key_is_closed() -> None:
    async def check() -> None:
        async with client_of(ApiKeys(KEYS).middleware(SmallServer().app)) as client:
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await client.ws_connect("/v1/models")
            assert caught.value.status in (401, 403)

    run(check())


def test_client_libraries_understand_the_refusal_of_a_key() -> None:
    async def check() -> None:
        async with serving(ApiKeys(KEYS).middleware(SmallServer().app)) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong") as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await client.models.list()
                assert refused.value.code == "invalid_api_key"
                assert "the API key is wrong" in str(refused.value)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[1]) as client:
                await client.models.list()
            async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong") as other:
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    await other.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
                assert caught.value.type == "authentication_error"

    run(check())


def test_keys_from_all_sources_are_accepted_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may\n\nsk-file  # of the batch jobs\r\nsk-other\nsk-one\n")
    assert read_api_keys(["sk-one"], file, " sk-env ,sk-two,") == ["sk-one", "sk-file", "sk-other", "sk-env", "sk-two"]
    assert read_api_keys() == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# none\n", "has no key in it"),
        ("", "has no key in it"),
        ("good\nmy key\n", "line 2 of .* has spaces or special characters"),
        ("schl\u00fcssel\n", "line 1 of .* has spaces or special characters"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_valid_keys_is_refused_and_no_key_is_shown(
    tmp_path: Path, content: str | bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as refused:
        read_api_keys(file=file)
    assert not re.search("my key|schl", str(refused.value))


def test_key_sources_that_are_given_but_empty_are_refused() -> None:
    with pytest.raises(ValueError, match="is set, but has no key in it"):
        read_api_keys(environment=" , ")
    with pytest.raises(ValueError, match="a key is empty"):
        read_api_keys([""])
    with pytest.raises(ValueError, match="there are no API keys"):
        ApiKeys([])

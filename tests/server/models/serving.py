"""A server of several models on a free local port, in its own thread, with engines in threads, and its models."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import openai
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from inflight.demo_model import DEMO_MODEL
from inflight.server.models.loading import LivePage
from inflight.server.models.pool import PoolSettings
from inflight.server.models.served import ServedModels
from inflight.server.operations.settings import OperatorSettings
from inflight.server.operations.stack import OperationsStack
from inflight.server.serving.settings import ServerSettings
from tests import zoo

MODELS = {"red": 0, "green": 1, "blue": 2}
"""Names of models, and the seeds of their weights. They answer the same prompt each in another way."""

NOISE = 0.03


@cache
def plain(name: str) -> PreTrainedModel:
    """The embedded model, with other weights for each name."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(MODELS[name])
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight += NOISE * torch.randn(weight.shape, generator=generator)
    return model


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """That of all of them."""
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def save_models(folder: Path) -> dict[str, str]:
    """Save them, and return where."""
    for name in MODELS:
        plain(name).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return {name: str(folder / name) for name in MODELS}


def expected(name: str, token_ids: list[int], num_tokens: int) -> str:
    """What a model says after a prompt."""
    text: str = tokenizer().decode(zoo.plain_greedy(plain(name), token_ids, num_tokens), skip_special_tokens=True)
    return text


class RunningModels:
    """Serves models while the block runs."""

    def __init__(
        self,
        models: dict[str, str],
        *,
        engine: dict[str, Any] | None = None,
        operator: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        has_page: bool = True,
        **pool: Any,
    ) -> None:
        options = {"in_process": True, "num_blocks": 500, "restart_delays": ()} | (engine or {})
        self.served = ServedModels(
            PoolSettings(models=models, **pool),
            options,
            ServerSettings(keep_alive_interval=0.05, **settings or {}),
            LivePage(lambda: self._server.should_exit, shows_texts=False) if has_page else None,
        )
        self.surroundings = OperationsStack(
            OperatorSettings(**operator or {}), self.served.metrics, self.served.abort_all
        )
        for observers in self.served.observers.values():
            observers.append(self.surroundings.access_log)
        self.app = self.served.make_app()
        self.app.state.metrics = self.served.metrics.endpoint
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        around = self.surroundings.surround(self.app)
        self._server = uvicorn.Server(
            uvicorn.Config(around, http="httptools", log_config=None, timeout_graceful_shutdown=5)
        )
        self._thread = threading.Thread(target=self._run)
        self.http = httpx2.Client(base_url=self.url, timeout=100)
        self.loop: asyncio.AbstractEventLoop | None = None

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self._server.serve([self._listener])

        asyncio.run(serve())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert not self.served.pool.loaded()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """A bare connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            yield connection

    def call(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in the server's event loop."""
        assert self.loop is not None
        asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """The answer to a request, which must have this status."""
        response = self.http.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    def complete(self, model: str | None = None, status: int = 200, **body: Any) -> Any:
        """The answer to a completion request."""
        return self.post("/v1/completions", status, model=model, **({"prompt": [5], "max_tokens": 3} | body))

    @property
    def states(self) -> dict[str, str]:
        """The state of each model, as the server says it."""
        return {card["id"]: card["status"]["value"] for card in self.http.get("/v1/models").json()["data"]}

    @property
    def samples(self) -> dict[tuple[str, ...], float]:
        """All metrics: by name and values of labels."""
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
        }

    def num_uses(self, name: str) -> int:
        """By how many requests a model is used."""
        return self.served.pool.entry(name).num_uses

    def num_waiting(self) -> int:
        """How many requests wait for a model."""
        return len(self.served.pool._waiting)

    def wait_until_unused(self) -> None:
        """Return once no request is left."""
        wait_for(lambda: not self.num_waiting() and not any(map(self.num_uses, self.served.pool)))


def wait_for(is_there: Callable[[], bool]) -> None:
    """Return once something has come true."""
    end = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < end
        time.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """The data of a stream's events; without the last mark, and without comments."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]

"""A model on Ray Serve, on a real cluster of three nodes: what clients get while replicas come, go, and are killed.

Every answer that is whole must be that of a lone engine; a request may fail only when its replica was killed, and then
its client must hear of it.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from inflight import LLM, SamplingParams
from tests.coroutines import run
from tests.scale.ray_cluster import actors, cluster_of, held_port, kill, long, ray, until, until_soon

from ray import serve  # isort: skip  # after what says why it may be missing

from inflight.scale.serve import build_app

PROMPTS = [f"Once upon a time, there was a {animal} who" for animal in ("fox", "duck", "cat", "dog", "owl", "bear")]
NUM_TOKENS = 300
REPLICA = "ServeReplica:default:inflight"


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return {prompt: out.outputs[0].text for prompt, out in zip(PROMPTS, LLM().generate(PROMPTS, params), strict=True)}


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """The address of an application."""
    deployment = {"ray_actor_options": {"num_cpus": 1}, "health_check_period_s": 1} | settings.pop("deployment", {})
    with held_port() as port:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        try:
            serve.run(build_app({"deployment": deployment, **settings}))
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()


def num_running() -> int:
    states = serve.status().applications["default"].deployments["inflight"].replica_states
    return sum(number for state, number in states.items() if str(getattr(state, "value", state)) == "RUNNING")


class StreamCutError(Exception):
    """A stream ended without saying why, so its client knows that it is not whole."""


class Clients:
    """Clients that ask for the same stories over and over, one half of them as streams.

    Attributes:
        ends: how often a request was answered, and how often it failed.
    """

    def __init__(self, address: str, expected: dict[str, str], number: int) -> None:
        self.ends: Counter[str] = Counter()
        self._expected, self._number = expected, number
        self._client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
        self._is_over = asyncio.Event()

    async def __aenter__(self) -> "Clients":
        self._tasks = [asyncio.create_task(self._ask_on(number)) for number in range(self._number)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over.set()
        await asyncio.gather(*self._tasks)
        await self._client.close()

    async def answered(self, number: int) -> None:
        """Return after this number of further answers."""
        target = self.ends["answered"] + number
        await until_soon(lambda: self.ends["answered"] >= target)

    async def _ask_on(self, number: int) -> None:
        while not self._is_over.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            try:
                text = await (self._stream(prompt) if number % 2 else self._ask(prompt))
            except (openai.APIConnectionError, openai.InternalServerError, StreamCutError):
                self.ends["failed"] += 1
            else:
                assert text == self._expected[prompt]
                self.ends["answered"] += 1

    async def _ask(self, prompt: str) -> str:
        answer = await self._client.completions.create(**_request(prompt))
        return answer.choices[0].text

    async def _stream(self, prompt: str) -> str:
        text, reason = "", None
        async for event in await self._client.completions.create(**_request(prompt), stream=True):
            text += event.choices[0].text
            reason = event.choices[0].finish_reason
        if reason is None:
            raise StreamCutError
        return text


def _request(prompt: str) -> dict[str, Any]:
    body = {"ignore_eos": True}
    return {"model": "inflight-demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "extra_body": body}


@long
def test_killed_replicas_and_nodes_cost_only_their_own_requests(expected: dict[str, str]) -> None:
    async def work(cluster: Any, address: str) -> None:
        async with Clients(address, expected, 8) as clients:
            await clients.answered(16)
            killed = (await replicas())[0]
            kill(killed.pid)
            await replaced(killed)
            num_failed = clients.ends["failed"]
            await clients.answered(16)
            assert clients.ends["failed"] == num_failed

            head = ray.get_runtime_context().get_node_id()
            lost = next(each for each in await replicas() if each.node_id != head)
            node = next(each for each in cluster.list_all_nodes() if each.node_id == lost.node_id)
            await asyncio.to_thread(cluster.remove_node, node, False)
            await replaced(lost)
            num_failed = clients.ends["failed"]
            await clients.answered(16)
            assert clients.ends["failed"] == num_failed

    async def replicas() -> list[Any]:
        await until_soon(lambda: len(actors(REPLICA)) == 2)
        return await asyncio.to_thread(actors, REPLICA)

    async def replaced(lost: Any) -> None:
        def is_so() -> bool:
            others = [each for each in actors(REPLICA) if each.actor_id != lost.actor_id]
            return len(others) == 2 and num_running() == 2

        await until_soon(is_so)

    with cluster_of(3) as cluster, serving(deployment={"num_replicas": 2}) as address:
        run(work(cluster, address))


@long
def test_scales_with_its_queue_and_finishes_what_runs_on_what_it_gives_up(expected: dict[str, str]) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3, "upscale_delay_s": 0, "downscale_delay_s": 10}
    scaling |= {"look_back_period_s": 2, "metrics_interval_s": 0.5}

    async def work(address: str) -> None:
        async with Clients(address, expected, 16) as many:
            await until_soon(lambda: num_running() == 3)
            await many.answered(24)
        assert many.ends["failed"] == 0
        async with Clients(address, expected, 1) as one:
            await until_soon(lambda: num_running() == 1)
            await one.answered(2)
        assert one.ends["failed"] == 0

    settings = {"engine": {"max_num_seqs": 2}, "operator": {"grace_period": 60}}  # three are full with many clients
    with cluster_of(3), serving(deployment={"autoscaling_config": scaling}, **settings) as address:
        run(work(address))


@pytest.mark.thorough
def test_requests_that_begin_alike_go_to_the_same_replica() -> None:
    with cluster_of(2), serving(routing="prefix", deployment={"num_replicas": 2}) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        for number in range(6):
            prefix = f"There were {number} animals in the forest, and they all lived together happily. " * 4
            for turn in range(4):
                answer = client.completions.create(
                    model="inflight-demo", prompt=f"{prefix} {turn}", max_tokens=4, temperature=0
                )
                assert answer.usage is not None
                cached = answer.usage.prompt_tokens_details
                assert cached is not None
                assert bool(cached.cached_tokens) == bool(turn)
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'"):
            client.completions.create(model="gpt-5", prompt="", max_tokens=4)
        assert [each.id for each in client.models.list()] == ["inflight-demo"]

        with client.completions.create(**_request(PROMPTS[0]) | {"max_tokens": 3000}, stream=True) as stream:
            next(iter(stream))  # the client leaves
        until(lambda: _num_running_sequences() == 0)


def _num_running_sequences() -> float:
    handles = [serve.get_deployment_handle("inflight", "default") for _ in range(2)]
    loads = [handle.record_autoscaling_stats.remote().result(timeout_s=60)["load"] for handle in handles]
    return max(loads)

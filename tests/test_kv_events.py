"""Prefix-cache events of an engine, read by subscribers that decode vLLM's format independently."""

import asyncio
import json
import random
import socket
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from inflight import AsyncLLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.watching import KVEvents
from inflight.engine.cache_events import CacheEvents, Removed, Stored
from inflight.engine.engine import Engine
from inflight.engine.event_publisher import EventPublisher
from inflight.scheduling.prefix_cache import PrefixNode
from tests import zoo
from tests.coroutines import run

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Mirror:
    """What an indexer knows: the tokens of each prefix that is cached, by the number of its last block."""

    def __init__(self) -> None:
        self.prefixes: dict[int, list[int]] = {}
        self.cached: set[int] = set()

    def store(self, hashes: list[int], parent: int | None, token_ids: list[int], block_size: int) -> None:
        assert len(token_ids) == len(hashes) * block_size
        prefix = [] if parent is None else self.prefixes[parent]
        for place, number in enumerate(hashes):
            prefix = prefix + token_ids[place * block_size : (place + 1) * block_size]
            assert self.prefixes.setdefault(number, prefix) == prefix  # a number stands for one prefix
            assert number not in self.cached
            self.cached.add(number)

    def remove(self, hashes: list[int]) -> None:
        assert set(hashes) <= self.cached
        self.cached -= set(hashes)


def prefix_of(node: PrefixNode) -> list[int]:
    parent, token_bytes = node.key
    return (prefix_of(parent) if isinstance(parent, PrefixNode) else []) + array("i", token_bytes).tolist()


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_the_events_say_what_the_cache_holds_after_every_step(model: str) -> None:
    engine = Engine(zoo.build(model), EngineConfig(num_blocks=24, block_size=4, max_num_seqs=3, max_model_len=60))
    events, mirror, rng = CacheEvents(engine.scheduler.block_pool), Mirror(), random.Random(1)
    cache = engine.scheduler.block_pool._prefix_cache
    group = events._group
    num_removed = 0
    for number in range(60):
        prompt = [rng.randrange(3) + 5] * rng.randrange(1, 20) + [rng.randrange(20) for _ in range(rng.randrange(1, 6))]
        engine.submit(engine.inputs.accept(str(number), prompt, GREEDY))
        for _ in range(rng.randrange(4)):
            engine.step()
            for event in events.take():
                if isinstance(event, Stored):
                    mirror.store(event.hashes, event.parent, event.token_ids, 4)
                else:
                    mirror.remove(event.hashes)
                    num_removed += len(event.hashes)
            nodes = [node for node, of_group in cache._place_of_block.values() if of_group == group]
            assert sorted(map(prefix_of, nodes)) == sorted(mirror.prefixes[each] for each in mirror.cached)
    assert num_removed > 20


def test_numbers_are_the_same_in_every_engine_and_differ_by_salt() -> None:
    def numbers(salt: str | None) -> list[int]:
        engine = Engine(zoo.build("llama"), EngineConfig(block_size=4))
        events = CacheEvents(engine.scheduler.block_pool)
        engine.submit(engine.inputs.accept("a", list(range(5, 25)), GREEDY, cache_salt=salt))
        while engine.has_unfinished_requests:
            engine.step()
        stored = [each for each in events.take() if isinstance(each, Stored)]
        assert {each.cache_salt for each in stored} == {salt}
        return [number for each in stored for number in each.hashes]

    assert numbers(None) == numbers(None)
    assert not set(numbers(None)) & set(numbers("mine"))


# ------------------------------------------------------------------------------------------------- over the wire


class Batch(msgspec.Struct, array_like=True):
    """As vLLM writes it down for subscribers."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def context() -> Iterator[Any]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Subscriber:
    """Hears one engine, and keeps what it says."""

    def __init__(self, context: Any, config: KVEvents) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.connect(config.endpoint.replace("*", "127.0.0.1"))
        self.socket.subscribe(config.topic)
        self.mirror = Mirror()

    def take_in(self, payload: bytes) -> Batch:
        batch = msgspec.msgpack.decode(payload, type=Batch)
        for kind, *values in batch.events:
            match kind, values:
                case "BlockStored", [hashes, parent, token_ids, block_size, None, "CPU", *_]:
                    self.mirror.store(hashes, parent, token_ids, block_size)
                case "BlockRemoved", [hashes, "CPU", *_]:
                    self.mirror.remove(hashes)
                case "AllBlocksCleared", []:
                    self.mirror = Mirror()
                case _:
                    raise AssertionError(f"{kind} {values}")
        return batch

    def hear(self) -> tuple[int, bytes]:
        assert self.socket.poll(60_000)
        _, number, payload = self.socket.recv_multipart()
        return int.from_bytes(number, "big", signed=True), payload


def config_of(**options: Any) -> KVEvents:
    ports = {"endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}"}
    return KVEvents(**{**ports, "topic": "kv@me@tiny", **options})


def test_who_comes_late_gets_what_was_missed_and_then_hears_the_rest(context: Any) -> None:
    config = config_of(buffer_steps=3)
    publisher = EventPublisher(config, 2)
    for number in range(4):
        publisher.publish([Stored([number], number - 1 if number else None, [number, 7], None)])
    publisher.publish([])
    dealer = context.socket(zmq.DEALER)  # a REQ socket takes one answer only
    dealer.connect(str(config.replay_endpoint).replace("*", "127.0.0.1"))

    def missed(first: int) -> list[int]:
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        numbers = []
        while not numbers or numbers[-1] != -1:
            assert dealer.poll(60_000)
            _, number, _ = dealer.recv_multipart()
            numbers.append(int.from_bytes(number, "big", signed=True))
        return numbers

    seen = missed(0)
    while seen != [2, 3, 4, -1]:  # of five batches the last three are kept, once all have come
        seen = missed(0)
    assert missed(4) == [4, -1]
    assert missed(5) == [-1]
    subscriber = Subscriber(context, config)
    number, heard = 5, None
    while heard is None:  # a subscriber joins when it does
        publisher.publish([Removed([number])])
        number += 1
        heard = subscriber.hear() if subscriber.socket.poll(20) else None
    assert heard[0] >= 5
    publisher.close()
    second = EventPublisher(config, 2)  # the address is free again
    second.close()


def test_an_address_that_cannot_be_had_is_told_and_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config = KVEvents(endpoint="ipc:///no/such/folder/socket")
    publisher = EventPublisher(config, 1)
    publisher.publish([Stored([1], None, [5], None)])
    publisher._thread.join()
    publisher.publish([Removed([1])])
    publisher.close()
    assert "events cannot be published at ipc:///no/such/folder/socket" in caplog.text


def test_a_published_salt_is_the_first_blocks_extra_key(context: Any) -> None:
    config = config_of()
    publisher = EventPublisher(config, 1)
    event = publisher._event(Stored([1, 2], None, [5, 6], "mine"))
    assert msgspec.to_builtins(event) == ["BlockStored", [1, 2], None, [5, 6], 1, None, "CPU", None, [["mine"], None]]
    publisher.close()


def test_replicas_publish_on_ports_one_after_another(context: Any) -> None:
    first = free_port()
    while True:  # two neighbouring ports for each kind
        config = KVEvents(endpoint=f"tcp://*:{first}", replay_endpoint=f"tcp://*:{first + 10}")
        if all(_is_free(first + each) for each in (0, 1, 10, 11)):
            break
        first = free_port()

    async def check() -> None:
        llm = AsyncLLM(replicas=2, num_blocks=200, kv_events=config)
        async with llm:
            while len(llm._client.sessions()) < 2:
                await asyncio.sleep(0.01)
            for number in range(6):
                async for _ in llm.generate([5 + number] * 40, GREEDY):
                    pass
            found: dict[int, set[int]] = {}
            for replica in range(2):
                dealer = context.socket(zmq.DEALER)
                dealer.connect(f"tcp://127.0.0.1:{first + 10 + replica}")
                mirror = Subscriber(context, config.of_replica(replica))
                while len(mirror.mirror.cached) < 2:
                    mirror.mirror = Mirror()
                    dealer.send_multipart([b"", bytes(8)])
                    while True:
                        _, number_bytes, payload = await asyncio.to_thread(dealer.recv_multipart)
                        if number_bytes == b"\xff" * 8:
                            break
                        assert mirror.take_in(payload).data_parallel_rank == replica
                found[replica] = mirror.mirror.cached
            assert found[0]
            assert not found[0] & found[1]

    run(check())


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


# ------------------------------------------------------------------------------------------------- configuration


def test_vllms_json_is_understood() -> None:
    text = json.dumps(
        {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@pod@model"}
    )
    assert KVEvents.parse(text) == KVEvents(topic="kv@pod@model")
    assert KVEvents.parse('{"enable_kv_cache_events": false}') is None
    assert KVEvents.parse('{"publisher": "null"}') is None
    moved = KVEvents(replay_endpoint="ipc:///tmp/replay").of_replica(2)
    assert moved == KVEvents(endpoint="tcp://*:5559", replay_endpoint="ipc:///tmp/replay-2", data_parallel_rank=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ('{"endpiont": "tcp://*:5557"}', "did you mean 'endpoint'"),
        ('{"endpoint": "5557"}', "must begin with tcp:// or ipc://"),
        ('{"endpoint": "tcp://*"}', "must end with a port"),
        ('{"endpoint": null}', "must be an address"),
        ('{"publisher": "nats"}', "publisher is 'nats'"),
        ('{"buffer_steps": 0}', "buffer_steps is 0"),
    ],
)
def test_a_wrong_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVEvents.parse(text)

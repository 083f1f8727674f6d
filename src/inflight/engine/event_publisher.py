"""`EventPublisher`: publishes events of the prefix cache over ZeroMQ, in vLLM's format, from its own thread.

Each batch is a message of three parts: topic, sequence number (8 bytes, big-endian, from 0), and MessagePack arrays
`[time, [event, …], rank]`. A starting engine first publishes that its cache is empty. A subscriber that missed batches
asks the replay socket for all from a number on; the last answer has the number -1.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import zmq

from inflight.contracts.api.watching import KVEvents
from inflight.engine.cache_events import Removed, Stored

logger = logging.getLogger("inflight.engine")

NUMBER_BYTES = 8
LAST = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
MEDIUM = "CPU"
SECONDS_BETWEEN_BINDS = 0.2
MILLISECONDS_TO_END = 500


class BlockStored(msgspec.Struct, tag=True, array_like=True):
    """See vLLM's class of this name."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, array_like=True):
    """See vLLM's class of this name."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, tag=True, array_like=True):
    """See vLLM's class of this name."""


class EventPublisher:
    """Publishes until it is closed.

    Args:
        config: where.
        block_size: tokens of a block.
    """

    def __init__(self, config: KVEvents, block_size: int) -> None:
        self._config, self._block_size = config, block_size
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers = count()
        self._context = zmq.Context()
        inner = f"inproc://{id(self)}"
        self._in: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._in.set_hwm(config.max_queue_size)
        self._in.bind(inner)
        self._out: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._out.set_hwm(config.max_queue_size)
        self._out.connect(inner)
        self._thread = threading.Thread(target=self._run, name="inflight: events", daemon=True)
        self._thread.start()
        self._send([AllBlocksCleared()])

    def publish(self, events: Sequence[Stored | Removed]) -> None:
        """Publish events, if there are any and a subscriber can be reached. Never blocks."""
        if events and self._thread.is_alive():
            self._send([self._event(each) for each in events])

    def close(self) -> None:
        """Send the rest, and end."""
        self._out.setsockopt(zmq.SNDTIMEO, MILLISECONDS_TO_END)
        with suppress(zmq.Again):  # without the address there are no subscribers
            self._out.send_multipart([b""])
        self._out.close()
        self._thread.join()
        self._context.destroy(linger=MILLISECONDS_TO_END)

    def _event(self, events: Stored | Removed) -> BlockStored | BlockRemoved:
        if isinstance(events, Removed):
            return BlockRemoved(events.hashes)
        extra: list[list[str] | None] | None = None
        if events.cache_salt is not None and events.parent is None:  # as in vLLM, the first block of a prompt has it
            extra = [[events.cache_salt], *([None] * (len(events.hashes) - 1))]
        return BlockStored(
            events.hashes, events.parent, events.token_ids, self._block_size, lora_name=events.adapter, extra_keys=extra
        )

    def _send(self, events: Sequence[Any]) -> None:
        number = next(self._numbers)  # a dropped batch leaves a gap, which subscribers see
        payload = self._encoder.encode([time.time(), events, self._config.data_parallel_rank])
        try:
            self._out.send_multipart([number.to_bytes(NUMBER_BYTES, "big"), payload], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("more than %d batches of events wait, so one is dropped", self._config.max_queue_size)

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        config, topic = self._config, self._config.topic.encode()
        sent: deque[list[bytes]] = deque(maxlen=config.buffer_steps)
        public: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        public.set_hwm(config.hwm)
        binds = "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith("ipc://")
        is_open = self._opened(public, config.endpoint, binds=binds)
        poller = zmq.Poller()
        poller.register(self._in, zmq.POLLIN)
        replay: zmq.Socket[bytes] | None = None
        if is_open and config.replay_endpoint is not None:
            replay = self._context.socket(zmq.ROUTER)
            if self._opened(replay, config.replay_endpoint, binds=True):
                poller.register(replay, zmq.POLLIN)
        while is_open:
            ready = dict(poller.poll())
            if self._in in ready:
                message = self._in.recv_multipart()
                if len(message) == 1:
                    break
                sent.append(message)
                public.send_multipart([topic, *message])
            if replay is not None and replay in ready:
                _answer(replay, sent)
        for each in (public, replay, self._in):
            if each is not None:
                each.close(linger=MILLISECONDS_TO_END)

    def _opened(self, opened: "zmq.Socket[bytes]", endpoint: str, *, binds: bool) -> bool:
        """Bind or connect a socket; retry while another engine has the address, perhaps the one being replaced. False
        if closed meanwhile."""
        has_warned = False
        while True:
            try:
                if binds:
                    opened.bind(endpoint)
                else:
                    opened.connect(endpoint)
                return True
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    logger.error("events cannot be published at %s: %s", endpoint, error)
                    return False
                if not has_warned:
                    logger.info("%s is in use; events are published there once it is free", endpoint)
                    has_warned = True
            if self._is_closed_within(SECONDS_BETWEEN_BINDS):
                return False

    def _is_closed_within(self, seconds: float) -> bool:
        """Wait; return whether the publisher was closed. (Events stay in their queue.)"""
        time.sleep(seconds)
        return self._out.closed


def _answer(replay: "zmq.Socket[bytes]", sent: Sequence[list[bytes]]) -> None:
    """Replay the batches that a subscriber asks for."""
    request = replay.recv_multipart()
    if len(request) != 3:
        return
    client, _, first = request
    for number, payload in sent:
        if int.from_bytes(number, "big") >= int.from_bytes(first, "big"):
            replay.send_multipart([client, b"", number, payload])
    replay.send_multipart([client, b"", LAST, b""])

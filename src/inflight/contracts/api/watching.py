"""Observers of an engine besides its callers. Plain data, validated at construction."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from inflight.contracts.api.options import NotNegative, Positive, check, refuse_unknown_options, strict_options
from inflight.contracts.step.record import RecordTo

Address: TypeAlias = Annotated[str, Meta(description="an address such as 'tcp://*:5557'")]


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvents:
    """The endpoints for prefix-cache events, which routers and indexers read over ZeroMQ in vLLM's format.

    Attributes:
        endpoint: of the PUB socket, such as "tcp://*:5557". With a `*`, and for ipc, the engine binds it; else it
            connects to it.
        replay_endpoint: of a ROUTER socket that replays missed batches; None: no replay.
        buffer_steps: how many batches it can replay.
        hwm: messages queued for a subscriber before some are dropped.
        max_queue_size: batches queued for publication before some are dropped.
        topic: of all messages.
        data_parallel_rank: the engine's number, in every batch.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    endpoint: Address = "tcp://*:5557"
    replay_endpoint: Address | None = None
    buffer_steps: Positive = 10_000
    hwm: Positive = 100_000
    max_queue_size: Positive = 100_000
    topic: str = ""
    data_parallel_rank: NotNegative = 0

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not value.startswith(("tcp://", "ipc://")):
                raise ValueError(f"{name} is {value!r}; it must begin with tcp:// or ipc://")
            if value is not None and value.startswith("tcp://") and not value.rpartition(":")[2].isdecimal():
                raise ValueError(f"{name} is {value!r}; it must end with a port, such as tcp://*:5557")

    @classmethod
    def parse(cls, text: str) -> "KVEvents | None":
        """Parse the JSON that vLLM's `--kv-events-config` takes; None: it switches them off. Raises `ValueError`."""
        try:
            given = json.loads(text)
        except json.JSONDecodeError:
            given = None
        if not isinstance(given, Mapping):
            raise ValueError(f'{text!r} is not a JSON object such as \'{{"endpoint": "tcp://*:5557"}}\'')
        options = dict(given)
        is_on, publisher = options.pop("enable_kv_cache_events", True), options.pop("publisher", "zmq")
        check("publisher", publisher, Literal["zmq", "null"])
        refuse_unknown_options(options, [field.name for field in fields(cls)], "the configuration of events")
        events = cls(**options)
        return events if is_on and publisher == "zmq" else None

    def of_replica(self, number: int) -> "KVEvents":
        """Return the configuration of one of several engines: ports are offset by its number, as in vLLM."""
        endpoint, replay = _moved(self.endpoint, number), self.replay_endpoint and _moved(self.replay_endpoint, number)
        rank = self.data_parallel_rank + number
        return replace(self, endpoint=endpoint, replay_endpoint=replay, data_parallel_rank=rank)


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """All observers.

    Attributes:
        record_to: where to record every step; None: nowhere.
        kv_events: where to publish events of the prefix cache; None: nowhere.
    """

    record_to: RecordTo | None = None
    kv_events: KVEvents | None = None


def _moved(endpoint: str, number: int) -> str:
    if number and endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + number}"
    return f"{endpoint}-{number}" if number else endpoint

"""Support for tests on a Ray cluster: its nodes are processes of this machine."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "HF_HUB_OFFLINE": "1"}
os.environ |= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")

from ray.cluster_utils import Cluster  # noqa: E402

long = pytest.mark.skipif("INFLIGHT_TEST_RAY_LONG" not in os.environ, reason="starts many engines: see `make soak`")
"""Ray's default deadlines expire on a machine that is busy with other tests, and it restarts engines again and
again."""

SECONDS_TO_CHANGE = 120
"""Seconds after which a wait fails."""


@contextmanager
def cluster_of(num_nodes: int) -> Iterator[Cluster]:
    """A cluster of nodes with one CPU each, to which this process is connected. The first is its head."""
    cluster = Cluster()
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=1, object_store_memory=100_000_000, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def held_port() -> Iterator[int]:
    """A port that only those can have who share it, as Serve's proxies do."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        yield port


def actors(class_name: str) -> list[Any]:
    """What Ray knows of the actors of a class that live. (Asks its control store: the dashboard may be late.)"""
    found = ray._private.state.actors().values()
    return [
        SimpleNamespace(actor_id=each["ActorID"], pid=each["Pid"], node_id=each["Address"]["NodeID"])
        for each in found
        if each["State"] == "ALIVE" and each["ActorClassName"].startswith(class_name)
    ]


def kill(pid: int) -> None:
    """Kill a process as a machine's lack of memory would."""
    os.kill(pid, signal.SIGKILL)


def until(is_so: Callable[[], bool]) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + SECONDS_TO_CHANGE
    while not is_so():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.1)


async def until_soon(is_so: Callable[[], bool]) -> None:
    """The same beside an event loop."""
    await asyncio.to_thread(until, is_so)

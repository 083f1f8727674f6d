"""`RemoteRanks`: ranks 1 and up on other machines, where `inflight rank` lets them join; and how they do."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING

from inflight.contracts.config import CACHE_SHARE_OF_HOST, EngineConfig
from inflight.contracts.errors import ModelError
from inflight.engine.ranks.links import Link, NetworkLink
from inflight.engine.ranks.messages import OnNetwork, Part
from inflight.machine import usable_memory

if TYPE_CHECKING:
    from inflight.execution.ranks.rank import Rank

KEY_VARIABLE = "INFLIGHT_RANK_KEY"
"""Names the environment variable with the key that all ranks of a model have."""
SECONDS_BETWEEN_TRIES = 1.0


def rank_key() -> bytes:
    """The key. Raises `ModelError` if there is none."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ModelError(f"ranks on other machines need a key in {KEY_VARIABLE}, the same for all of them")
    return key.encode()


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of "HOST:PORT". Raises `ModelError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ModelError(f"{address!r} is no address for ranks; it must be HOST:PORT")
    return host, int(port)


class RemoteRanks:
    """All but rank 0, as they have joined; see `RankGroup` for what they are asked.

    Args:
        address: where this process waits for them.

    Raises:
        ModelError: the address cannot be had, or there is no key.
    """

    def __init__(self, size: int, address: str) -> None:
        from torch._C._distributed_c10d import TCPStore

        self._size = size
        links: list[NetworkLink] = []
        host, port = host_and_port(address)
        try:
            with Listener((host, port), backlog=size, authkey=rank_key()) as listener:
                print(f"inflight: waiting for {size - 1} to run: inflight rank {address}", file=sys.stderr)
                while len(links) < size - 1:
                    try:
                        connection = listener.accept()
                    except (AuthenticationError, EOFError, ConnectionError):
                        print("inflight: a rank without the key was refused", file=sys.stderr)
                        continue
                    links.append(NetworkLink(connection, _host_of(listener)))
        except OSError as error:
            raise ModelError(f"ranks cannot join at {address}: {error}") from error
        self._links = links
        self.links: list[Link] = list(links)
        self._store = TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)

    def config_of_each(self, config: EngineConfig) -> EngineConfig:
        """Each has the share of the cache that it has of the model, and its machine's cores."""
        memory = config.kv_cache_memory and config.kv_cache_memory // self._size
        if config.num_blocks is None:
            memory = memory or int(usable_memory() * CACHE_SHARE_OF_HOST)
        return replace(config, kv_cache_memory=memory)

    def place_of(self, number: int) -> OnNetwork:
        """Where a rank meets the others."""
        return OnNetwork(self._store.port)

    def first(self) -> Rank:
        """Rank 0. Waits for the others."""
        from inflight.execution.ranks.network_rank import NetworkRank

        return NetworkRank(0, self._size, self._store, own_address(self._links[0].peer))

    def end(self) -> None:
        """Let all of them go."""
        for link in self._links:
            link.close()


def _host_of(listener: Listener) -> str:
    """Of whoever has been accepted last."""
    accepted = listener.last_accepted
    assert isinstance(accepted, tuple)
    return str(accepted[0])


def own_address(peer: str) -> str:
    """The address of this machine in the network of another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # nothing is sent
        address: str = probe.getsockname()[0]
        return address


def rank_on_network(part: Part, host: str) -> Rank:
    """A rank that has joined at this host."""
    from torch._C._distributed_c10d import TCPStore

    from inflight.execution.ranks.network_rank import NetworkRank

    assert isinstance(part.place, OnNetwork)
    store = TCPStore(host, part.place.port, part.size, False)
    return NetworkRank(part.number, part.size, store, own_address(host))


def joined(address: str, wait: Callable[[float], None] = time.sleep) -> NetworkLink:
    """A link to rank 0, as soon as it waits for ranks.

    Args:
        wait: called between two tries.

    Raises:
        ModelError: it has another key.
    """
    host, port = host_and_port(address)
    while True:
        try:
            return NetworkLink(Client((host, port), authkey=rank_key()), host)
        except AuthenticationError as error:
            raise ModelError(f"rank 0 at {address} has another key in {KEY_VARIABLE}") from error
        except (ConnectionError, EOFError):
            wait(SECONDS_BETWEEN_TRIES)
        except OSError as error:
            raise ModelError(f"there is no way to {address}: {error}") from error

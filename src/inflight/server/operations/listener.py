"""`listen`: the server's socket, opened before anything is loaded, so that an address in use is noticed at once."""

import socket

BACKLOG = 2048
"""Connections that may wait to be accepted; large enough for a thousand clients that connect at once."""


def listen(host: str, port: int, max_stall: float) -> socket.socket:
    """Open a listening socket.

    Args:
        max_stall: seconds after which the operating system, where it supports this, closes a connection whose client
            accepts no data, and drops unsent data.

    Raises:
        OSError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    takes_both = host == "::" and socket.has_dualstack_ipv6()  # all addresses, IPv4's among them
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=takes_both)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * max_stall))
    return listener

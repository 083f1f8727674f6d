"""`inflight rank`: a process on another machine that runs a part of a server's model."""

import sys

import click

from inflight.cli.help import Command
from inflight.cli.options import quiet_libraries


@click.command(cls=Command)
@click.argument("address")
def rank(address: str) -> None:
    """Run a part of the model of the server that waits at ADDRESS (HOST:PORT) for its ranks.

    There, `inflight serve --tensor-parallel-size N --rank-address HOST:PORT` waits for N - 1 of them. All have the same
    key in INFLIGHT_RANK_KEY, the same model at the same place, and the same versions. This one runs on all cores that
    it may use, and joins again when the server's engine is started anew, until it is interrupted.
    """
    quiet_libraries()
    from inflight.engine.ranks.following import follow
    from inflight.engine.ranks.messages import Part
    from inflight.engine.ranks.remote_ranks import joined, rank_on_network

    print(f"inflight: waiting for rank 0 at {address}", file=sys.stderr)
    while True:
        link = joined(address)
        part = link.receive()
        if not isinstance(part, Part):
            continue
        print(f"inflight: rank {part.number} of {part.size} of {part.model}", file=sys.stderr)
        reason = follow(part, lambda part=part, link=link: rank_on_network(part, link.peer), link)  # type: ignore[misc]
        print(f"inflight: rank {part.number} has ended: {reason or 'so did rank 0'}", file=sys.stderr)

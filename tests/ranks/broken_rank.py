"""A rank that cannot load its part."""

import sys

from inflight.engine.ranks.links import RankFailed, StreamLink

if __name__ == "__main__":
    link = StreamLink(sys.stdin.buffer, sys.stdout.buffer)
    link.receive()
    link.send(RankFailed("no luck"))
    sys.exit(1)

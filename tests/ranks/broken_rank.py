"""A rank that cannot load its part."""

import sys

from inflight.engine.ranks.messages import Failed, read_message, to_frame

if __name__ == "__main__":
    read_message(sys.stdin.buffer)
    sys.stdout.buffer.write(to_frame(Failed("no luck")))
    sys.stdout.flush()
    sys.exit(1)

"""`python -m inflight` is the `inflight` command."""

from inflight.cli import main

main()

"""The engine beside its caller: in its own process, or in a thread.

`loop` runs an engine by messages; `protocol` defines the messages; `connection` starts such a loop and carries messages
to and from it; `session` tracks one engine from start to end; `supervisor` restarts it after a crash. `python -m
inflight.engine.process` is the other end of the pipe, not meant to be run by hand.
"""

"""The engine beside its caller: in a process of its own, or in a thread of the caller's.

`loop` runs an engine by messages; `messages` says which there are; `connection` starts such a loop and carries messages
to and fro; `session` follows one from its start to its end; `supervisor` starts the next when one has died.
`python -m inflight.engine.process` is the other end of the pipe, and of no use by hand.
"""

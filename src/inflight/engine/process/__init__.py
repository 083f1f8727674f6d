"""The engine beside its caller: in its own process, or in a thread.

`loop` runs an engine by messages; `protocol` defines the messages; `connection` starts such a loop and carries messages
to and from it; `session` follows one engine from its start to its end. `python -m inflight.engine.process` is the other
end of the pipe; it is of no use by hand.
"""

"""What operators need around the server: keys, limits, request ids, logs, metrics, traces and graceful shutdown.

Everything here is plain ASGI middleware around an application of which it knows the list of endpoints only; `stack`
assembles it.
"""

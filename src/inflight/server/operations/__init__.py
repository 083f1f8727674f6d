"""What operators need around the server: keys, limits, request ids, logs, metrics, traces and graceful shutdown.

Everything here is plain ASGI middleware around an application that it does not know; `stack` assembles it.
"""

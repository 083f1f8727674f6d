"""Operations: keys, limits, request ids, logs, metrics, traces and graceful shutdown.

All of it is plain ASGI middleware, assembled by `stack`. It depends only on the application's list of endpoints.
"""

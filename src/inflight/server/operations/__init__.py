"""What operators need around the server: keys, limits, request ids, logs, metrics, traces, and an end in good order.

Everything here is pure ASGI around an application that it does not know; `stack` puts it together.
"""

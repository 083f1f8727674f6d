"""inflight on a Ray cluster (extra `ray`): `serve` for Ray Serve, `data` for Ray Data.

Ray does placement, restarts, scaling, retries and shuffling; this package adapts an engine to it.
"""

"""inflight on a Ray cluster (extra `ray`): `serve` for Ray Serve, `data` for Ray Data.

What a cluster does (placing, restarting, scaling, retrying, shuffling) is Ray's; here is only what it must be told
of an engine.
"""

"""inflight on a Ray cluster (extra `ray`): `serve` for Ray Serve, `data` for Ray Data.

What a cluster does (placing, starting anew, scaling, retrying, shuffling) is Ray's; here is only what it must be told
of an engine.
"""

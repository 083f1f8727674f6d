"""Preparation: finds out at load which executor runs a model exactly, and prepares the model for it. It believes no
flag and knows no model by its name: a wrong token is never an option.

`choice` first *proves* a run mode: on the model itself if that is small and in float32, otherwise on its `proxy`, a
small float32 copy that is sensitive to its context. `proof_result` caches what proxies have shown. Then the model is
*prepared* (its weights are prepacked) and compared with its own plain results. `packed_proof` does both for the
executor whose attention is ours, `own_attention` for those that leave attention to the model; `proof` is the harness of
both.
"""

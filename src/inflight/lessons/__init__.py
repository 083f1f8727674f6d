"""Simpler batching methods, kept runnable: a ladder of rungs, each adding one idea.

1. `static_batching`: waves of requests, each as long as its longest request.
2. `padded_batching`: finished rows leave and new ones are merged into a rectangular batch, at the price of padding.
3. `ragged_batching`: all tokens of all sequences in one unpadded row, kept apart by the mask.
4. The engine itself: the same over a paged cache.

All rungs give the same greedy tokens and the same kind of account: `run(model, requests, num_slots) -> Run`. Only the
engine brings its own model and slots. `shared_prefix` is an aside about prompts with a common beginning.
"""

"""The seams into `transformers`: loading, the attention hook, caches in its form, LongRoPE, how a model is called."""

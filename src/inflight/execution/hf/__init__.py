"""Integration with `transformers`: loading, the attention hook, caches, LongRoPE, and model calls."""

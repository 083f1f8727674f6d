"""Runs tokens through the model. Knows tensors, spans and slots, never a request, a text or a queue."""

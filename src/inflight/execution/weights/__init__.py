"""Weights laid out at load for how they are read: linear layers, experts, tied embeddings, and their formats."""

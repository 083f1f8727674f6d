"""Prepacked weights, laid out at load for their kernels: linear layers, experts, tied embeddings."""

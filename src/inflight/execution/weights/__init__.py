"""Weights that are laid out at load for how they will be read: linear layers, experts, tied embeddings."""

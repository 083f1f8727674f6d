"""Weights that are kept as whole numbers of a few bits, in groups that share a scale: what they are, and how the types
of a GGUF file become some. Which kernel multiplies with them is decided in `weights`."""

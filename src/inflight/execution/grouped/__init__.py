"""Grouped weights: integers of a few bits, in groups that share a scale; and their conversion from GGUF's types.
`weights` chooses the kernel."""

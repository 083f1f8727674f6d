"""Chooses the tokens of each step. Pure Python: knows tokens and blocks, never a tensor, a text or a clock."""

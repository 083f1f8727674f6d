"""Which tokens run next. Pure Python: knows tokens and blocks, never a tensor, a text or a clock."""

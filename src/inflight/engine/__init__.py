"""The engine: who may come in, the loop of steps, what is reported of it; `process` runs it beside its callers."""

"""Finds the models that run exactly: compares a tiny, sensitive model of every causal LM class of `transformers` with
the reference.

`inflight census` builds one model of each class, runs a ragged workload through the engine, and compares every token
with the reference without a cache. Each class runs in its own process (`runner`, `__main__`), so that a crash is one
row of the table (`report`).
"""

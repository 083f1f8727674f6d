"""Finds which models run exactly: compares every causal LM class of `transformers`, tiny and sensitive, with itself.

`inflight census` builds one model of each class, runs a ragged workload through the engine, and compares every token
with the plain model without a cache. Each class runs in a process of its own (`runner`, `__main__`), so that whatever
happens to it is one row of the table (`report`).
"""

"""Which models run exactly: every causal LM class of `transformers`, made tiny and sensitive, against itself.

`inflight census` builds one model of each class, runs a ragged workload through the engine, and holds every token
against the plain model without a cache. Each class has a process of its own (`runner`, `__main__`), so that whatever
happens to it is one line of the table (`report`).
"""

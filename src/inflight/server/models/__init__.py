"""Several models behind one port, loaded on demand and unloaded for others. `load_scheduler` decides which are loaded,
`pool` loads and unloads them, `route` forwards requests to their model's application.
"""

"""Several models behind one port, each loaded when it is first asked for, and given up for others.

`load_scheduler` decides which are loaded, `pool` makes it so, `route` hands each request to its model's own
application.
"""

"""`allow_many_open_files`: each connection is an open file, and a server without any left can accept nobody.

Decides how many connections there may be: those beyond are closed at once, so that the server keeps a reserve for what
else it must open, and the clients that are served notice nothing.
"""

RESERVE = 64
"""Files that are left for everything but connections: pipes to the engine, sockets of exporters, modules."""


def allow_many_open_files() -> int | None:
    """Raise this process's own limit to what the system allows, and return how many connections that leaves room for;
    None: any number."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return None if soft == resource.RLIM_INFINITY else max(1, soft - RESERVE)

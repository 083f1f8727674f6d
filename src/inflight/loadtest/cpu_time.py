"""How much CPU time a server has used: its process and all descendants. Reads Linux's `/proc`."""

import os
from pathlib import Path

PROC = Path("/proc")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds, user and system, of a process, its living descendants and its dead children.

    Raises:
        ValueError: there is no such process, or no `/proc`.
    """
    if not (PROC / "self" / "stat").exists():
        raise ValueError("the server's CPU time is read from /proc, which this system does not have")
    stats = {int(entry.name): _fields(entry) for entry in PROC.iterdir() if entry.name.isdigit()}
    if not stats.get(pid):
        raise ValueError(f"there is no process {pid}")
    family, size = {pid}, 0
    while len(family) > size:  # until no new descendants are found
        size = len(family)
        family |= {child for child, fields in stats.items() if fields and int(fields[1]) in family}
    # user and system time, and both for children that were waited for
    ticks = sum(int(ticks) for member in family for ticks in stats[member][11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _fields(process: Path) -> list[str]:
    """Return the fields of `stat` from the third (state) on; none if the process has just ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

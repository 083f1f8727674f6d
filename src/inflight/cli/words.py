"""Human-readable numbers."""

import click

LONG = 10.0
"""Seconds. Longer work is announced."""


def say_if_long(seconds: float, what: str = "") -> None:
    """Announce on standard error how long `what` takes, if long."""
    if seconds > LONG:
        about = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        click.echo(f"inflight: {what}about {about}", err=True)


def in_bytes(num_bytes: int) -> str:
    """A number of bytes with a unit."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.3g} {unit}"


def in_words(number: int) -> str:
    """A number of parameters in words."""
    for name, power in (("billion", 10**9), ("million", 10**6)):
        if number >= power:
            return f"{number / power:.3g} {name}"
    return f"{number:,}"

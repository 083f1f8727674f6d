"""Numbers in words, for people."""

import click

LONG = 10.0
"""Seconds. Whatever takes longer says so before it starts."""


def say_if_long(seconds: float, what: str = "") -> None:
    """Say on standard error about how long something (`what`) takes, if that is long."""
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

"""Numbers in words, for people."""


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

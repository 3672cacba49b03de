"""Bytes and seconds the way people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Write a number of bytes with three digits and a decimal unit.

    >>> format_bytes(23_592_960)
    '23.6 MB'
    """
    unit, divisor = byte_unit(count)
    return f"{count / divisor:.3g} {unit}"


def byte_unit(count: float) -> tuple[str, int]:
    """Return the decimal unit that suits `count`, and its size in bytes."""
    for unit, divisor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= divisor:
            return unit, divisor
    return "B", 1


def format_duration(seconds: float) -> str:
    """Write seconds as 42s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"

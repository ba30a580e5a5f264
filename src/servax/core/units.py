"""Sizes and durations as people write them: `64MiB`, `5ms`."""

from __future__ import annotations

import re

from servax.core.errors import UsageError

_SIZES = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_DURATIONS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµ]*)\s*", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes from `64MiB`, `1.5GiB`, `10MB` or a plain number; units in any case.

    Raises:
      UsageError: it is none of these.
    """
    units = {unit.lower(): value for unit, value in _SIZES.items()}
    number, factor = _split(str(text), units, "a size", "a number of bytes, or one with B, KiB, MiB, GiB, KB, MB, GB")
    return round(number * factor)


def parse_duration(text: str | float) -> float:
    """Seconds from `5ms`, `1.5s`, `2m`, `1h`, `500us` or a plain number.

    Raises:
      UsageError: it is none of these.
    """
    number, factor = _split(str(text), _DURATIONS, "a duration", "a number of seconds, or one with us, ms, s, m or h")
    return number * factor


def size_text(size: int) -> str:
    """A size in the largest binary unit that divides it: `64MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZES[unit] == 0:
            return f"{size // _SIZES[unit]}{unit}"
    return str(size)


def duration_text(seconds: float) -> str:
    """A duration with its unit: `5ms`, `30s`."""
    if seconds and seconds < 1:
        return f"{seconds * 1e3:g}ms" if seconds >= 1e-3 else f"{seconds * 1e6:g}us"
    return f"{seconds:g}s"


def _split(text: str, units: dict[str, float] | dict[str, int], kind: str, expected: str) -> tuple[float, float]:
    match = _NUMBER.fullmatch(text)
    unit = "" if match is None else match[2].lower()
    if match is None or unit not in units:
        raise UsageError(f"{kind} cannot be read", seen=repr(text), expected=expected)
    return float(match[1]), units[unit]

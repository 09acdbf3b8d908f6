"""Numbers, times and counts as a person reads them."""

from __future__ import annotations

import math


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """1 step, 2,500 steps, 3 batches (with `plural`)."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def short_number(value: float) -> str:
    """Three digits and a letter: 12345 -> 12.3k; what is not finite stays itself."""
    digits, letter = _scaled(value)
    return digits + letter


def short_tokens(tokens: int) -> str:
    """Tokens trained on, in whole millions if there are any: 197M, 1,250M, 51.2k."""
    return f"{tokens / 1e6:,.0f}M" if tokens >= 999_500 else short_number(tokens)


def with_unit(value: float, unit: str) -> str:
    """Three digits and a unit with its prefix: 23.8 MFLOP, 850 FLOP."""
    digits, letter = _scaled(value)
    return f"{digits} {letter}{unit}"


def short_seconds(seconds: float) -> str:
    """A short time to three digits, and to a tenth of a millisecond: 1.24 s, 310 ms, 0.4 ms; 0 ms below that."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.3g} ms" if milliseconds >= 10 else f"{round(milliseconds, 1):g} ms"


def short_time(seconds: float) -> str:
    """45s, 3m20s, 5h07m or 12d03h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def long_time(seconds: float) -> str:
    """In the unit that a person would choose: 310 ms, 42 s, 3.4 minutes, 5.1 hours, 36.4 days, 8.2 years."""
    for limit, name in ((365.25 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= limit:
            return f"{seconds / limit:.3g} {name}"
    return short_seconds(seconds)


def rounded_time(seconds: float) -> str:
    """An estimate, without digits that it does not have: 4 minutes, 30 hours, 12 days."""
    for unit, size, limit in (("second", 1, 90), ("minute", 60, 5400), ("hour", 3600, 172_800)):
        if seconds < limit:
            return counted(max(1, round(seconds / size)), unit)
    return counted(round(seconds / 86400), "day")


def _scaled(value: float) -> tuple[str, str]:
    if not math.isfinite(value):
        return str(value), ""
    for limit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999,999 rounds to 1000 thousands, which is a million.
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}", letter
    return f"{value:.3g}", ""

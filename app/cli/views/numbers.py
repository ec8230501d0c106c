"""Numbers as short text; pure."""


def count(number: float) -> str:
    """A number of tokens or bytes in about three digits: 950, 20.1k, 1.2M."""
    for limit, unit in ((1_000, ""), (1_000_000, "k"), (1_000_000_000, "M")):
        # What would be rounded up to 1000 of a unit is said in the next one.
        if number < limit * 0.9995:
            value = number * 1_000 / limit
            return f"{value:.0f}" if unit == "" else f"{value:.1f}{unit}" if value < 99.95 else f"{value:.0f}{unit}"
    return f"{number / 1_000_000_000:.1f}G"


def duration(seconds: float | None) -> str:
    """A time as one reads it: 6.6 ms, 1.25 s, 12 min; a dash where it is not known."""
    if seconds is None:
        return "-"
    if seconds < 0.09995:
        return f"{seconds * 1_000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1_000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.0f} h"


def age(seconds: float) -> str:
    """How long ago something was, in whole seconds; clocks that differ do not make it negative."""
    return f"{max(0.0, seconds):.0f} s" if seconds < 99.5 else duration(seconds)


def plural(number: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"

"""Times of requests as numbers and as date-times, and the unit of a column of numbers.

A column holds date-times, Unix times, or numbers from an arbitrary beginning. Unix times in seconds, milli-, micro- and
nanoseconds lie in ranges that do not touch, from 2000 to 2100. The unit of other numbers is that of the format, unless
the requests would then come impossibly slowly or quickly.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum


class TimeUnit(StrEnum):
    """The unit of numbers that are times."""

    SECONDS = "seconds"
    MILLISECONDS = "milliseconds"
    MICROSECONDS = "microseconds"
    NANOSECONDS = "nanoseconds"

    @property
    def per_second(self) -> int:
        """The number of them in a second."""
        return int(10 ** (3 * _FINER.index(self)))


_FINER = tuple(TimeUnit)
"""From the coarsest to the finest."""

_UNIX_S = (946_684_800.0, 4_102_444_800.0)
"""2000 and 2100."""

_SLOWEST_S = 100.0
"""The longest mean time between two requests of a trace; with a longer one, whole numbers are of a finer unit."""

_QUICKEST = 10.0
"""The least mean difference of milliseconds with fractions; with a smaller one, the numbers are seconds."""


@dataclass(slots=True)
class TimeColumn:
    """The facts about a column of times that decide about its unit."""

    unit: TimeUnit
    unit_is_certain: bool
    count: int = 0
    least: float = float("inf")
    most: float = float("-inf")
    are_dates: bool = False
    have_fractions: bool = False

    @property
    def are_unix(self) -> bool:
        """True for date-times and Unix times."""
        return self.are_dates or self._unix_unit is not None

    @property
    def found_unit(self) -> TimeUnit:
        """The unit of the numbers so far; date-times are numbers of Unix seconds."""
        if self.are_dates:
            return TimeUnit.SECONDS
        if (unit := self._unix_unit) is not None:
            return unit
        return self.unit if self.unit_is_certain else self._plausible()

    @property
    def description(self) -> str:
        """The unit in words."""
        if self.are_dates:
            return "date-times"
        return f"Unix {self.found_unit}" if self.are_unix else str(self.found_unit)

    @property
    def _unix_unit(self) -> TimeUnit | None:
        low, high = _UNIX_S
        for unit in TimeUnit:
            if low * unit.per_second <= self.least and self.most <= high * unit.per_second:
                return unit
        return None

    def _plausible(self) -> TimeUnit:
        if self.count < 2 or self.most <= self.least:
            return self.unit
        between = (self.most - self.least) / (self.count - 1)
        if self.unit is TimeUnit.MILLISECONDS and between < (_QUICKEST if self.have_fractions else 1.0):
            return TimeUnit.SECONDS
        fitting = [unit for unit in _FINER[_FINER.index(self.unit) :] if between / unit.per_second <= _SLOWEST_S]
        return fitting[0] if fitting and not self.have_fractions else self.unit


def date_time(text: str) -> float:
    """Unix seconds of a date-time as in ISO 8601, with any fraction and zone; without a zone it is UTC.

    Raises `ValueError` for other text.
    """
    trimmed = re.sub(r"\s*(UTC|GMT)$", "Z", text.strip())
    moment = datetime.fromisoformat(re.sub(r"\s+(?=[+-]\d\d:?\d\d$)", "", trimmed))
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def shown(unix_s: float) -> str:
    """The date-time of a Unix time."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

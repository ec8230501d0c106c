"""Times of requests as numbers and as date-times, and the unit of a column of numbers.

A column holds date-times, Unix times, or numbers from an arbitrary beginning. Unix times in seconds, milli-, micro- and
nanoseconds lie in ranges that do not touch, from 2000 to 2100. A unit in the name of the column counts, unless the
times would then be after 2100. The unit of other numbers is that of the format, unless the requests would then come
impossibly slowly or quickly; where they would come unusually slowly or quickly, it is a guess.
"""

import math
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

_WRITTEN = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
"""Dates as numbers, by the number of their digits."""

_UNIX_S = (946_684_800.0, 4_102_444_800.0)
"""2000 and 2100."""

SLOWEST_S = 100.0
"""The longest usual mean time between two requests; with a longer one, the unit of whole numbers is a guess."""

SLOWEST_KNOWN_S = 3600.0
"""The longest mean time between two requests in the unit of a known format."""

_QUICKEST = 1.0
_QUICKEST_FRACTIONS = 10.0
"""The least mean differences of milliseconds, and of milliseconds with fractions; below it, the numbers are seconds."""

_QUICK = 10.0
"""With a mean difference below this multiple of the least one, the milliseconds are a guess."""


@dataclass(slots=True)
class TimeColumn:
    """The facts about a column of times that decide about its unit.

    `unit` is in the name of the column if it `is_named`, else it is the format's.
    """

    unit: TimeUnit
    is_named: bool = False
    slowest_s: float = SLOWEST_S
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
        return self._unit_and_doubt[0]

    @property
    def unit_is_guess(self) -> bool:
        """True if the values decided about the unit, or make the format's unit doubtful."""
        return self._unit_and_doubt[1]

    @property
    def description(self) -> str:
        """The unit in words."""
        if self.are_dates:
            return "date-times"
        return f"Unix {self.found_unit}" if self.are_unix else str(self.found_unit)

    @property
    def _name_holds(self) -> bool:
        return self.is_named and self.most <= _UNIX_S[1] * self.unit.per_second

    @property
    def _unix_unit(self) -> TimeUnit | None:
        low, high = _UNIX_S
        for unit in (self.unit,) if self._name_holds else TimeUnit:
            if low * unit.per_second <= self.least and self.most <= high * unit.per_second:
                return unit
        return None

    @property
    def _unit_and_doubt(self) -> tuple[TimeUnit, bool]:
        if self.are_dates:
            return TimeUnit.SECONDS, False
        if self._name_holds:
            return self.unit, False
        if (unit := self._unix_unit) is not None:
            return unit, self.is_named
        return self._by_pace()

    def _by_pace(self) -> tuple[TimeUnit, bool]:
        """The unit by the mean time between requests."""
        if self.count < 2 or self.most <= self.least:
            return self.unit, False
        between = (self.most - self.least) / (self.count - 1)
        if self.unit is TimeUnit.MILLISECONDS:
            quickest = _QUICKEST_FRACTIONS if self.have_fractions else _QUICKEST
            if between < _QUICK * quickest:
                return TimeUnit.SECONDS if between < quickest else self.unit, True
        between_s = between / self.unit.per_second
        if self.have_fractions or between_s <= SLOWEST_S or math.isinf(self.slowest_s):
            return self.unit, False
        if between_s <= self.slowest_s:
            return self.unit, True
        finer = _FINER[_FINER.index(self.unit) :]
        return next((unit for unit in finer if between / unit.per_second <= SLOWEST_S), self.unit), True


def date_time(text: str) -> float:
    """Unix seconds of a date-time as in ISO 8601, with any fraction and zone; without a zone it is UTC.

    Raises `ValueError` for other text.
    """
    trimmed = re.sub(r"\s*(UTC|GMT)$", "Z", text.strip())
    moment = datetime.fromisoformat(re.sub(r"\s+(?=[+-]\d\d:?\d\d$)", "", trimmed))
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def is_written_date(number: float) -> bool:
    """True for a date, or a date and a time, written as one number: 20240301, 20240301120000."""
    digits = str(int(number)) if number.is_integer() and 2e7 < number < 3e13 else ""
    if (form := _WRITTEN.get(len(digits))) is None:
        return False
    try:
        return _UNIX_S[0] <= datetime.strptime(digits, form).replace(tzinfo=UTC).timestamp() < _UNIX_S[1]
    except ValueError:
        return False


def shown(unix_s: float) -> str:
    """The date-time of a Unix time."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

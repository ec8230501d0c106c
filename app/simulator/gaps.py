"""The longest of the latest step times, for any number of latest ones."""

from bisect import bisect_right


class Gaps:
    """Step times as they come, of which only those are kept that no later one has reached.

    So what is kept falls from the oldest to the newest, and the oldest since a mark is the longest since then.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._seconds: list[float] = []
        self._count = 0

    def add(self, seconds: float) -> None:
        """The next step took so long."""
        while self._seconds and self._seconds[-1] <= seconds:
            self._seconds.pop()
            self._numbers.pop()
        self._count += 1
        self._numbers.append(self._count)
        self._seconds.append(seconds)

    def mark(self) -> int:
        """A point in the sequence: now."""
        return self._count

    def longest(self, mark: int) -> float:
        """The longest step time since the mark, 0 if there was none."""
        index = bisect_right(self._numbers, mark)
        return self._seconds[index] if index < len(self._seconds) else 0.0

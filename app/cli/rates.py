"""How fast things go, from what several looks at the cluster show; pure.

Only what is there at a look is seen: a request that comes and goes between two of them is counted nowhere.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from app.client.documents import StateDocument

WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over the last looks. `tokens` are those by which the requests that stayed grew, prefill included."""

    over_s: float
    came: float
    left: float
    tokens: float
    moved: float


class Looks:
    """The looks of the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, StateDocument]] = deque()

    def add(self, at_s: float, state: StateDocument) -> Rates | None:
        """Take in what was seen at that time; the rates since the oldest look, None if this is the only one."""
        self._looks.append((at_s, state))
        while at_s - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()
        over_s = at_s - self._looks[0][0]
        if over_s <= 0:
            return None
        came = left = tokens = moved = 0
        for (_, earlier), (_, later) in pairwise(self._looks):
            before, after = earlier.requests(), later.requests()
            stayed = before.keys() & after.keys()
            came += len(after.keys() - stayed)
            left += len(before.keys() - stayed)
            tokens += sum(max(0, after[id].tokens - before[id].tokens) for id in stayed)
            moved += sum(max(0, after[id].hop - before[id].hop) for id in stayed)
        return Rates(over_s, came / over_s, left / over_s, tokens / over_s, moved / over_s)

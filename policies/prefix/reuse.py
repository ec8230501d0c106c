"""The probability that a request is continued, learned from arrivals, and the cost of returning its context.

A conversation repeats its context with every turn. Where prefills have replicas of their own, the part that another
replica has computed is missing there, unless it is copied back (`CopyReason.RETURN`). That pays if

    P(continued) * F(output) > X(output)

for the prefill F that it saves, and the time X on the link. A request is continued once a prompt arrives that begins
with its prompt, and of which some replica has more blocks than these: at least one of its output.

A conversation is known by its session or, without one, by the name of its prompt's last full block. Its own turns
count, and `WEIGHT` further ones with the share of the whole pool:

    P = (continued + WEIGHT * share) / (continued + ended + WEIGHT)
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed

HORIZON_S = 60.0
"""A request counts as ended if it has not been continued for this time, in seconds, until it is."""
FORGOTTEN_S = 600.0
"""The time after which a request is forgotten, in seconds."""
WEIGHT = 2.0
"""The weight of the pool's share, in turns."""
MEMORY = 1000.0
"""The number of requests after which the older half counts half."""
SAMPLE = 256
"""The tokens for which a prefill and a copy are compared: an answer's, whose length is not known yet."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A request: the blocks of its prompt, and the turns of its conversation that were continued, and that were not."""

    blocks: int
    at: float
    session: str
    end: int | None
    continued: int = 0
    ended: int = 0
    judged: bool | None = None
    """True: it was continued. False: it counts as ended. None so far."""


class Reuse:
    """The conversations of one pool. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._by_session: dict[str, _Turn] = {}
        self._by_end: dict[int, _Turn] = {}
        self._turns: deque[_Turn] = deque()
        """Those that are not forgotten, the oldest first."""
        self._open: deque[_Turn] = deque()
        """Those that are younger than the horizon, the oldest first."""
        self._continued = self._ended = 0.0

    @property
    def share(self) -> float:
        """The share of all requests that are continued; a half before any is known."""
        return (self._continued + 1) / (self._continued + self._ended + 2)

    def arrived(self, names: Sequence[int], reached: int, session: str, now: float) -> float:
        """Note an arrival, and return the probability that it is continued.

        `names` are those of its prompt's full blocks, of which some replica has the first `reached`.
        """
        self._expire(now)
        turn = _Turn(len(names), now, session, names[-1] if names else None)
        before = self._before(names, session)
        if before is not None:
            turn.continued, turn.ended = before.continued, before.ended
            if reached > before.blocks:
                turn.continued += 1
                self._continue(before)
            else:
                turn.ended += 1
        if session:
            self._by_session[session] = turn
        if turn.end is not None:
            self._by_end[turn.end] = turn
        self._turns.append(turn)
        self._open.append(turn)
        return (turn.continued + WEIGHT * self.share) / (turn.continued + turn.ended + WEIGHT)

    def _before(self, names: Sequence[int], session: str) -> _Turn | None:
        """The newest request of the session or, without one, the longest prompt that is a beginning of this one."""
        if session:
            return self._by_session.get(session)
        found = (self._by_end.get(name) for name in reversed(names[:-1]))
        return next((turn for turn in found if turn is not None), None)

    def _continue(self, turn: _Turn) -> None:
        if not turn.judged:
            self._ended -= turn.judged is False and self._ended >= 1
            self._count(True)
        turn.judged = True

    def _count(self, continued: bool) -> None:
        self._continued += continued
        self._ended += not continued
        if self._continued + self._ended > MEMORY:
            self._continued, self._ended = self._continued / 2, self._ended / 2

    def _expire(self, now: float) -> None:
        while self._open and self._open[0].at <= now - HORIZON_S:
            turn = self._open.popleft()
            if turn.judged is None:
                turn.judged = False
                self._count(False)
        while self._turns and self._turns[0].at <= now - FORGOTTEN_S:
            turn = self._turns.popleft()
            if self._by_session.get(turn.session) is turn:
                del self._by_session[turn.session]
            if turn.end is not None and self._by_end.get(turn.end) is turn:
                del self._by_end[turn.end]


def worth_returning(reuse: float, prompt: int, speed: ReplicaSpeed, link: Line | None) -> bool:
    """True if a copy of what follows a prompt occupies its link for less than the prefill saved, times `reuse`.

    The latency of the copy does not count: nobody waits for it. Without a link nothing can be copied.
    """
    return link is not None and reuse * speed.prefill_s(SAMPLE, prompt) > link.per_unit_s * SAMPLE

"""The costs of pairs, learned from replicas' reports: the hops between members, and the exchange of their layers.

A hop takes a line over the tokens of a step, an exchange a line over the tokens whose KV goes. Before the first
measurement, and long after the last one, both lines are the start values.
"""

from dataclasses import dataclass

from policies.cost.lines import Evidence, Line, Observed
from policies.cost.steps import HopCosts

HALF_LIFE_S = 600.0
"""The age, in seconds, at which a measurement has lost half of its weight."""
FIRST_HOP = Line(1e-3, 1e-6)
"""One way, through shared memory and by a message between processes of one node. Assumed until measured."""
FIRST_EXCHANGE = Line(2.0, 2e-5)
"""Assumed until measured: some tens of layers, and 50,000 tokens of KV per second."""


@dataclass(frozen=True, slots=True)
class HopTotals:
    """Sums over the hops of a replica's steps since its pair began. `seconds` are those on the way, there and back."""

    hops: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def since(self, earlier: "HopTotals") -> "HopTotals":
        """The sums over the hops after `earlier`; all of them if they have begun anew."""
        if self.hops < earlier.hops:
            return self
        return HopTotals(self.hops - earlier.hops, self.tokens - earlier.tokens, self.seconds - earlier.seconds)


NO_HOPS = HopTotals()


class PairCosts:
    """The costs of the pairs of one pool. Times are in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._hops = Evidence(HALF_LIFE_S)
        self._exchanges = Evidence(HALF_LIFE_S)

    def observe_hops(self, totals: HopTotals, now: float) -> None:
        """Add hops of one replica. Totals without hops are no measurement."""
        if totals.hops > 0:
            mean_s = max(0.0, totals.seconds) / totals.hops / 2
            self._hops.add(Observed(now, totals.tokens / totals.hops, mean_s))

    def observe_exchange(self, tokens: float, took_s: float, now: float) -> None:
        """Add a pair that has formed, with the KV of that many tokens given, in `took_s` seconds from its order on."""
        self._exchanges.add(Observed(now, tokens, took_s))

    def hop(self, now: float) -> HopCosts:
        """The costs of a hop."""
        line = self._hops.line(FIRST_HOP, now)
        return HopCosts(line.latency_s, line.per_unit_s)

    def exchange(self, now: float) -> Line:
        """Seconds of an exchange over the tokens of KV that are given."""
        return self._exchanges.line(FIRST_EXCHANGE, now)

"""Bounds that hold for every policy: how much one epoch may move, how often one request, and what stays open."""

from dataclasses import dataclass

from policies.cluster.cluster import Cluster
from policies.plan import Plan


@dataclass(frozen=True, slots=True)
class Limits:
    """`moves_per_epoch` requests may change their replica in one epoch (None: any number); one that was moved stays
    for `cooldown_s` seconds. `headroom_s` seconds of growth are kept free per request, where the policy does not ask
    for more, beside `lead_s` seconds for decisions to take effect: an epoch and a move.

    At least `min_replicas` stay open, and as many more as it takes to have `slack` replicas' worth of tokens free in
    all. To that comes, with `foresight_s`, the largest rise of demand that lately happened within so many seconds: set
    to a replica's start-up time it opens replicas before they are needed. One that is empty stays open for `linger_s`:
    as long as the start-up that it saves if it is needed again.
    """

    moves_per_epoch: int | None = None
    cooldown_s: float = 0.0
    headroom_s: float = 0.0
    lead_s: float = 0.0
    min_replicas: int = 0
    slack: float = 0.0
    foresight_s: float = 0.0
    linger_s: float = 0.0

    def begin(self, cluster: Cluster, now: float) -> None:
        """Set an epoch's budget, let those requests move again that have rested, and say what is to stay free."""
        cluster.wake(now)
        slack = round(self.slack * cluster.capacity)
        if self.foresight_s:
            cluster.demand.observe(now, cluster.total(), self.foresight_s)
            slack += cluster.demand.rise
        moves = float("inf") if self.moves_per_epoch is None else self.moves_per_epoch
        cluster.bound(moves, slack, self.min_replicas)

    def scale(self, cluster: Cluster, now: float) -> None:
        """Open what is missing to the slack; close what is empty and not needed for it, the youngest first."""
        while cluster.slack and cluster.spare() < cluster.slack and cluster.open() is not None:
            pass
        cluster.close_idle(now, self.linger_s)

    def end(self, cluster: Cluster, plan: Plan, now: float) -> None:
        """Let what was moved rest."""
        if self.cooldown_s:
            for move in plan.moves:
                cluster.rest(move.request, now + self.cooldown_s)

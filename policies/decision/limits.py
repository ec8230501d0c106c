"""Bounds on decisions, whatever the policy: how much one epoch may move, how often one request, and what stays open."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from policies.cluster.cluster import Cluster
from policies.decision.experience import Experience
from policies.paths.estimates import Boundaries


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

    def open_slack(self, cluster: Cluster) -> None:
        """Open what is missing to the slack."""
        while cluster.slack and cluster.spare() < cluster.slack and cluster.open() is not None:
            pass


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """`limits` as configured. What is None is measured: `linger_s` and `foresight_s` are then how long replicas take to
    start, `lead_s` two epochs and a move. `by_hand_s` is how long a request stays that an operator has moved.
    """

    limits: Limits = field(default_factory=Limits)
    linger_s: float | None = None
    foresight_s: float | None = None
    by_hand_s: float = 60.0
    lead_s: float | None = None

    def now(self, experience: Experience) -> Limits:
        """The limits of an epoch."""
        startup_s = experience.startup_s
        return replace(
            self.limits,
            lead_s=experience.lead_s if self.lead_s is None else self.lead_s,
            linger_s=startup_s if self.linger_s is None else self.linger_s,
            foresight_s=startup_s if self.foresight_s is None else self.foresight_s,
        )


def as_given(limits: Limits) -> LiveLimits:
    """Limits of which nothing is measured."""
    return LiveLimits(limits, limits.linger_s, limits.foresight_s, lead_s=limits.lead_s)


class Mode(StrEnum):
    """What becomes of plans. OFF: none are made; replicas that are to be gone are still evacuated, in every mode.
    OBSERVE: they are made for a dry run beside the cluster. ACT: they are made and carried out.
    """

    OFF = "off"
    OBSERVE = "observe"
    ACT = "act"


@dataclass(frozen=True, slots=True)
class Terms:
    """What the decisions of a pool are bound by, from the beginning to the end of its memory.

    `moves_at_once` moves may be under way (None: any number), `moves_per_replica` of them from or to one replica. An
    arrival counts where it was placed until its replica reports it, or for `placement_ttl_s` seconds.

    Live, moves and starts take time, and every request is on some replica, if only in its queue. In the idealised
    model of the simulator moves are instantaneous unless `moves_take_time`, replicas can be used at once unless
    `starts_take_time`, and a request for which there is no room is on no replica if it `may_wait_nowhere`. Changes are
    then decided one by one unless `batched` (the paper's Algorithm 1), and `decode_rate` is how many tokens per second
    a request gains, None where that is measured. A node has `per_node` replicas.
    """

    policy: str = "pack"
    limits: LiveLimits = field(default_factory=LiveLimits)
    epoch_s: float = 1.0
    mode: Mode = Mode.ACT
    boundaries: Boundaries = field(default_factory=Boundaries)
    moves_at_once: int | None = 32
    moves_per_replica: int | None = 4
    placement_ttl_s: float = 2.0
    moves_take_time: bool = True
    starts_take_time: bool = True
    may_wait_nowhere: bool = False
    batched: bool = True
    decode_rate: float | None = None
    per_node: int = 8

    @property
    def is_ideal(self) -> bool:
        """True in the paper's model: every plan is carried out at once and as a whole."""
        return self.may_wait_nowhere and not self.moves_take_time

"""Bounds on decisions under any policy: moves per epoch and per request, and the capacity that stays free."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from policies.cluster.forecast import SEARCH_S, Forecast
from policies.cluster.supply import Demand
from policies.cost.service import ReplicaSpeed, ServiceLevel
from policies.decision.experience import Experience
from policies.memory.pairing import PairingTerms
from policies.model import PoolId
from policies.paths.estimates import Boundaries
from policies.precedence import DEFAULT_CLASS, NO_CLASSES, ServiceClasses
from policies.prefix.routing import Routing


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one epoch.

    At most `moves_per_epoch` requests change their replica in an epoch (None: any number), and a moved request stays
    where it is for `cooldown_s` seconds. Placements keep `lead_s` + `headroom_s` seconds of growth free per request
    (more if the policy asks for a larger headroom): `lead_s` is the time until a decision takes effect.

    The pool keeps free `slack`, as a number of replicas, and the largest recent rise in demand within `foresight_s`
    seconds; with a replica's start-up time as `foresight_s`, replicas open before they are needed. With `foreseen`
    it is instead the change that demand exceeds with a probability of 1 - `foreseen` only. An empty replica
    stays open for `linger_s` seconds. The natural value is the start-up time, too, since that is the time it saves if
    it is needed again.
    """

    moves_per_epoch: int | None = None
    cooldown_s: float = 0.0
    headroom_s: float = 0.0
    lead_s: float = 0.0
    slack: float = 0.0
    foresight_s: float = 0.0
    linger_s: float = 0.0
    foreseen: float | None = None


MORE_LIKELY_THAN_NOT = 0.5
"""The probability with which a closed replica must not be needed again for the time of a start. A replica that closes
saves a second in every second. If it is needed again sooner than it starts, it has cost more than one that stays."""

STAGGER_S = 7.0
"""The seconds between the searches of two pools: 60 pools search in 60 different seconds of a minute."""


@dataclass(slots=True)
class DemandHistory:
    """The demand of a pool in the last minutes, and the capacity to keep free for its next rise.

    `change` is the change of demand that the limits provide for, in tokens: the largest rise, or the forecast one.
    `peak` is the largest value of demand and forecast together in the next start that is as likely as a smaller one,
    less the present demand: to close replicas beyond it saves more than to open them again costs.
    """

    past: Demand = field(default_factory=Demand)
    forecast: Forecast = field(default_factory=Forecast)
    needs: Forecast = field(default_factory=lambda: Forecast(max))
    change: int = 0
    peak: int = 0

    @classmethod
    def of_pool(cls, number: int) -> Self:
        """That of one of many pools: `number` sets the second in which it looks for periods, which takes a while."""
        delay_s = number * STAGGER_S % SEARCH_S
        return cls(forecast=Forecast(delay_s=delay_s), needs=Forecast(max, delay_s))

    def observe(self, limits: Limits, tokens: int, wait_s: float, now: float) -> None:
        """Add the demand at `now`, in tokens. Requests that wait `wait_s` seconds are in time."""
        if limits.foreseen is None:
            self.past.observe(now, tokens, limits.foresight_s)
            self.change = self.peak = self.past.rise
            return
        self.forecast.observe(now, tokens, limits.foresight_s, wait_s)
        self.change = self.forecast.change(limits.foreseen)
        self.needs.observe(now, tokens + self.change, 0.0, limits.foresight_s)
        self.peak = self.change + max(0, self.needs.change(MORE_LIKELY_THAN_NOT))


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """`limits` as configured, with measured times. `by_hand_s` is the cool-down after an operator's move, in seconds.

    A value of None is measured: `linger_s` and `foresight_s` are then the start-up time of replicas, and `lead_s` is
    two epochs and a move. A `slack` replaces that of `limits`, and the forecast of a service level.
    """

    limits: Limits = field(default_factory=Limits)
    linger_s: float | None = None
    foresight_s: float | None = None
    by_hand_s: float = 60.0
    lead_s: float | None = None
    slack: float | None = None

    def resolve(self, experience: Experience, foreseen: float | None = None) -> Limits:
        """The limits of an epoch, measured values included.

        With `foreseen`, for a service level, the slack is a forecast, unless `slack` or `foresight_s` are configured:
        then it is the first, and the largest rise within the latter. An empty replica that a forecast does not need
        closes at once.
        """
        startup_s = experience.startup_s
        follows = foreseen is not None and self.slack is None and self.foresight_s is None
        measured_s = 0.0 if foreseen is not None and self.slack is not None else startup_s
        return replace(
            self.limits,
            slack=self.limits.slack if self.slack is None else self.slack,
            lead_s=experience.lead_s if self.lead_s is None else self.lead_s,
            linger_s=(0.0 if follows else startup_s) if self.linger_s is None else self.linger_s,
            foresight_s=measured_s if self.foresight_s is None else self.foresight_s,
            foreseen=foreseen if follows else None,
        )


def as_given(limits: Limits) -> LiveLimits:
    """The same limits in every epoch, without measured values."""
    return LiveLimits(limits, limits.linger_s, limits.foresight_s, lead_s=limits.lead_s)


class Mode(StrEnum):
    """The use of decisions. OFF: evacuations only, which all modes have in common. OBSERVE: as OFF, and the decision
    of ACT is proposed in every epoch. ACT: decisions are carried out.
    """

    OFF = "off"
    OBSERVE = "observe"
    ACT = "act"


class Sizes(StrEnum):
    """The size of a request in a KV cache. MARGINAL: blocks that it shares with other requests of its replica count
    once. BLIND: all of its tokens.
    """

    MARGINAL = "marginal"
    BLIND = "blind"


@dataclass(frozen=True, slots=True)
class Terms:
    """The fixed conditions of a pool's decisions.

    At most `moves_at_once` moves are under way (None: any number), `moves_per_replica` of them from or to the same
    replica. A placement counts until the replica reports the request, or for `placement_ttl_s` seconds.

    On a live cluster, moves and starts take time, and every request is on a replica, if only in its queue. The
    simulator's idealised model differs: moves are instantaneous unless `moves_take_time`, replicas start at once unless
    `starts_take_time`, and with `may_wait_nowhere` a request without room is on no replica. Unless `batched`, the model
    decides every change by itself (the paper's Algorithm 1). `decode_rate` is the growth of a request in tokens per
    second (None: measured), and `per_node` the number of replicas on a node. With `by_machine`, replicas are emptied
    and closed node by node, since an empty node can be given back.

    `service` is the level of service that decides when a replica is full and what is kept free (None: the KV cache and
    the limits alone do). `speed` are the step times of replicas (None: fitted to their reports). `routing` is the rule
    by which content decides on placements. With `copies`, replicas copy prefixes from each other. `classes` order
    requests. `sizes` are those for which replicas need room. `prefill_replicas` replicas are for prefills alone, the
    others for decoding (0: all are for both); what these compute `returns` to the former where that pays. With
    `auto_prefills` that is their maximum: epochs decide on their number, arrivals on being prefilled there. `pairing`
    is the use of decisions on pairs of replicas, which follow from `pairing_terms`.

    `pools` are the terms of several pools, where these differ.
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
    by_machine: bool = False
    service: ServiceLevel | None = None
    speed: ReplicaSpeed | None = None
    routing: Routing = Routing.TREE
    copies: bool = False
    classes: ServiceClasses = NO_CLASSES
    sizes: Sizes = Sizes.MARGINAL
    prefill_replicas: int = 0
    returns: bool = False
    auto_prefills: bool = False
    pairing: Mode = Mode.OFF
    pairing_terms: PairingTerms = field(default_factory=PairingTerms)
    pools: Mapping[PoolId, "Terms"] = field(default_factory=dict)

    def of(self, pool: PoolId) -> "Terms":
        """The terms of a pool, in the common mode."""
        return replace(self.pools.get(pool, self), mode=self.mode)

    @property
    def pairing_mode(self) -> Mode:
        """The use of decisions on pairs: as of all others, or less."""
        modes = self.mode, self.pairing
        return next((mode for mode in (Mode.OFF, Mode.OBSERVE) if mode in modes), Mode.ACT)

    @property
    def has_level(self) -> bool:
        """True if there is a service level, of the pool or of a class."""
        return self.service is not None or bool(self.classes.levels)

    @property
    def levels(self) -> Mapping[str, ServiceLevel]:
        """The levels by service class; that of the default class is the pool's."""
        pool = {} if self.service is None else {DEFAULT_CLASS: self.service}
        return {**pool, **self.classes.levels}

    @property
    def ttft_s(self) -> Mapping[str, float]:
        """The longest times to a first token by class, in seconds. Classes without a level have the pool's."""
        levels, pool = self.levels, self.service or ServiceLevel()
        found = {name: levels.get(name, pool).ttft_p99_s for name in self.classes.names}
        return {name: ttft_s for name, ttft_s in found.items() if ttft_s is not None}

    def with_levels(self, levels: Mapping[str, ServiceLevel]) -> "Terms":
        """The terms with other levels of the classes that have one."""
        classes = {
            name: each if each.level is None else replace(each, level=levels[name])
            for name, each in self.classes.by_name.items()
        }
        service = None if self.service is None else levels[DEFAULT_CLASS]
        return replace(self, service=service, classes=replace(self.classes, by_name=classes))

    @property
    def is_ideal(self) -> bool:
        """True in the paper's model: every plan is carried out at once and as a whole."""
        return self.may_wait_nowhere and not self.moves_take_time

"""The conditions of an epoch, from what is learned, the pool's report and the limits."""

from dataclasses import dataclass
from math import ceil, exp, inf, isfinite, sqrt
from statistics import NormalDist

from policies.cluster.capacity import queued_tokens, total_demand_at
from policies.cluster.conditions import EpochConditions
from policies.cost.service import TAIL, SpeedLimit
from policies.decision.level.service import level_of, speed_limit
from policies.decision.limits import Limits
from policies.decision.memory import PoolMemory
from policies.decision.observation import PoolReport
from policies.model import Tokens
from policies.rules.policy import Policy
from policies.rules.registry import sets_headroom


@dataclass(frozen=True, slots=True)
class LevelBounds:
    """The bounds of an epoch that follow from the service level: the limit of steps, None without one, and the share of
    the waiting requests' sizes that counts as demand.
    """

    speed: SpeedLimit | None = None
    queue_share: float = 1.0


def level_bounds(memory: PoolMemory, now: float) -> LevelBounds:
    """The bounds of the service level for the next epoch, under the traffic up to now."""
    speed, cluster = speed_limit(memory, now), memory.cluster
    if speed is None:
        return LevelBounds(None, cluster.conditions.queue_share)
    return LevelBounds(speed, memory.learned.experience.queue_share(queued_tokens(cluster), speed.wait_s, now))


def learn_risk(memory: PoolMemory, bounds: LevelBounds, now: float) -> None:
    """Adapt the probability with which demand may exceed its forecast to the requests that wait for too long."""
    ttft_s = None if bounds.speed is None else level_of(memory, now).ttft_p99_s
    experience = memory.learned.experience
    rate = experience.arrival_rate(now)
    memory.learned.risk.observe(memory.locations.is_unstarted, ttft_s, experience.startup_s, rate, now)


def learn_demand(memory: PoolMemory, bounds: LevelBounds, limits: Limits, now: float) -> None:
    """Add the epoch's demand to the history, and the number of replicas that its service level takes."""
    speed = bounds.speed
    if speed is not None:
        # As long as a start takes, since a replica that is closed earlier saves nothing if it is needed again.
        memory.learned.level_replicas.observe(now, speed.least_replicas, memory.learned.experience.startup_s)
    if limits.foresight_s:
        wait_s = speed.wait_s if speed is not None and isfinite(speed.wait_s) else 0.0
        tokens = total_demand_at(memory.cluster, speed, bounds.queue_share)
        memory.learned.demand.observe(limits, tokens, wait_s, now)


def epoch_conditions(
    memory: PoolMemory, seen: PoolReport, bounds: LevelBounds, limits: Limits, now: float
) -> EpochConditions:
    """The conditions of the epoch. Changes nothing: `learn_demand` comes before it."""
    rate, follows = memory.learned.experience.decode_rate, memory.terms.service is not None
    growth = _net_lead(memory, limits, now) if follows else lead(limits, rate)
    slack, demand = round(limits.slack * memory.cluster.capacity), memory.learned.demand
    rests = _rests(memory, seen, limits, now)
    free, peak = (0, 0) if rests else (slack + demand.change, slack + demand.peak)
    return EpochConditions(
        headroom(memory.rule, limits, rate, growth, follows),
        growth,
        bounds.speed,
        inf if limits.moves_per_epoch is None else limits.moves_per_epoch,
        max(0, free),
        None if limits.foreseen is None else free,
        max(0, peak),
        limits.foreseen is None or bool(memory.learned.risk.late),
        bounds.queue_share,
        seen.pool.min_replicas,
        0 if rests else memory.learned.level_replicas.value,
        seen.opening > 0 or memory.learned.experience.awaits_start(now),
    )


def _rests(memory: PoolMemory, seen: PoolReport, limits: Limits, now: float) -> bool:
    """True if the pool needs nothing: it sleeps without requests, and has had none for the linger, or for as long as a
    start takes. Then no capacity is kept free, and the last replica may close.
    """
    cluster, linger_s = memory.cluster, limits.linger_s or memory.learned.experience.startup_s
    return (
        seen.pool.sleeps
        and not cluster.requests
        and all(r.idle_since is not None and now - r.idle_since >= linger_s for r in cluster.running())
    )


def headroom(policy: Policy, limits: Limits, decode_rate: float, growth: Tokens, follows: bool = False) -> Tokens:
    """The growth to keep free for each request, in tokens: `growth` until a decision takes effect, and more.

    `decode_rate` is a request's growth in tokens per second. The larger headroom of policy and limits counts. If it
    `follows` from a service level, the default of a policy does not count: capacity for what nobody foresees is in the
    pool's reserve.
    """
    own_s = 0.0 if follows and not sets_headroom(policy) else policy.headroom_s
    return Tokens(growth + ceil(max(own_s, limits.headroom_s) * decode_rate))


def lead(limits: Limits, decode_rate: float) -> Tokens:
    """A request's growth until a decision takes effect, in tokens."""
    return Tokens(ceil(limits.lead_s * decode_rate))


def net_lead(limits: Limits, decode_rate: float, stay_s: float, requests: float, size: float) -> Tokens:
    """As `lead`, of requests that end: each grows until its end only, and those that end leave their room to the rest.

    A replica has `requests` requests of `size` tokens in the mean, which stay there for `stay_s` seconds. Their ends
    are independent of each other and of their age. As many end in time as do so with the probability of the limits'
    forecast, without one that of a level: of few requests perhaps none, of many nearly the mean.
    """
    if not (stay_s and requests):
        return lead(limits, decode_rate)
    ending = 1 - exp(-limits.lead_s / stay_s)
    deviations = NormalDist().inv_cdf(1.0 - TAIL if limits.foreseen is None else limits.foreseen)
    sure = max(0.0, ending - deviations * sqrt(ending * (1 - ending) / requests))
    return Tokens(max(0, ceil(ending * stay_s * decode_rate - sure * size)))


def _net_lead(memory: PoolMemory, limits: Limits, now: float) -> Tokens:
    experience = memory.learned.experience
    used = [replica for replica in memory.cluster.running() if replica.requests]
    count = sum(len(replica.requests) for replica in used)
    size = sum(replica.load for replica in used) / count if count else 0.0
    return net_lead(limits, experience.decode_rate, experience.stay_s(now), count / max(1, len(used)), size)

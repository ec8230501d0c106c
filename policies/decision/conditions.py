"""The conditions of an epoch, from what is learned, the pool's report and the limits."""

from dataclasses import dataclass
from math import ceil, inf, isfinite

from policies.cluster.capacity import queued_tokens, total_demand_at
from policies.cluster.conditions import EpochConditions
from policies.cost.service import SpeedLimit
from policies.decision.level.service import speed_limit
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
    rate = memory.learned.experience.decode_rate
    return EpochConditions(
        headroom(memory.rule, limits, rate, memory.terms.service is not None),
        lead(limits, rate),
        bounds.speed,
        inf if limits.moves_per_epoch is None else limits.moves_per_epoch,
        round(limits.slack * memory.cluster.capacity) + memory.learned.demand.rise(limits),
        limits.foreseen is not None,
        bounds.queue_share,
        seen.pool.min_replicas,
        memory.learned.level_replicas.value,
        seen.opening > 0 or memory.learned.experience.awaits_start(now),
    )


def headroom(policy: Policy, limits: Limits, decode_rate: float, follows: bool = False) -> Tokens:
    """The growth to keep free for each request, in tokens.

    `decode_rate` is a request's growth in tokens per second. The larger headroom of policy and limits counts. If it
    `follows` from a service level, the default of a policy does not count: what a request grows by until a decision
    takes effect is kept free, and capacity for what nobody foresees is in the pool's reserve.
    """
    own_s = 0.0 if follows and not sets_headroom(policy) else policy.headroom_s
    return Tokens(ceil((limits.lead_s + max(own_s, limits.headroom_s)) * decode_rate))


def lead(limits: Limits, decode_rate: float) -> Tokens:
    """A request's growth until a decision takes effect, in tokens."""
    return Tokens(ceil(limits.lead_s * decode_rate))

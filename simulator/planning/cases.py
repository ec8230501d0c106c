"""The cases of a plan: configurations that serve the same requests.

    Mell            the level itself, and the level with both times scaled; a fixed reserve; the largest recent rise
    Ray Serve       its autoscaler, over targets, delays and limits of requests per replica
    KV utilisation  an autoscaler by vLLM's cache metric, over targets and delays
    worst fit, load balancing     Mell's scheduler under these policies, over fixed reserves

Two more cases have the level with starts or links of half the time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from policies.cost.service import ServiceLevel
from policies.decision.limits import Limits
from simulator.autoscaling.fleet import requests_per_replica
from simulator.autoscaling.rule import LoadMeasure, ScalingRule
from simulator.costs.costs import Costs, LinkCosts
from simulator.workload.workload import Job
from simulator.world.setup import Setup

LEVEL = "level"
"""The name of the case in which the reserve follows from the level."""

STEPS = (0.5, 0.7, 2.0)
"""Factors on both times of the level, for Mell's own frontier."""
SLACKS = (0.0, 0.25, 0.5, 1.0, 2.0)
"""Fixed reserves, as numbers of GPUs."""
FILLS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.85)
"""Targets of the autoscalers: ongoing requests as a share of those that fill a KV cache, or the KV utilisation."""


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of an autoscaler, and the period and interval of its metrics, in seconds."""

    name: str
    up_s: float
    down_s: float
    look_back_s: float
    push_s: float


DELAYS = (
    Delays("default delays", 30.0, 600.0, 30.0, 10.0),
    Delays("short delays", 2.0, 30.0, 10.0, 2.0),
    Delays("shortest delays", 0.0, 10.0, 2.0, 1.0),
)
"""Serve's defaults, and settings for traffic that changes within seconds."""
LIMITED = DELAYS[1]
"""The delays that are also tried with a limit of requests per replica."""


class Contender(StrEnum):
    """The parties of a comparison."""

    MELL = "mell"
    SERVE = "serve"
    KV = "kv"
    WORST_FIT = "worst_fit"
    LOAD_BALANCE = "load_balance"


TITLES = {
    Contender.MELL: "Mell",
    Contender.SERVE: "Ray Serve's autoscaler",
    Contender.KV: "autoscaler by KV utilisation",
    Contender.WORST_FIT: "worst fit",
    Contender.LOAD_BALANCE: "load balancing",
}
POLICIES = {Contender.WORST_FIT: "worst_fit", Contender.LOAD_BALANCE: "load_balance:drain=true"}


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A configuration. `rule` is a policy of Mell's scheduler, or an autoscaler's rule.

    `hypothetical` if GPUs or links are not the given ones.
    """

    name: str
    contender: Contender
    rule: str | ScalingRule
    setup: Setup
    costs: Costs
    hypothetical: bool = False

    @property
    def policy(self) -> str:
        """The rule's name."""
        return self.rule if isinstance(self.rule, str) else self.contender.value


def plan_cases(setup: Setup, costs: Costs, jobs: Sequence[Job]) -> list[PlanCase]:
    """All cases. `setup` has a service level; `jobs` are those of one seed, for the size of their requests."""
    return [*_mell(setup, costs), *_policies(setup, costs), *_autoscalers(setup, costs, jobs)]


def _mell(setup: Setup, costs: Costs) -> Iterator[PlanCase]:
    level = setup.service
    assert level is not None, "a plan has a level"
    mell = Contender.MELL
    yield PlanCase(LEVEL, mell, "pack", setup, costs)
    for factor in STEPS:
        yield PlanCase(f"level x {factor:g}", mell, "pack", replace(setup, service=_scaled(level, factor)), costs)
    rise = replace(setup.limits, foresight_s=costs.startup_s)
    yield PlanCase("largest rise", mell, "pack", _fixed(setup, costs, rise), costs)
    for slack in SLACKS:
        yield PlanCase(f"pack, slack {slack:g}", mell, "pack", _reserved(setup, costs, slack), costs)
    if costs.startup_s:
        faster = replace(costs, startup_s=costs.startup_s / 2)
        yield PlanCase("level, starts in half the time", mell, "pack", setup, faster, hypothetical=True)
    if costs.migration is not None:
        moving = replace(costs.migration, intra=_twice(costs.migration.intra), inter=_twice(costs.migration.inter))
        faster = replace(costs, migration=moving)
        yield PlanCase("level, links twice as fast", mell, "pack", setup, faster, hypothetical=True)


def _policies(setup: Setup, costs: Costs) -> Iterator[PlanCase]:
    for contender, policy in POLICIES.items():
        for slack in SLACKS:
            name = f"{contender}, slack {slack:g}"
            yield PlanCase(name, contender, policy, _reserved(setup, costs, slack), costs)


def _autoscalers(setup: Setup, costs: Costs, jobs: Sequence[Job]) -> Iterator[PlanCase]:
    full = requests_per_replica(jobs, setup.capacity)
    for delays in DELAYS:
        # Few requests fill a replica of a small cache: then several shares are the same target.
        for target in dict.fromkeys(max(1.0, round(fill * full)) for fill in FILLS):
            yield _serve(setup, costs, target, delays, None)
            if delays is LIMITED:
                yield _serve(setup, costs, target, delays, round(1.5 * target))
        for fill in FILLS[1:]:
            rule = _rule(LoadMeasure.KV, fill, delays)
            name = f"kv, target {fill:.0%}, {delays.name}"
            yield PlanCase(name, Contender.KV, rule, replace(setup, service=None), costs)


def _serve(setup: Setup, costs: Costs, target: float, delays: Delays, most: int | None) -> PlanCase:
    rule = replace(_rule(LoadMeasure.REQUESTS, target, delays), max_ongoing=most)
    limit = "" if most is None else f", at most {most}"
    name = f"serve, target {target:g}{limit}, {delays.name}"
    return PlanCase(name, Contender.SERVE, rule, replace(setup, service=None), costs)


def _rule(measure: LoadMeasure, target: float, delays: Delays) -> ScalingRule:
    return ScalingRule(measure, target, delays.up_s, delays.down_s, delays.look_back_s, delays.push_s)


def _reserved(setup: Setup, costs: Costs, slack: float) -> Setup:
    return _fixed(setup, costs, replace(setup.limits, slack=slack))


def _fixed(setup: Setup, costs: Costs, limits: Limits) -> Setup:
    """The set-up with a reserve that does not follow from the level."""
    return replace(setup, service=None, limits=replace(limits, linger_s=costs.startup_s))


def _scaled(level: ServiceLevel, factor: float) -> ServiceLevel:
    ttft_s, itl_s = (None if most is None else factor * most for most in (level.ttft_p99_s, level.itl_p99_s))
    return ServiceLevel(ttft_s, itl_s)


def _twice(link: LinkCosts) -> LinkCosts:
    return replace(link, bytes_per_s=2 * link.bytes_per_s, latency_s=link.latency_s / 2)

"""The cases of a plan: configurations that serve the same requests.

    Mell            the level itself, and the level with both times scaled; a fixed reserve; the largest recent rise
    Mell without moves, worst fit, load balancing with Mell's forecast
                    the level itself and scaled, under these placements
    worst fit, load balancing
                    Mell's scheduler under these policies, over fixed reserves
    Ray Serve, KV utilisation
                    autoscalers by ongoing requests and by vLLM's cache metric, each with both routers, over targets,
                    delays, and limits of requests per replica
    look-ahead      an autoscaler by KV utilisation that knows the load one start-up time ahead, over targets
    constant        constant numbers of replicas, with both routers

Two more cases have the level with starts or links of half the time. `sweep` chooses the delays and numbers that depend
on the results of other cases.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from policies.cost.service import ServiceLevel
from policies.decision.limits import Limits
from simulator.autoscaling.fleet import requests_per_replica
from simulator.autoscaling.rule import FleetRouter, LoadMeasure, ScalingRule
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


PUSHES_S = {2.0: 1.0, 10.0: 2.0, 30.0: 10.0}
"""Periods over which an autoscaler averages its metrics, and the intervals between their pushes, in seconds."""
UPS_S = (0.0, 2.0, 10.0, 30.0, 60.0)
DOWNS_S = (5.0, 10.0, 30.0, 120.0, 600.0)
"""Delays for opening and for closing replicas, in seconds."""


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of an autoscaler, and the period of its metrics, in seconds."""

    up_s: float
    down_s: float
    look_back_s: float

    @property
    def push_s(self) -> float:
        """The interval of the metrics."""
        return PUSHES_S[self.look_back_s]

    def __str__(self) -> str:
        return f"up {self.up_s:g} s, down {self.down_s:g} s, over {self.look_back_s:g} s"


DEFAULT = Delays(30.0, 600.0, 30.0)
"""Those of Ray Serve."""
SHORT = Delays(2.0, 30.0, 10.0)
"""Settings for traffic that changes within seconds."""
SHORTEST = Delays(0.0, 10.0, 2.0)
"""The delays with which an autoscaler looks ahead."""
ONE_BY_ONE = tuple(
    dict.fromkeys(
        [
            SHORT,
            *(replace(SHORT, up_s=up_s) for up_s in UPS_S),
            *(replace(SHORT, down_s=down_s) for down_s in DOWNS_S),
            *(replace(SHORT, look_back_s=look_back_s) for look_back_s in PUSHES_S),
        ]
    )
)
"""The short delays with every one of the three times changed by itself."""


class Contender(StrEnum):
    """The parties of a comparison."""

    MELL = "mell"
    PACK_UNMOVED = "pack_unmoved"
    SERVE = "serve"
    KV = "kv"
    LOOK_AHEAD = "look_ahead"
    CONSTANT = "constant"
    WORST_FIT = "worst_fit"
    WORST_FIT_LEVEL = "worst_fit_level"
    LOAD_BALANCE = "load_balance"
    LOAD_BALANCE_LEVEL = "load_balance_level"


TITLES = {
    Contender.MELL: "Mell",
    Contender.PACK_UNMOVED: "Mell without moves",
    Contender.SERVE: "Ray Serve's autoscaler",
    Contender.KV: "autoscaler by KV utilisation",
    Contender.LOOK_AHEAD: "autoscaler that looks ahead",
    Contender.CONSTANT: "constant number of replicas",
    Contender.WORST_FIT: "worst fit",
    Contender.WORST_FIT_LEVEL: "worst fit with Mell's forecast",
    Contender.LOAD_BALANCE: "load balancing",
    Contender.LOAD_BALANCE_LEVEL: "load balancing with Mell's forecast",
}
POLICIES = {
    Contender.PACK_UNMOVED: "pack",
    Contender.WORST_FIT: "worst_fit",
    Contender.WORST_FIT_LEVEL: "worst_fit",
    Contender.LOAD_BALANCE: "load_balance:drain=true",
    Contender.LOAD_BALANCE_LEVEL: "load_balance:drain=true",
}
RESERVED = (Contender.WORST_FIT, Contender.LOAD_BALANCE)
"""The contenders with fixed reserves; the others in `POLICIES` have Mell's."""
MEASURES = {Contender.SERVE: LoadMeasure.REQUESTS, Contender.KV: LoadMeasure.KV}
"""The autoscalers whose delays are swept."""
ROUTERS = {Contender.SERVE: FleetRouter.TWO_CHOICES, Contender.KV: FleetRouter.LEAST_KV}
"""Their usual routers."""


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
    """The cases that depend on no results, with the delays of autoscalers at the middle one of their targets.

    `setup` has a service level; `jobs` are those of one seed, for the size of their requests.
    """
    return [
        *_mell(setup, costs),
        *_policies(setup, costs),
        *(look_ahead_case(setup, costs, fill) for fill in FILLS[1:]),
        *(
            autoscaler_case(setup, costs, contender, targets[len(targets) // 2], delays, router)
            for contender, router in ROUTERS.items()
            for targets in [targets_of(contender, setup, jobs)]
            for delays in ONE_BY_ONE
        ),
    ]


def targeted_cases(
    setup: Setup, costs: Costs, jobs: Sequence[Job], chosen: Mapping[Contender, Sequence[Delays]]
) -> Iterator[PlanCase]:
    """All targets of the autoscalers, at chosen delays and Serve's defaults.

    The first of the chosen delays are also those of the other router, and of limits of requests per replica.
    """
    for contender, router in ROUTERS.items():
        for target in targets_of(contender, setup, jobs):
            for delays in dict.fromkeys([*chosen[contender], DEFAULT]):
                yield autoscaler_case(setup, costs, contender, target, delays, router)
            first = chosen[contender][0]
            for other in FleetRouter:
                if other is not router:
                    yield autoscaler_case(setup, costs, contender, target, first, other)
            if contender is Contender.SERVE:
                yield autoscaler_case(setup, costs, contender, target, first, router, round(1.5 * target))


def constant_cases(setup: Setup, costs: Costs, numbers: Iterable[int]) -> Iterator[PlanCase]:
    """Constant numbers of replicas, with both routers."""
    for number in numbers:
        fixed = replace(setup, service=None, min_replicas=number, max_gpus=number)
        for router in FleetRouter:
            name = f"{Contender.CONSTANT}, N = {number}, {router}"
            yield PlanCase(name, Contender.CONSTANT, ScalingRule(router=router), fixed, costs)


def targets_of(
    contender: Contender, setup: Setup, jobs: Sequence[Job], fills: Sequence[float] | None = None
) -> list[float]:
    """The targets of an autoscaler, in ascending order, by the shares in `fills`; None: those of a plan."""
    if MEASURES[contender] is LoadMeasure.KV:
        return list(FILLS[1:] if fills is None else fills)
    full = requests_per_replica(jobs, setup.capacity)
    # Few requests fill a replica of a small cache: then several shares are the same target.
    return list(dict.fromkeys(max(1.0, round(fill * full)) for fill in fills or FILLS))


def _mell(setup: Setup, costs: Costs) -> Iterator[PlanCase]:
    mell = Contender.MELL
    yield PlanCase(LEVEL, mell, "pack", setup, costs)
    for factor in STEPS:
        yield PlanCase(f"level x {factor:g}", mell, "pack", _scaled(setup, factor), costs)
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
    unmoved = replace(setup, limits=replace(setup.limits, moves_per_epoch=0))
    for contender, policy in POLICIES.items():
        if contender in RESERVED:
            for slack in SLACKS:
                name = f"{contender}, slack {slack:g}"
                yield PlanCase(name, contender, policy, _reserved(setup, costs, slack), costs)
        else:
            own = unmoved if contender is Contender.PACK_UNMOVED else setup
            yield PlanCase(f"{contender}, level", contender, policy, own, costs)
            for factor in STEPS:
                yield PlanCase(f"{contender}, level x {factor:g}", contender, policy, _scaled(own, factor), costs)


def look_ahead_case(setup: Setup, costs: Costs, fill: float) -> PlanCase:
    """An autoscaler that knows the load one start-up time ahead, with a KV utilisation as its target."""
    rule = replace(_rule(LoadMeasure.KV, fill, SHORTEST, FleetRouter.LEAST_KV), looks_ahead=True)
    name = f"{Contender.LOOK_AHEAD}, target {fill:.0%}"
    return PlanCase(name, Contender.LOOK_AHEAD, rule, replace(setup, service=None), costs)


def autoscaler_case(
    setup: Setup,
    costs: Costs,
    contender: Contender,
    target: float,
    delays: Delays,
    router: FleetRouter,
    most: int | None = None,
) -> PlanCase:
    """An autoscaler with a target and delays, at most `most` requests per replica (None: no limit)."""
    measure = MEASURES[contender]
    rule = replace(_rule(measure, target, delays, router), max_ongoing=most)
    amount = f"{target:.0%}" if measure is LoadMeasure.KV else f"{target:g}"
    limit = "" if most is None else f", at most {most}"
    name = f"{contender}, target {amount}{limit}, {router}, {delays}"
    return PlanCase(name, contender, rule, replace(setup, service=None), costs)


def _rule(measure: LoadMeasure, target: float, delays: Delays, router: FleetRouter) -> ScalingRule:
    return ScalingRule(measure, target, delays.up_s, delays.down_s, delays.look_back_s, delays.push_s, router=router)


def _reserved(setup: Setup, costs: Costs, slack: float) -> Setup:
    return _fixed(setup, costs, replace(setup.limits, slack=slack))


def _fixed(setup: Setup, costs: Costs, limits: Limits) -> Setup:
    """The set-up with a reserve that does not follow from the level."""
    return replace(setup, service=None, limits=replace(limits, linger_s=costs.startup_s))


def _scaled(setup: Setup, factor: float) -> Setup:
    """The set-up with both times of the level times the factor."""
    level = setup.service
    assert level is not None, "a plan has a level"
    ttft_s, itl_s = (None if most is None else factor * most for most in (level.ttft_p99_s, level.itl_p99_s))
    return replace(setup, service=ServiceLevel(ttft_s, itl_s))


def _twice(link: LinkCosts) -> LinkCosts:
    return replace(link, bytes_per_s=2 * link.bytes_per_s, latency_s=link.latency_s / 2)

"""Several pools under one decision: what each decides is what a scheduler of its own would decide."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.cluster.changes import Arrival
from policies.cost.service import ServiceLevel
from policies.decision import slices
from policies.decision.deciding import SchedulerMemory, decide, decide_in_slices, place
from policies.decision.limits import LiveLimits, Mode, Terms
from policies.decision.observation import Observation, PoolReport
from policies.model import PoolId, RequestId, Tokens
from policies.rules.registry import POLICIES
from tests.policies.decision.observed import Drawn, Watcher
from tests.policies.decision.test_reports import histories

POOLS = (PoolId("first"), PoolId("second"))


@pytest.fixture(autouse=True, scope="module")
def short_slices() -> Iterator[None]:
    """Slices of two requests."""
    patch = pytest.MonkeyPatch()
    patch.setattr(slices, "SLICE", 2)
    yield
    patch.undo()


class Scheduler:
    """The memory of a scheduler of some pools."""

    def __init__(self, terms: Terms) -> None:
        self.memory = SchedulerMemory(terms)
        self.watchers = {pool: Watcher(self.memory.pool(pool)) for pool in POOLS}

    def report(self, pool: PoolId, drawn: Drawn) -> PoolReport:
        """What is new in the cluster of that pool."""
        report = self.watchers[pool].report(drawn)
        return replace(report, pool=replace(report.pool, deployment=pool))


def arrival(dice: random.Random, names: Iterator[int], drawn: Drawn) -> Arrival:
    """A new request, or one that is in the cluster already."""
    present = [request.id for load in drawn.loads for request in load.requests]
    return Arrival(dice.choice([RequestId(f"new{next(names)}"), *present]), Tokens(dice.randrange(1, 60)))


HISTORIES = st.tuples(histories(), histories())
FEW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@FEW
@given(st.sampled_from(sorted(POLICIES)), st.sampled_from(Mode), HISTORIES, st.integers(0, 1 << 32))
def test_two_pools_decide_as_two_schedulers_do(
    name: str, mode: Mode, both: tuple[list[Drawn], list[Drawn]], seed: int
) -> None:
    """Requests and replicas of one id in two pools are two."""
    terms = Terms(name, LiveLimits(linger_s=0.0, foresight_s=0.0), mode=mode)
    dice, names = random.Random(seed), itertools.count()
    together, alone = Scheduler(terms), {pool: Scheduler(terms) for pool in POOLS}
    for drawn in zip(*both, strict=False):
        seen = {pool: together.report(pool, each) for pool, each in zip(POOLS, drawn, strict=True)}
        now = drawn[0].now
        plans = decide(together.memory, Observation(now, tuple(seen.values())))
        for pool, report in seen.items():
            assert decide(alone[pool].memory, Observation(now, (report,))) == {pool: plans[pool]}
        for _ in range(dice.randrange(4)):
            number = dice.randrange(2)
            pool, new = POOLS[number], arrival(dice, names, drawn[number])
            placed = place(together.memory.pool(pool), new, now + 0.1)
            assert placed == place(alone[pool].memory.pool(pool), new, now + 0.1)


@pytest.mark.slow
@FEW
@given(st.sampled_from(sorted(POLICIES)), HISTORIES, st.integers(0, 1 << 32))
def test_arrivals_are_placed_on_any_pool_while_another_is_observed_or_decides(
    name: str, both: tuple[list[Drawn], list[Drawn]], seed: int
) -> None:
    dice, names = random.Random(seed), itertools.count()
    made = Scheduler(Terms(name, LiveLimits(linger_s=0.0, foresight_s=0.0)))
    for drawn in zip(*both, strict=False):
        now = drawn[0].now
        seen = tuple(made.report(pool, each) for pool, each in zip(POOLS, drawn, strict=True))
        for _ in decide_in_slices(made.memory, Observation(now, seen)):
            number = dice.randrange(2)
            pool = made.memory.pool(POOLS[number])
            place(pool, arrival(dice, names, drawn[number]), now)
            pool.cluster.check_integrity()
        for pool_id in POOLS:
            made.memory.pool(pool_id).cluster.check_integrity()


@FEW
@given(st.sampled_from(sorted(POLICIES)), HISTORIES)
def test_pools_with_terms_of_their_own_decide_by_them(name: str, both: tuple[list[Drawn], list[Drawn]]) -> None:
    """The mode is common: that of a pool's own terms has no effect."""
    common = Terms(name, LiveLimits(linger_s=0.0, foresight_s=0.0), mode=Mode.ACT)
    own = {
        POOLS[0]: replace(common, service=ServiceLevel(None, 0.5), mode=Mode.OFF),
        POOLS[1]: replace(common, moves_at_once=1),
    }
    together = Scheduler(replace(common, pools=own))
    alone = {pool: Scheduler(replace(terms, mode=Mode.ACT)) for pool, terms in own.items()}
    for drawn in zip(*both, strict=False):
        seen = {pool: together.report(pool, each) for pool, each in zip(POOLS, drawn, strict=True)}
        plans = decide(together.memory, Observation(drawn[0].now, tuple(seen.values())))
        for pool, report in seen.items():
            assert decide(alone[pool].memory, Observation(drawn[0].now, (report,))) == {pool: plans[pool]}

"""Arrivals that are placed while an epoch is decided: nothing is lost, and the same history gives the same plans."""

import random
from collections.abc import Generator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.changes import Arrival
from policies.decision import slices
from policies.decision.deciding import Plans, SchedulerMemory, decide_in_slices, place
from policies.decision.limits import LiveLimits, Terms
from policies.decision.observation import Observation
from policies.decision.placement import Decision, Place, Queue
from policies.decision.slices import finish
from policies.model import SOLE_POOL, ReplicaState, RequestId, Tokens
from policies.rules.registry import POLICIES
from tests.policies.decision.observed import Drawn, Watcher
from tests.policies.decision.test_reports import histories


@pytest.fixture(autouse=True, scope="module")
def short_slices() -> Iterator[None]:
    """Slices of two requests."""
    patch = pytest.MonkeyPatch()
    patch.setattr(slices, "SLICE", 2)
    yield
    patch.undo()


class Deciding:
    """A memory whose epochs are decided in slices, with arrivals at the pauses that `at_pauses` chooses."""

    def __init__(self, name: str) -> None:
        self.memory = SchedulerMemory(Terms(name, LiveLimits(linger_s=0.0, foresight_s=0.0)))
        self.watcher = Watcher(self.memory.pool(SOLE_POOL))
        self.pauses = 0

    def slices(self, drawn: Drawn) -> Generator[None, None, Plans]:
        """The decision on that cluster."""
        return decide_in_slices(self.memory, Observation(drawn.now, (self.watcher.report(drawn),)))

    def place(self, request: RequestId, tokens: int, now: float) -> Decision:
        """Place a request."""
        pool = self.memory.pool(SOLE_POOL)
        decision = place(pool, Arrival(request, Tokens(tokens)), now)
        pool.cluster.check_integrity()
        if isinstance(decision, Place | Queue):
            replica = pool.cluster.requests[request].replica
            assert replica is not None and replica.id == decision.replica
            assert pool.locations.statuses[replica.id].state is ReplicaState.RUNNING
        return decision


@given(st.sampled_from(sorted(POLICIES)), histories(), st.integers(0, 1 << 32))
def test_at_every_pause_requests_can_be_placed_or_placed_anew_and_a_replay_with_the_same_pauses_decides_alike(
    name: str, history: list[Drawn], seed: int
) -> None:
    dice, numbers = random.Random(seed), iter(range(1000))
    live, again = Deciding(name), Deciding(name)
    for drawn in history:
        slices, done, entries = live.slices(drawn), 0, []
        while True:
            for number in [next(numbers) for _ in range(dice.choice([0, 0, 1, 2]))]:
                new, present = RequestId(f"new{number}"), [q.id for load in drawn.loads for q in load.requests]
                call = dice.choice([new, *present]), dice.randrange(1, 60), float(number)
                entries.append((done, call, live.place(*call)))
            try:
                next(slices)
            except StopIteration as end:
                plans = end.value
                break
            done += 1
        live.memory.pool(SOLE_POOL).cluster.check_integrity()
        replayed, passed = again.slices(drawn), 0
        for at, call, decision in entries:
            while passed < at:
                next(replayed)
                passed += 1
            assert again.place(*call) == decision
        assert finish(replayed) == plans
        moved = {move.request for plan in plans[SOLE_POOL] for move in plan.moves}
        assert moved.isdisjoint(request for at, (request, _, _), _ in entries if at == done), (
            "the placement replaces the move"
        )

"""After an epoch that failed, decisions rest on a snapshot of the replicas, whatever the epoch had done before."""

import copy
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.decision.deciding import decide_pool
from policies.decision.limits import LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport
from policies.decision.reports import Report, Reporter
from policies.model import SOLE_POOL, ReplicaId, ReplicaLoad, RequestId, Role
from policies.paths.prices import Profile
from policies.plan import Action, Move, MoveReport, Path
from policies.prefix.change import CacheChange, Tier
from policies.prefix.tree import HeldPrefix
from policies.rules.registry import POLICIES
from tests.counts import scaled
from tests.policies.decision.observed import Drawn, Watcher, observed
from tests.policies.decision.test_deciding import watcher
from tests.policies.decision.test_reports import Wire, histories
from tests.policies.settings import unhurried

A, B = ReplicaId("a"), ReplicaId("b")


class Injected(Exception):
    """Raised in the midst of a decision."""


@contextmanager
def failing_at(call: int) -> Iterator[None]:
    """Raise `Injected` at that call of a function of the policies, counted from 0.

    Generators are no such functions: Python may call one only to close it, where it drops exceptions.
    """
    left = [call]

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        ours = "/policies/" in code.co_filename and "/tests/" not in code.co_filename
        if ours and not code.co_flags & inspect.CO_GENERATOR:
            left[0] -= 1
            if left[0] == -1:
                raise Injected

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def rebuilt(memory: PoolMemory) -> PoolMemory:
    """A memory that has learned the same, and does not know where anything is."""
    return PoolMemory(memory.terms, learned=copy.deepcopy(memory.learned))


def where(memory: PoolMemory) -> dict[str, Any]:
    """Where everything is, whatever came first."""
    places, cluster = memory.locations, memory.cluster
    return {
        "statuses": places.statuses,
        "replicas": {
            r.id: (r.state, r.load, r.held, r.queued, r.backlog, r.role, r.apart, set(r.requests))
            for r in cluster.replicas.values()
        },
        "free": {r.id: (r.free, r.shared) for r in cluster.running()},
        "requests": {
            q.id: (q.tokens, q.pinned, q.replica and q.replica.id, q.source and q.source.id)
            for q in cluster.requests.values()
        },
        "waiting": set(cluster.waiting),
        "homes": places.homes,
        "leaving": places.leaving,
        "placed": places.placed,
        "decoding": places.decoding,
        "unsettled": places._unsettled,
        "absent": places._absent,
        "supply": cluster.supply.left,
        "under_way": {q: (moving.move.source, moving.move.target) for q, moving in places.under_way.items()},
    }


def in_order(memory: PoolMemory) -> list[str]:
    """The replicas and the requests in the order in which they came, by which decisions between equals are made."""
    cluster = memory.cluster
    return [*cluster.replicas, *sorted(cluster.requests, key=lambda q: cluster.requests[q].order)]


many = settings(unhurried, max_examples=scaled(2000))
"""Thousands of short histories in a long run."""

modes = st.sampled_from([Mode.ACT, Mode.OBSERVE])
names = st.sampled_from(sorted(POLICIES))


@pytest.mark.slow
@many
@given(names, modes, histories(), st.integers(0, 1 << 32), st.integers(0, 1500), st.integers(1, 4))
def test_after_epochs_that_fail_anywhere_decisions_are_those_of_a_memory_that_is_rebuilt(
    name: str, mode: Mode, history: list[Drawn], seed: int, call: int, every: int
) -> None:
    wire = Wire(True, Random(seed))
    memory = PoolMemory(Terms(name, LiveLimits(linger_s=0.0, foresight_s=0.0), mode=mode))
    other: PoolMemory | None = None
    for number, drawn in enumerate(history):
        seen = wire.observe(drawn)
        if seen.whole:
            lost = tuple(sorted(memory.locations.statuses.keys() - {status.id for status in seen.replicas}))
            other, known = rebuilt(memory), replace(seen, whole=False, lost=lost)
        else:
            known = seen
        try:
            with failing_at(call if number % every == every - 1 else 1 << 40):
                plans = decide_pool(memory, seen, drawn.now)
        except Injected:
            wire.roster.restart()
            other = None
            continue
        if other is not None:
            assert plans == decide_pool(other, known, drawn.now)
            assert (where(memory), in_order(memory)) == (where(other), in_order(other))
            assert memory.cluster.conditions == other.cluster.conditions
            memory.cluster.check_integrity()


@pytest.mark.slow
@many
@given(names, modes, histories(), st.integers(0, 1 << 32))
def test_locations_that_follow_changes_are_those_of_a_snapshot(
    name: str, mode: Mode, history: list[Drawn], seed: int
) -> None:
    """And so are the decisions. Two things matter to both that are in no snapshot: what came first of equals, and what
    an engine counted otherwise than its requests (`shared`) in the observation before.
    """
    wire, snapshots = Wire(True, Random(seed)), Wire(False, Random(seed))
    memory = PoolMemory(Terms(name, LiveLimits(linger_s=0.0, foresight_s=0.0, lead_s=0.0), mode=mode, decode_rate=1.0))
    for drawn in history:
        follower, other = copy.deepcopy(memory), copy.deepcopy(memory)
        moves = moves_of(memory, drawn)
        snapshots.roster.restart()
        seen = replace(wire.observe(drawn), moves=moves)
        follower.observe(seen, drawn.now)
        other.observe(replace(snapshots.observe(drawn), moves=moves), drawn.now)
        for part in "statuses", "decoding", "placed", "under_way":
            assert where(follower)[part] == where(other)[part]
        is_explained = not any(replica.shared for replica in memory.cluster.replicas.values())
        if is_explained and in_order(follower) == in_order(other):
            assert where(follower) == where(other)
            nothing = PoolReport(seen.pool, moves=moves)
            assert actions(follower, nothing, drawn.now) == actions(other, nothing, drawn.now)
        decide_pool(memory, seen, drawn.now)


def actions(memory: PoolMemory, seen: PoolReport, now: float) -> list[Action]:
    """The decided actions, without the numbers of the moves' units, which count on."""
    (plan,) = decide_pool(memory, seen, now)
    return [replace(each, unit=0) if isinstance(each, Move) else each for each in plan.actions]


def moves_of(memory: PoolMemory, drawn: Drawn) -> tuple[MoveReport, ...]:
    """A report of every expected move whose source is still there: the move is under way."""
    there = {load.id for load in drawn.loads}
    moves = (each.move for each in memory.locations.under_way.values())
    return tuple(
        MoveReport(
            move.request,
            move.source,
            move.target,
            path=move.path or Path.TOKENS,
            tokens=move.tokens,
            reason=move.reason,
        )
        for move in moves
        if move.source in there
    )


def test_a_replica_that_came_in_a_failed_epoch_is_used_and_closed() -> None:
    made = watcher(linger_s=0.0)
    made.decide(observed("a: p60 q30 | b: r80"))
    with pytest.raises(Injected), failing_at(100):
        made.decide(observed("a: p60 q20 | b: s75 | c:", 1.0))
    assert made.decide(observed("a: p60 q20 | b: s75 | c:", 2.0)).closed == ("c",)


@pytest.mark.parametrize("call", range(0, 900, 50))
def test_wherever_an_epoch_fails_prefill_replicas_take_arrivals_in_the_next(call: int) -> None:
    made = Watcher(PoolMemory(Terms("best_fit")))
    made.memory.learned.roles_by_hand.update({A: Role.PREFILL, B: Role.DECODE})
    profile = Profile("n", "c", 1.0)
    for replica in A, B:
        made.memory.learned.estimates.profile(replica, profile)
    made.decide(observed("a: p10 | b: q10"))
    try:
        with failing_at(call):
            made.decide(observed("a: p11 | b: q11", 1.0))
    except Injected:
        made.decide(observed("a: p12 | b: q12", 2.0))
    assert [(r.id, r.role, r.apart) for r in made.memory.cluster.running()] == [
        ("a", Role.PREFILL, False),
        ("b", Role.DECODE, False),
    ]


def test_what_was_learned_stays_and_replicas_that_are_gone_are_forgotten() -> None:
    made = watcher()
    profile = Profile("n", "c", 1.0)
    for replica in A, B:
        made.memory.learned.estimates.profile(replica, profile)
        for pair in (A, replica), (replica, A):
            made.memory.learned.breaker.failed(pair, 0.0)
    made.memory.learned.experience.observe_move(3.0)
    made.decide(observed("a: p60 | b: r80"))
    made.roster.restart()
    made.decide(observed("a: p60", 1.0))
    assert not made.memory.learned.estimates.exchange_kv(A, B) and made.memory.learned.estimates.exchange_kv(A, A)
    assert list(made.memory.learned.breaker._records) == [(A, A)]
    assert made.memory.learned.experience.lead_s > 3.0


def test_prompts_of_requests_that_are_gone_are_forgotten() -> None:
    made = watcher()
    made.decide(observed("a: p60 q30"))
    for request in "p", "q":
        made.memory.router.take_names(RequestId(request), [1, 2])
    made.roster.restart()
    made.decide(observed("a: p60", 1.0))
    assert list(made.memory.router._prompts) == ["p"]


def test_a_restarted_roster_asks_for_snapshots_and_takes_what_is_under_way_without_its_cache() -> None:
    (load,) = observed("a: p10").loads
    cache = CacheChange({Tier.HBM: (1, 2)}, {}, whole=True)
    profile = Profile("n", "c", 1.0)
    made = Watcher(PoolMemory(Terms()))
    roster, reporter = made.roster, Reported(profile)
    roster.take(reporter.report(load, roster.version(A), cache))
    first = roster.observe(Pool(SOLE_POOL))
    assert (first.whole, first.profiles, first.caches) == (False, {A: profile}, {A: cache})
    version = roster.version(A)
    roster.restart()
    assert roster.version(A) is None
    late = CacheChange({Tier.HBM: (3,)}, {}, whole=False)
    roster.take(reporter.report(load, version, late))
    second = roster.observe(Pool(SOLE_POOL))
    assert second.whole and [q.load.id for q in second.requests] == ["p"] and not second.caches
    roster.take(reporter.report(load, roster.version(A), cache))
    third = roster.observe(Pool(SOLE_POOL))
    assert (third.whole, third.profiles, third.caches, third.requests) == (False, {A: profile}, {A: cache}, ())
    assert roster.version(A) is not None


class Reported:
    """A replica's reporter, with the change of its cache at hand."""

    def __init__(self, profile: Profile) -> None:
        self._reporter = Reporter(profile)

    def report(self, load: ReplicaLoad, version: int | None, cache: CacheChange) -> Report:
        return self._reporter.report(load, version, cache=lambda whole: cache)


def test_the_tree_of_a_restarted_memory_has_what_the_snapshots_have() -> None:
    made = watcher()
    made.decide(observed("a: p10"))
    stale = CacheChange({Tier.HBM: (1, 2)}, {}, whole=True)
    made.memory.observe(replace(made.report(observed("a: p10")), caches={A: stale}), 1.0)
    made.roster.restart()
    fresh = CacheChange({Tier.HBM: (1,)}, {}, whole=True)
    made.memory.observe(replace(made.report(observed("a: p10")), caches={A: fresh}), 2.0)
    assert made.memory.router.tree.match([1, 2]) == {A: HeldPrefix(1)}


def test_a_roster_that_was_left_torn_is_whole_after_a_restart() -> None:
    made = Watcher(PoolMemory(Terms()))
    made.report(observed("a: p10 | b: q10"))
    made.roster._locations.clear()
    made.roster.restart()
    report = made.report(observed("a: p10 | b: q10"))
    assert [(q.replica, q.load.id) for q in report.requests] == [("a", "p"), ("b", "q")]

"""The work of decisions, in instructions of Python: features that are off, and other replicas, cost nothing."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from policies.cluster.changes import Arrival
from policies.decision import slices
from policies.decision.deciding import SchedulerMemory, decide_in_slices, decide_pool, place
from policies.decision.limits import Limits, LiveLimits, Sizes, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Observation, Pool, PoolReport
from policies.decision.reports import Report, Roster, status_of
from policies.model import (
    SOLE_POOL,
    Blocks,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)

CAPACITY = Tokens(1024)
BLOCK = 16


def terms(sizes: Sizes = Sizes.BLIND) -> Terms:
    return Terms(limits=LiveLimits(Limits(), linger_s=1e9, foresight_s=0.0), sizes=sizes, placement_ttl_s=1e9)


def report(roster: Roster, replicas: int, version: int = 1) -> PoolReport:
    """Replicas with two requests each, which grow from version to version."""
    for number in range(replicas):
        sizes = (100 + number % 7 + 5 * version, 50 + number % 3 + 5 * version)
        requests = tuple(
            RequestLoad(RequestId(f"q{number}-{at}"), "", Tokens(size), Phase.DECODE, float(number), 0)
            for at, size in enumerate(sizes)
        )
        free = Blocks((CAPACITY - sum(sizes)) // BLOCK)
        replica = ReplicaId(f"r{number:04}")
        load = ReplicaLoad(replica, ReplicaState.RUNNING, replica[:-1], CAPACITY, BLOCK, free, 64, requests, "m")
        roster.take(Report(version, status_of(load), None, load.requests))
    return roster.observe(Pool(SOLE_POOL, min_replicas=replicas, max_replicas=replicas))


def instructions(call: Callable[[], object]) -> int:
    """The number of instructions that a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("sizes", Sizes)
def test_a_placement_takes_the_same_work_among_ten_times_as_many_replicas(sizes: Sizes) -> None:
    work = []
    for replicas in (20, 200):
        memory = PoolMemory(terms(sizes))
        decide_pool(memory, report(Roster(), replicas), 0.0)
        place(memory, Arrival(RequestId("first"), Tokens(30)), 0.1)
        arrival = Arrival(RequestId("second"), Tokens(30), (1,))
        work.append(instructions(partial(place, memory, arrival, 0.2)))
    assert work[1] < 1.2 * work[0], work


def test_marginal_sizes_take_little_more_work_per_epoch_where_no_prompt_has_names() -> None:
    work = []
    for sizes in (Sizes.BLIND, Sizes.MARGINAL):
        memory, roster = PoolMemory(terms(sizes)), Roster()
        decide_pool(memory, report(roster, 50), 0.0)
        seen = report(roster, 50, version=2)
        work.append(instructions(partial(decide_pool, memory, seen, 1.0)))
    assert work[1] < 1.25 * work[0], work


def test_a_decision_pauses_between_a_few_changes_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", 8 * slices.WEIGHT)
    memory, roster = SchedulerMemory(terms()), Roster()
    came = sum(1 for _ in decide_in_slices(memory, Observation(0.0, (report(roster, 100),))))
    assert came >= 100 // 8 + 2 * (200 // 8), "100 replicas have reported; 200 requests are new, and have a place"
    for replica in tuple(roster.statuses):
        roster.forget(replica)
    gone = roster.observe(Pool(SOLE_POOL, min_replicas=1, max_replicas=100))
    assert sum(1 for _ in decide_in_slices(memory, Observation(1.0, (gone,)))) >= 200 // 8

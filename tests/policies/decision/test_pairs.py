"""The decision on pairs in a pool: what is learned from reports, what is tried again, and what is left alone."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from policies.cluster.cluster import Cluster
from policies.cost.fit import NO_STEPS
from policies.cost.hops import FIRST_EXCHANGE, NO_HOPS, HopTotals
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import PrefillChunk, StepCosts
from policies.decision.deciding import SchedulerMemory, decide, decide_pool
from policies.decision.limits import Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import (
    Device,
    DeviceSeat,
    Observation,
    PairMember,
    PairPhase,
    Pool,
    PoolReport,
    Resident,
    Status,
)
from policies.decision.pairs import ANSWER_S, REST_S, PairingMemory, PairingView, decide_pairs, member_loads
from policies.memory.pairing import MemberLoad, PairingTerms
from policies.memory.plan import ModelMemory
from policies.model import (
    SOLE_POOL,
    Blocks,
    Bytes,
    Phase,
    ReplicaId,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)
from policies.plan import Pair, Pairs, Reason, Unpair

A, B = ReplicaId("a"), ReplicaId("b")
SPEED = ReplicaSpeed(StepCosts(((1, 0.02),), context_s=1e-5), 0.0, 1000)
TERMS = PairingTerms(restore_after_s=2.0)
APART = (PairMember(A, Tokens(1000), Tokens(250)), PairMember(B, Tokens(1000), Tokens(250)))
FORMS: Pairs = (Pair(A, B, Tokens(500)),)


def both(phase: PairPhase, by_hand: bool = False, hops: HopTotals = NO_HOPS) -> Sequence[PairMember]:
    return [
        replace(each, phase=phase, buddy=other, by_hand=by_hand, hops=hops)
        for each, other in zip(APART, (B, A), strict=True)
    ]


class Decided:
    """A pool of two replicas on a node."""

    def __init__(self) -> None:
        self.memory, self.cluster = PairingMemory(), Cluster(Tokens(1000))

    def epoch(
        self,
        now: float,
        members: Sequence[PairMember] = APART,
        used: float = 900,
        waiting: int = 200,
        acts: bool = True,
    ) -> Pairs:
        self.memory.follow(members, now)
        loads = [
            MemberLoad(
                each.replica,
                "n",
                each.whole,
                used,
                waiting,
                min(waiting, 100),
                waiting,
                9,
                used,
                free_to_pair=self.memory.may_form(each, now),
            )
            for each in members
        ]
        pairs = decide_pairs(self.memory, self.cluster, PairingView(members, loads, SPEED, inf), TERMS, acts, now)
        return tuple(replace(each, paired_s=None) if isinstance(each, Pair) else each for each in pairs)


def test_a_pair_is_ordered_once_and_its_exchange_is_learned() -> None:
    pool = Decided()
    assert pool.epoch(1.0) == FORMS
    assert pool.epoch(2.0) == ()
    assert pool.epoch(3.0, both(PairPhase.FORMING)) == ()
    before = pool.memory.costs.exchange(8.0).seconds(900)
    assert pool.epoch(8.0, both(PairPhase.PAIRED)) == ()
    assert before == FIRST_EXCHANGE.seconds(900)
    assert pool.memory.costs.exchange(8.0).seconds(900) == pytest.approx(7.0, rel=0.05), "from the order on"


def test_it_ends_once_demand_fits_and_another_may_form_at_once() -> None:
    pool = Decided()
    pool.epoch(1.0)
    assert pool.epoch(2.0, both(PairPhase.PAIRED)) == ()
    assert pool.epoch(3.0, both(PairPhase.PAIRED), 300, 0) == ()
    assert pool.epoch(5.0, both(PairPhase.PAIRED), 300, 0) == (Unpair(A, B),)
    assert pool.epoch(6.0, both(PairPhase.PAIRED), 300, 0) == (), "the order is under way"
    assert pool.epoch(7.0, both(PairPhase.UNDOING), 300, 0) == ()
    assert pool.epoch(8.0) == FORMS


def test_an_end_that_no_report_shows_is_ordered_again() -> None:
    pool = Decided()
    pool.epoch(1.0)
    ordered = [now for now in range(2, 30) if pool.epoch(float(now), both(PairPhase.PAIRED), 300, 0)]
    again_s = ANSWER_S + TERMS.restore_after_s
    assert ordered == [4, 4 + again_s, 4 + 2 * again_s]


@pytest.mark.parametrize(
    "reports",
    [
        {2.0: both(PairPhase.FORMING), 3.0: APART},  # given up on the way
        {2.0: both(PairPhase.PAIRED), 3.0: APART},  # a replica was lost, or an operator has undone it
        {2.0: (both(PairPhase.FORMING)[0], APART[1]), 3.0: APART},
    ],
)
def test_two_replicas_rest_that_fail_to_pair_or_lose_their_pair(reports: dict[float, Sequence[PairMember]]) -> None:
    pool = Decided()
    pool.epoch(1.0)
    for now, members in reports.items():
        assert pool.epoch(now, members) == ()
    failed_at = max(reports)
    assert pool.epoch(failed_at + REST_S - 1) == ()
    assert pool.epoch(failed_at + REST_S) == FORMS


def test_an_order_that_no_report_shows_is_given_again() -> None:
    pool = Decided()
    ordered = [now for now in range(30) if pool.epoch(float(now))]
    assert ordered == [0, ANSWER_S, 2 * ANSWER_S], "a replica that resizes refuses for a moment"


def test_two_replicas_rest_whose_pair_an_operator_has_undone() -> None:
    pool = Decided()
    assert pool.epoch(1.0, both(PairPhase.PAIRED, by_hand=True)) == ()
    assert pool.epoch(2.0, both(PairPhase.UNDOING, by_hand=True)) == ()
    assert pool.epoch(REST_S) == ()
    assert pool.epoch(2.0 + REST_S) == FORMS


def test_a_pair_of_the_policy_that_an_operator_takes_over_stays() -> None:
    pool = Decided()
    pool.epoch(1.0)
    pool.epoch(2.0, both(PairPhase.PAIRED))
    taken = [both(PairPhase.PAIRED, by_hand=True)[0], both(PairPhase.PAIRED)[1]]
    assert [pool.epoch(float(now), taken, 300, 0) for now in range(3, 9)] == [()] * 6


def test_a_time_without_decisions_is_not_one_in_which_demand_has_fitted() -> None:
    pool = Decided()
    pool.epoch(1.0)
    assert pool.epoch(2.0, both(PairPhase.PAIRED), 300, 0) == ()
    pool.memory.rest()
    assert pool.epoch(100.0, both(PairPhase.PAIRED), 300, 0) == ()
    assert pool.epoch(102.0, both(PairPhase.PAIRED), 300, 0) == (Unpair(A, B),)


def test_a_pair_by_hand_stays_and_one_of_an_earlier_scheduler_ends() -> None:
    for by_hand, found in ((True, ()), (False, (Unpair(A, B),))):
        pool = Decided()
        for now in (1.0, 2.0, 3.0):
            pairs = pool.epoch(now, both(PairPhase.PAIRED, by_hand), 300, 0)
        assert pairs == found


def test_what_is_only_proposed_changes_nothing() -> None:
    pool = Decided()
    assert [pool.epoch(float(now), acts=False) for now in range(3)] == [FORMS] * 3
    assert pool.epoch(3.0) == FORMS


def test_hops_are_learned_from_the_second_report_of_a_pair_on() -> None:
    pool = Decided()
    pool.epoch(0.0, both(PairPhase.PAIRED, hops=HopTotals(1000, 100_000, 900.0)))
    start = pool.memory.costs.hop(0.0)
    for number in range(1, 6):
        hops = HopTotals(1000 + 100 * number, 100_000 + 1000 * number, 900.0 + 0.5 * number)
        pool.epoch(float(number), both(PairPhase.PAIRED, hops=hops))
    assert pool.memory.costs.hop(5.0).seconds(10) == pytest.approx(0.0025, rel=0.05) != start.seconds(10)


# --- in the decision of a pool --------------------------------------------------------------------------


def request(name: str, tokens: int, phase: Phase = Phase.DECODE) -> RequestLoad:
    return RequestLoad(RequestId(name), name, Tokens(tokens), phase, 1.0, 0)


def report(members: Sequence[PairMember] = APART, waiting: int = 3, most: int = 2) -> PoolReport:
    """Two replicas with 900 of 1,000 tokens in use each, and queues on both of them."""
    statuses = tuple(
        Status(name, ReplicaState.RUNNING, "n", Tokens(1000), 1, Blocks(100), nominal=Tokens(1000)) for name in (A, B)
    )
    residents = [
        Resident(name, load)
        for name in (A, B)
        for load in (
            *(request(f"{name}{number}", 300) for number in range(3)),
            *(request(f"{name}w{number}", 200, Phase.WAITING) for number in range(waiting)),
        )
    ]
    pool = Pool(SOLE_POOL, Tokens(1000), 2, most, 2)
    return PoolReport(pool, statuses, requests=tuple(residents), whole=True, members=tuple(members))


def terms(pairing: Mode = Mode.ACT, mode: Mode = Mode.ACT) -> Terms:
    return Terms(mode=mode, pairing=pairing, speed=SPEED)


def formed(found: Pairs) -> list[tuple[ReplicaId, ReplicaId]]:
    return [(each.lower, each.upper) for each in found]


def test_a_plan_has_the_pair_behind_all_else() -> None:
    (plan,) = decide_pool(PoolMemory(terms()), report(), 0.0)
    assert formed(plan.pairs) == [(A, B)] and plan.actions[-1:] == plan.pairs
    assert plan.proposed_pairs == ()


@pytest.mark.parametrize(("pairing", "mode"), [(Mode.OBSERVE, Mode.ACT), (Mode.ACT, Mode.OBSERVE)])
def test_a_plan_that_observes_proposes_it(pairing: Mode, mode: Mode) -> None:
    (plan,) = decide_pool(PoolMemory(terms(pairing, mode)), report(), 0.0)
    assert (plan.pairs, formed(plan.proposed_pairs)) == ((), [(A, B)])


@pytest.mark.parametrize(
    ("seen", "room", "pairs"),
    [
        (report(), 2000, [(A, B)]),
        (report(), 4000, []),
        (report(), 2300, []),
        (report(), 2040, [(A, B)]),
        (report(most=3), 2000, []),
        (report(waiting=0), 2000, []),
        (report([replace(each, can_pair=False) for each in APART]), 2000, []),
        (report([replace(each, gain=Tokens(0)) for each in APART]), 2000, []),
        (report(()), 2000, []),
    ],
    ids=[
        "none",
        "growth",
        "some growth",
        "growth that waits",
        "a start",
        "all fits",
        "unable",
        "no gain",
        "no shared memory",
    ],
)
def test_the_other_rungs_come_first(seen: PoolReport, room: int, pairs: list[tuple[ReplicaId, ReplicaId]]) -> None:
    model = ModelMemory(Bytes(500), Bytes(0), Bytes(0), Bytes(1), Blocks(10), 4, Bytes(100))
    seats = tuple(DeviceSeat(name, 1.0, model, 1, Blocks(3000), Blocks(1000)) for name in (A, B))
    devices = (Device("n", Bytes(room), seats),)
    ((plan,),) = decide(SchedulerMemory(terms()), Observation(0.0, (seen,), devices)).values()
    assert formed(plan.pairs) == pairs


def test_a_start_that_waits_for_memory_is_none() -> None:
    memory = SchedulerMemory(terms())
    waits = Status(ReplicaId("c"), ReplicaState.STARTING, "n", Tokens(0))
    seen = report(most=3)
    seen = replace(seen, replicas=(*seen.replicas, waits))
    ((plan,),) = decide(memory, Observation(0.0, (seen,), waiting=(waits.id,))).values()
    assert formed(plan.pairs) == [(A, B)]


def test_a_start_that_finds_no_gpu_is_none() -> None:
    starting = Status(ReplicaId("c"), ReplicaState.STARTING, "n", Tokens(0))
    seen = report(most=3)
    seen = replace(seen, replicas=(*seen.replicas, starting))
    memory = PoolMemory(terms())
    for now, pairs in ((0.0, []), (89.0, []), (90.0, [(A, B)])):
        (plan,) = decide_pool(memory, seen, now)
        assert formed(plan.pairs) == pairs, now


def test_a_request_on_no_replica_waits_at_the_newest_one() -> None:
    memory = PoolMemory(terms())
    decide_pool(memory, report(waiting=1), 0.0)
    loads = member_loads(memory.learned.pairing, memory.locations, APART, {B: Blocks(700)}, 0.0)
    assert [(load.used, load.waiting, load.largest, load.capacity) for load in loads] == [
        (900.0, 200, 200, 1000),
        (900.0, 200, 200, 700),
    ]


def test_members_of_a_pair_are_kept_even_where_they_have_room() -> None:
    for whole, free, moved in ((500, 950, 1), (500, 100, 0), (1000, 950, 0)):  # the last one is about to end
        members = [replace(each, whole=Tokens(whole)) for each in both(PairPhase.PAIRED)]
        seen = report(members, waiting=0)
        statuses = (seen.replicas[0], replace(seen.replicas[1], free_blocks=Blocks(free)))
        residents = tuple(each for each in seen.requests if each.replica == A)
        if free == 100:
            residents += (Resident(B, replace(request("immovable", 200), immovable="it must stay")),)
        seen = replace(seen, replicas=statuses, requests=residents)
        memory = PoolMemory(replace(terms(), policy="best_fit", moves_take_time=False))
        (plan,) = decide_pool(memory, seen, 0.0)
        assert [(move.source, move.target, move.reason) for move in plan.moves] == [(A, B, Reason.BALANCE)] * moved


@pytest.mark.parametrize(("members", "is_fitted"), [(APART, True), (both(PairPhase.PAIRED), False)])
def test_steps_of_paired_replicas_are_no_measure_of_whole_ones(members: Sequence[PairMember], is_fitted: bool) -> None:
    memory, steps = PoolMemory(replace(terms(), speed=None)), NO_STEPS
    for now in range(4):
        steps = steps.add(0.02 + 0.001 * now, 3, 900.0, (PrefillChunk(50, 0),), steps=20)
        seen = report(members)
        statuses = tuple(replace(status, steps=steps) for status in seen.replicas)
        requests = () if now else seen.requests
        decide_pool(memory, replace(seen, replicas=statuses, requests=requests, whole=not now), float(now))
    assert (memory.learned.experience.steps.fitted is not None) is is_fitted

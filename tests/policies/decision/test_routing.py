"""Placements by content, in small clusters with blocks of ten tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.changes import Arrival
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional
from policies.decision.deciding import decide_pool, place
from policies.decision.limits import Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.decision.placement import Decision, NoReplica, Place, Queue
from policies.model import SOLE_POOL, Phase, ReplicaId, ReplicaState, RequestId, RequestLoad, Tokens
from policies.paths.prices import Profile
from policies.plan import Move, MoveReport, Path, Reason
from policies.prefix.change import CacheChange, Tier
from policies.prefix.routing import Matched, Routing
from policies.prefix.tree import HeldPrefix
from policies.rules.registry import POLICIES

A, B, C = (ReplicaId(name) for name in "abc")
CAPACITY = Tokens(1000)
SPEED = ReplicaSpeed(StepCosts(proportional(0.01)))
"""A token takes 10 ms: the prefill of ten blocks takes a second."""
PROMPT = tuple(range(100, 110))


def memory(
    loads: Mapping[ReplicaId, Sequence[int]],
    caches: Mapping[ReplicaId, Sequence[int]],
    routing: Routing = Routing.TREE,
    policy: str = "best_fit",
    copies: bool = False,
    kv: str = "cache",
) -> PoolMemory:
    """A cluster whose replicas decode requests of these sizes, and have these blocks. Replica c has a cache `kv`."""
    made = PoolMemory(Terms(policy, routing=routing, speed=SPEED, copies=copies))
    requests = [
        Resident(replica, RequestLoad(RequestId(f"{replica}{i}"), "", Tokens(size), Phase.DECODE, 0.0, 0))
        for replica, sizes in loads.items()
        for i, size in enumerate(sizes)
    ]
    report = PoolReport(
        Pool(SOLE_POOL, capacity=CAPACITY, min_replicas=len(loads), max_replicas=len(loads)),
        tuple(Status(replica, ReplicaState.RUNNING, "node", CAPACITY, 10) for replica in loads),
        requests=tuple(requests),
        caches={replica: stored(*names) for replica, names in caches.items()},
        profiles={r: Profile("node", kv if r == C else "cache", 1000.0) for r in loads},
    )
    decide_pool(made, report, 0.0)
    return made


def stored(*names: int) -> CacheChange:
    return CacheChange({Tier.HBM: names}, {}, True)


def arrival(name: str = "new", tokens: int = 101, names: Sequence[int] = PROMPT, session: str = "") -> Arrival:
    return Arrival(RequestId(name), Tokens(tokens), tuple(names), session)


def home(decision: Decision) -> ReplicaId:
    assert isinstance(decision, Place | Queue)
    return decision.replica


def test_a_prompt_goes_to_the_replica_that_has_its_beginning() -> None:
    loads, caches = {A: [300], B: [100]}, {A: [], B: PROMPT}
    assert place(memory(loads, caches), arrival(), 0.0) == Place(B, Matched(Tokens(100), Tokens(100)))
    blind = place(memory(loads, caches, Routing.LEAST_LOAD), arrival(), 0.0)
    assert blind == Place(A, Matched(Tokens(100), Tokens(0)))


@pytest.mark.parametrize(("now", "better"), [(0.0, A), (1.5, B)], ids=["at once", "when the work is nearly done"])
def test_the_replica_with_the_longer_prefix_is_better_unless_prefills_wait_there(now: float, better: ReplicaId) -> None:
    made = memory({A: [300], B: [100]}, {A: PROMPT[:5], B: PROMPT})
    made.router.queues.add(RequestId("long"), B, 3.0, 0.0)
    assert home(place(made, arrival(), now)) == better


def test_the_policy_chooses_among_replicas_that_are_as_good() -> None:
    caches = {A: PROMPT, B: PROMPT, C: []}
    assert home(place(memory({A: [100], B: [300], C: [500]}, caches), arrival(), 0.0)) == B
    assert home(place(memory({A: [100], B: [300], C: [500]}, caches, policy="worst_fit"), arrival(), 0.0)) == A


def test_prompts_that_arrive_together_follow_each_others_promises() -> None:
    made = memory({A: [200], B: [300]}, {A: [], B: []})
    first = home(place(made, arrival("p"), 0.0))

    assert first == B
    follower = place(made, arrival("q", 151, (*PROMPT, 7, 8, 9, 10, 11)), 1.5)
    assert follower == Place(B, Matched(Tokens(100), Tokens(100)))


def test_a_queued_request_that_moves_takes_its_promise_along() -> None:
    made = memory({A: [200], B: [300]}, {A: [], B: []})
    tails = {"p": (*PROMPT, 1, 2), "q": (*PROMPT[:5], 3, 4)}
    for name, names in tails.items():
        assert home(place(made, arrival(name, 10 * len(names) + 1, names), 0.0)) == B
    both = made.router.queues.wait_s(B, 0.0)
    waiting = [Resident(B, RequestLoad(RequestId(name), "", Tokens(100), Phase.WAITING, 0.0, 0)) for name in tails]
    moved = replace(waiting[0], replica=A)
    pool = Pool(SOLE_POOL, capacity=CAPACITY, min_replicas=2, max_replicas=2)
    decide_pool(made, PoolReport(pool, requests=tuple(waiting)), 0.1)
    report = MoveReport(RequestId("p"), B, A, moved=True, path=Path.TOKENS)
    decide_pool(made, PoolReport(pool, requests=(moved,), moves=(report,)), 0.2)

    held = made.router.tree.match(tails["p"])
    assert held == {A: HeldPrefix(12, promised=12), B: HeldPrefix(5, promised=5)}, (
        "the other one still computes what they share there"
    )
    assert made.router.tree.match(tails["q"]) == {A: HeldPrefix(5, promised=5), B: HeldPrefix(7, promised=7)}
    assert 0 < made.router.queues.wait_s(B, 0.2) < both and made.router.queues.wait_s(A, 0.2) > 0
    made.router.tree.check_integrity()


def test_a_popular_prefix_does_not_gather_all_prompts_on_one_replica() -> None:
    made = memory({A: [10], B: [10], C: [10]}, {A: PROMPT, B: [], C: []})
    tails = [(*PROMPT, *(1000 * i + j for j in range(10))) for i in range(12)]
    homes = [home(place(made, arrival(f"q{i}", 201, names), 0.0)) for i, names in enumerate(tails)]
    assert homes[0] == A
    assert len(set(homes)) == 3


def test_of_arrivals_together_those_come_first_that_have_the_most_to_lose() -> None:
    def together(*arrivals: Arrival) -> dict[str, ReplicaId]:
        made = memory({A: [10], B: [10]}, {A: PROMPT, B: PROMPT[:1]}, policy="worst_fit")
        ordered = made.router.in_order(made.cluster, arrivals, 0.0)
        return {each.id: home(place(made, each, 0.0)) for each in ordered}

    long, short = arrival("long", 600, PROMPT[:1]), arrival("short")
    # By itself, the long prompt might go where the short one has all of its blocks.
    assert together(long, short) == together(short, long) == {"short": A, "long": B}
    assert made_order(Routing.LEAST_LOAD) == ["plain", "long", "short"]
    assert made_order(Routing.TREE) == ["short", "plain", "long"]


def made_order(routing: Routing) -> list[str]:
    made = memory({A: [10], B: [10]}, {A: PROMPT, B: []}, routing)
    plain = arrival("plain", 300, ())
    arrivals = (plain, arrival("long", 600, (7, 8)), arrival("short"))
    return [each.id for each in made.router.in_order(made.cluster, arrivals, 0.0)]


def test_an_empty_replica_is_used_only_if_the_policy_would_use_one() -> None:
    loads, caches = {A: [300], B: []}, {A: [], B: PROMPT}
    assert home(place(memory(loads, caches), arrival(), 0.0)) == A
    assert home(place(memory(loads, caches, policy="worst_fit"), arrival(), 0.0)) == B


def test_the_last_token_is_always_computed() -> None:
    made = memory({A: [10], B: [300]}, {A: PROMPT, B: []})
    assert place(made, arrival(tokens=100), 0.0) == Place(A, Matched(Tokens(90), Tokens(90)))


def test_without_room_there_a_prompt_goes_elsewhere() -> None:
    made = memory({A: [950], B: [100]}, {A: PROMPT, B: []})
    assert place(made, arrival(), 0.0) == Place(B, Matched(Tokens(100), Tokens(0)))
    full = memory({A: [950, 10], B: [950]}, {A: PROMPT, B: []})
    assert place(full, arrival(), 0.0) == Queue(B, Matched(Tokens(100), Tokens(0)))


def test_a_prefix_is_copied_to_where_there_is_room() -> None:
    loads, caches = {A: [950], C: [100]}, {A: PROMPT, C: []}
    made = memory(loads, caches, copies=True)
    placed = place(made, arrival(), 0.0)
    assert isinstance(placed, Place) and placed.fetch is not None
    assert (placed.replica, placed.matched) == (C, Matched(Tokens(100), Tokens(100)))
    assert (placed.fetch.donor, placed.fetch.tokens) == (A, 100)
    # By the first line of links: 20 ms, and 100 kB at 1 GB/s. The prefill of 100 of 101 tokens is saved.
    assert placed.fetch.copy_s == pytest.approx(0.0201) and placed.fetch.within_s == pytest.approx(1.0)
    assert made.router.queues.wait_s(C, 0.0) < 0.05, "the copy is no prefill"
    again = place(made, arrival("again"), 0.0)
    assert isinstance(again, Place) and again.fetch is None, "the first one's promise"


@pytest.mark.parametrize(("capacity", "gives"), [(CAPACITY, True), (Tokens(0), False)], ids=["alive", "silent"])
def test_a_replica_that_is_about_to_stop_gives_its_prefixes(capacity: Tokens, gives: bool) -> None:
    made = memory({A: [], C: [100]}, {A: PROMPT, C: []}, copies=True)
    pool = Pool(SOLE_POOL, capacity=CAPACITY, min_replicas=1, max_replicas=2)
    draining = Status(A, ReplicaState.DRAINING, "node", capacity, 10)
    decide_pool(made, PoolReport(pool, replicas=(draining,)), 0.1)
    placed = place(made, arrival(), 0.2)
    assert isinstance(placed, Place) and placed.replica == C
    assert (placed.fetch is not None and placed.fetch.donor == A) is gives


@pytest.mark.parametrize("why", ["off", "caches differ", "a move is under way", "sessions"])
def test_nothing_is_copied(why: str) -> None:
    routing = Routing.SESSION if why == "sessions" else Routing.TREE
    kv = "another" if why == "caches differ" else "cache"
    made = memory({A: [950], C: [100]}, {A: PROMPT, C: []}, routing, copies=why != "off", kv=kv)
    if why == "a move is under way":
        made.locations.add_order(Move(RequestId("a0"), A, C, Tokens(950), Reason.MANUAL, 0, Path.KV), 0.0)
    assert place(made, arrival(), 0.0) == Place(C, Matched(Tokens(100), Tokens(0)))


def test_a_popular_prefix_is_copied_and_not_computed_elsewhere() -> None:
    made = memory({A: [10], B: [10], C: [10]}, {A: PROMPT, B: [], C: []}, copies=True)
    tails = [(*PROMPT, *(1000 * i + j for j in range(10))) for i in range(12)]
    placed = [place(made, arrival(f"q{i}", 201, names), 0.0) for i, names in enumerate(tails)]
    fetched = {each.replica: each.fetch for each in placed if isinstance(each, Place) and each.fetch is not None}
    assert fetched.keys() == {B, C} and {home(each) for each in placed} == {A, B, C}
    assert all(fetch.tokens == 100 for fetch in fetched.values())


def test_excluded_replicas_are_no_candidates() -> None:
    made = memory({A: [300], B: [100]}, {A: [], B: PROMPT})
    assert home(place(made, arrival(), 0.0, exclude=[B])) == A
    assert place(made, arrival("other"), 0.0, exclude=[A, B]) == NoReplica()


def test_a_session_stays_on_its_replica_while_there_is_room() -> None:
    made = memory({A: [500], B: [100]}, {}, Routing.SESSION)
    assert home(place(made, arrival("p", session="s"), 0.0, exclude=[A])) == B
    assert home(place(made, arrival("q", session="s"), 1.0)) == B
    assert home(place(made, arrival("r", names=(), session="t"), 1.0)) == A
    assert home(place(made, arrival("x", tokens=710, session="s"), 1.0, exclude=[A])) == B
    assert home(place(made, arrival("y", tokens=200, session="s"), 1.0)) == A


def test_blocks_of_a_lost_replica_are_gone() -> None:
    made = memory({A: [300], B: [100]}, {A: [], B: PROMPT})
    decide_pool(made, PoolReport(Pool(SOLE_POOL, capacity=CAPACITY, min_replicas=1, max_replicas=2), lost=(B,)), 1.0)
    assert place(made, arrival(), 1.0) == Place(A, Matched())
    made.router.tree.check_integrity()


@pytest.mark.parametrize("ended", ["gone", "never came"])
def test_the_prompts_of_placed_requests_are_known_until_these_end(ended: str) -> None:
    made = memory({A: [300], B: [100]}, {A: PROMPT[:4], B: PROMPT})
    placed = arrival("p")
    place(made, placed, 0.0)
    assert [made.router.present(placed.id, replica) for replica in (A, B, C)] == [40, 100, 0]
    assert made.router.present(RequestId("a0"), B) == 0
    load = RequestLoad(placed.id, "", Tokens(101), Phase.DECODE, 0.0, 0)
    pool = Pool(SOLE_POOL, capacity=CAPACITY, min_replicas=2, max_replicas=2)
    if ended == "gone":
        decide_pool(made, PoolReport(pool, requests=(Resident(B, load),)), 0.1)
        assert made.router.present(placed.id, B) == 100
        decide_pool(made, PoolReport(pool, gone=(placed.id,)), 0.2)
    else:
        decide_pool(made, PoolReport(pool), 60.0)
    assert made.router.present(placed.id, B) == 0 and not made.router._prompts


@pytest.mark.parametrize("ended", ["decodes", "gone", "never came"])
def test_a_prefill_that_is_over_is_waited_for_no_more(ended: str) -> None:
    made = memory({A: [300], B: [100]}, {A: [], B: PROMPT})
    place(made, arrival("p", 501, ()), 0.0)
    assert made.router.queues.wait_s(A, 0.0) > 4
    load = RequestLoad(RequestId("p"), "", Tokens(501), Phase.DECODE, 0.0, 0)
    report = PoolReport(
        Pool(SOLE_POOL, capacity=CAPACITY, min_replicas=2, max_replicas=2),
        requests=(Resident(A, load),) if ended == "decodes" else (),
        gone=(load.id,) if ended == "gone" else (),
    )
    decide_pool(made, report, 0.1)
    assert (made.router.queues.wait_s(A, 0.1) == 0) is (ended == "decodes")
    decide_pool(made, PoolReport(report.pool), 2.5)
    assert made.router.queues.wait_s(A, 2.5) == 0


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.lists(st.integers(1, 400), max_size=4), min_size=1, max_size=5),
    st.integers(1, 600),
    st.booleans(),
)
def test_without_shared_content_the_policy_decides_alone(
    policy: str, sizes: list[list[int]], tokens: int, named: bool
) -> None:
    loads = {ReplicaId(f"r{i}"): there for i, there in enumerate(sizes)}
    names = PROMPT[: tokens // 10] if named else ()
    caches = {replica: [1, 2, 3] for replica in loads}
    aware, blind = (
        place(memory(loads, caches, routing, policy), arrival("new", tokens, names), 0.0)
        for routing in (Routing.TREE, Routing.LEAST_LOAD)
    )
    assert aware == blind

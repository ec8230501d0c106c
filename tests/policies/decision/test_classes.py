"""Service classes in the decision: who is placed first, who moves first, and who waits for whom."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.changes import Arrival
from policies.decision.deciding import decide_pool, place, placing_order
from policies.decision.limits import Limits, LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.decision.placement import Decision, Place, Queue
from policies.model import SOLE_POOL, Phase, ReplicaId, ReplicaState, RequestId, RequestLoad, Tokens
from policies.plan import Plan
from policies.precedence import NO_CLASSES, Precedence, ServiceClass, ServiceClasses
from policies.rules.registry import POLICIES
from tests.policies.decision.observed import Watcher, observed
from tests.policies.settings import few

CLASSES = ServiceClasses({"low": ServiceClass(-1), "high": ServiceClass(1)}, overtake_s=10.0)
LOW, MIDDLE, HIGH = Precedence("low", 100.0), Precedence("default", 100.0), Precedence("high", 100.0)
NO_GROWTH = "pack:headroom_s=0,comfort=0,rest=0"


def watcher(spec: str = NO_GROWTH, mode: Mode = Mode.ACT, lead_s: float = 0.0, ranked: bool = True) -> Watcher:
    limits = LiveLimits(Limits(), 5.0, 0.0, 60.0, lead_s)
    return Watcher(PoolMemory(Terms(spec, limits, mode=mode, classes=CLASSES if ranked else NO_CLASSES)))


def moves(plan: Plan) -> list[str]:
    return [f"{m.request}:{m.source}>{m.target} {m.reason}" for m in plan.moves]


def placed(made: Watcher, name: str, tokens: int, precedence: Precedence) -> Decision:
    return place(made.memory, Arrival(RequestId(name), Tokens(tokens), precedence=precedence), 0.0)


# --- overloads ------------------------------------------------------------------------------------------

STRAINED = "a: p50 q25 r20 | b: s40"
"""Replica a will be short of room, and either of its requests of 20 tokens or more cures it."""


@pytest.mark.parametrize(
    ("classed", "moved"),
    [
        ({}, "r"),
        ({"p": HIGH, "r": HIGH}, "q"),
        ({"q": LOW}, "q"),
        ({"p": HIGH, "q": HIGH}, "r"),
        ({"p": LOW, "q": LOW}, "q"),
    ],
    ids=["all equal: the smallest", "one below the others", "one low", "two high", "of two low ones the smallest"],
)
@pytest.mark.parametrize("spec", [NO_GROWTH, "load_balance:threshold=1"])
def test_the_lowest_rank_moves_off_an_overloaded_replica(spec: str, classed: dict[str, Precedence], moved: str) -> None:
    plan = watcher(spec, lead_s=0.1).decide(observed(STRAINED, classed=classed))
    assert moves(plan) == [f"{moved}:a>b overload"]


def test_a_higher_rank_moves_if_no_lower_one_fits_elsewhere() -> None:
    plan = watcher(lead_s=0.1).decide(observed("a: p50 q25 r20 | b: s73!", classed={"p": LOW, "q": LOW}))
    assert moves(plan) == ["r:a>b overload"]


def test_a_lower_rank_moves_to_make_room() -> None:
    """Either of q and r makes the room for x if it moves to c."""
    drawing = "a: p29! q35 r30 x36? | b: s75! | c: t65!"
    assert moves(watcher().decide(observed(drawing)))[0].startswith("r:a>c")
    assert moves(watcher().decide(observed(drawing, classed={"r": HIGH})))[0].startswith("q:a>c")


# --- waiting requests ---------------------------------------------------------------------------------------


def test_room_goes_to_the_highest_rank_first() -> None:
    drawing = "a: p90 x40? y40? z40? | b: q50!"
    assert moves(watcher().decide(observed(drawing))) == ["x:a>b admit"]
    classed = {"x": LOW, "y": MIDDLE, "z": HIGH}
    assert moves(watcher().decide(observed(drawing, classed=classed))) == ["z:a>b admit"]


def test_a_lower_rank_comes_first_once_it_has_waited_for_long_enough() -> None:
    drawing = "a: p90 x40? z40? | b: q50!"
    for waited_s, first in ((19.0, "z"), (21.0, "x")):
        classed = {"x": Precedence("low", 100.0), "z": Precedence("high", 100.0 + waited_s)}
        assert moves(watcher().decide(observed(drawing, classed=classed))) == [f"{first}:a>b admit"]


def test_an_evacuation_begins_with_the_highest_rank() -> None:
    drawing = "a^: x40 y30 | b: q50! r10!"
    assert moves(watcher().decide(observed(drawing))) == ["x:a>b evacuate"]
    assert moves(watcher().decide(observed(drawing, classed={"y": HIGH}))) == ["y:a>b evacuate"]


# --- arrivals -------------------------------------------------------------------------------------------

WAITING = "a: p90 h40? | b: q50! | c: r90!"
"""Request h waits at a. It fits on b, where the next epoch will move it."""


@pytest.mark.parametrize(
    ("precedence", "classed", "expected"),
    [
        (LOW, {"h": HIGH}, Queue(ReplicaId("c"))),
        (MIDDLE, {"h": HIGH}, Queue(ReplicaId("c"))),
        (HIGH, {"h": MIDDLE}, Place(ReplicaId("b"))),
        (Precedence("high", 101.0), {"h": HIGH}, Queue(ReplicaId("c"))),
        (Precedence("high", 99.0), {"h": HIGH}, Place(ReplicaId("b"))),
        (Precedence("low", 79.0), {"h": HIGH}, Place(ReplicaId("b"))),
    ],
    ids=["low", "middle", "high", "later of the same class", "earlier of the same class", "far earlier"],
)
def test_an_arrival_takes_no_room_of_a_request_before_it(
    precedence: Precedence, classed: Mapping[str, Precedence], expected: Decision
) -> None:
    made = watcher()
    made.observe(observed(WAITING, classed=classed))
    assert placed(made, "new", 30, precedence) == expected


@pytest.mark.parametrize(
    ("drawing", "made"),
    [
        (WAITING, watcher(mode=Mode.OFF)),
        (WAITING, watcher(ranked=False)),
        ("a: p90 h60? | b: q50! | c: r90!", watcher()),
        ("a@v2: p90 h40? | b: q50! | c: r90!", watcher()),
        ("a@v2: p90 h40? | b@v2: q50!", watcher()),
    ],
    ids=["nobody moves the other", "no classes", "the other does not fit", "another model", "no full replica"],
)
def test_an_arrival_is_placed_where_nobody_before_it_could_be(drawing: str, made: Watcher) -> None:
    if drawing.startswith("a@v2: p90 h40? | b@v2"):
        drawing = "a: p20 | b: q50! h40?"
    made.observe(observed(drawing, classed={"h": HIGH}))
    assert isinstance(placed(made, "new", 30, LOW), Place)


def test_of_arrivals_that_come_together_the_highest_rank_is_placed_first() -> None:
    made = watcher()
    made.observe(observed("a: p60!"))
    classed = {"x": LOW, "y": MIDDLE, "z": HIGH, "w": HIGH}
    arrivals = [Arrival(RequestId(name), Tokens(30), precedence=each) for name, each in classed.items()]
    assert [arrival.id for arrival in placing_order(made.memory, arrivals, 0.0)] == ["z", "w", "y", "x"]


def test_a_placement_keeps_its_class_until_it_is_reported() -> None:
    made = watcher()
    made.observe(observed("a: p60"))
    placed(made, "x", 30, LOW)
    made.observe(observed("a: p60", 0.5))
    request = made.memory.cluster.requests[RequestId("x")]
    assert (request.rank, request.turn) == (-1, 110.0)


# --- any policy -----------------------------------------------------------------------------------------


class Shop:
    """One replica with `seats` places for equal requests, in the idealised model, under any policy."""

    def __init__(self, spec: str, seats: int) -> None:
        terms = Terms(spec, moves_take_time=False, starts_take_time=False, may_wait_nowhere=True, classes=CLASSES)
        self.memory = PoolMemory(terms)
        self.pool = Pool(SOLE_POOL, capacity=Tokens(100), min_replicas=1, max_replicas=1)
        self.status = Status(ReplicaId("a"), ReplicaState.RUNNING, "n", Tokens(100), max_requests=seats)
        self.waiting: dict[RequestId, Precedence] = {}
        self.running: list[RequestId] = []
        self.begun: dict[RequestId, Precedence] = {}
        self.epochs = 0

    def epoch(self, arrivals: list[Precedence], ends: int) -> list[Precedence]:
        """The requests that begin to run, after the oldest `ends` running ones have ended."""
        now = float(self.epochs)
        gone, self.running = self.running[:ends], self.running[ends:]
        fresh = {RequestId(f"r{self.epochs}-{i}"): each for i, each in enumerate(arrivals)}
        self.waiting |= fresh
        here = ((q, ReplicaId("a"), p) for q, p in self.begun.items() if q not in gone)
        residents = tuple(
            Resident(at, RequestLoad(q, "", Tokens(10), Phase.DECODE, 0.0, 0, None, precedence))
            for q, at, precedence in (*here, *((q, None, p) for q, p in fresh.items()))
        )
        statuses = () if self.epochs else (self.status,)
        (plan,) = decide_pool(self.memory, PoolReport(self.pool, statuses, (), residents, tuple(gone)), now)
        self.epochs += 1
        self.begun = {p.request: self.waiting.pop(p.request) for p in plan.placements}
        self.running += self.begun
        return list(self.begun.values())


CALLS = st.lists(
    st.tuples(st.lists(st.sampled_from(["low", "default", "high"]), max_size=4), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("spec", POLICIES)
@few
@given(calls=CALLS, seats=st.integers(1, 3))
def test_no_request_waits_for_a_later_one_beyond_the_bound(
    spec: str, calls: list[tuple[list[str], int]], seats: int
) -> None:
    """Epochs are 5 s apart, so a rank overtakes the arrivals of two epochs for each step that it is higher."""
    shop = Shop(spec, seats)
    for epoch, (names, ends) in enumerate(calls):
        arrivals = [Precedence(name, 5.0 * epoch) for name in names]
        for begun in shop.epoch(arrivals, ends):
            for left in shop.waiting.values():
                later_by = begun.arrived_s - left.arrived_s
                steps = CLASSES.rank(begun.service_class) - CLASSES.rank(left.service_class)
                assert later_by <= CLASSES.overtake_s * steps

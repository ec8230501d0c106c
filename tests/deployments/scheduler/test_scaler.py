"""How many replicas there are to be, and the steps by which one goes."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected
from deployments.scheduler import scaler
from deployments.scheduler.scaler import ServeScaler
from deployments.serve.bounds import Bounds
from deployments.serve.scaling import Wanted
from migration.protocol.errors import PeerLost, Refused
from policies.causes import Cause
from policies.memory.ladder import Wait, Wake
from policies.model import SOLE_POOL, PoolId, ReplicaId
from tests.deployments.scheduler.fakes import Answers, FakeListing

A, B = ReplicaId("a"), ReplicaId("b")


class World:
    """A scaler, Serve's key-value store, and a controller that stops the very replica, if it can."""

    def __init__(
        self, running: str = "ab", known: Wanted | None = None, knows_how: bool = True, **answers: Any
    ) -> None:
        self.store, self.knows_how = known, knows_how
        self.stopped: list[tuple[ReplicaId, int]] = []
        self.freed: list[float] = []
        self.while_stopping: Callable[[], None] = lambda: None
        self.fault: Exception | None = None
        self.listing, self.replicas = FakeListing(running), Answers(**({"a": None, "b": None} | answers))
        self.now = 100.0
        self.scaler = ServeScaler(
            "mell",
            SOLE_POOL,
            self.replicas,
            self.listing,
            (1, 4),
            self.freed.append,
            lambda: self.now,
            lambda: self.now,
        )

    def write(self, app: str, pool: PoolId, generation: str, wanted: Wanted) -> None:
        self.store = wanted

    async def retire(self, app: str, deployment: str, replica: ReplicaId, count: int) -> bool:
        self.while_stopping()
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        if self.knows_how:
            self.stopped.append((replica, count))
        return self.knows_how


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    monkeypatch.setattr(scaler, "generation", lambda: "g")
    kept: dict[str, Bounds] = {}
    monkeypatch.setattr(scaler, "read_bounds", lambda app, pool, generation, configured: kept.get(app, configured))
    monkeypatch.setattr(
        scaler, "write_bounds", lambda app, pool, generation, configured, ordered: kept.update({app: ordered})
    )

    def made(*args: Any, **knobs: Any) -> World:
        world = World(*args, **knobs)
        monkeypatch.setattr(scaler, "read_wanted", lambda app, pool, generation: world.store)
        monkeypatch.setattr(scaler, "write_wanted", world.write)
        monkeypatch.setattr(scaler, "retire", world.retire)
        return world

    return made


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("bounds", "wanted"),
    [((3, 6), 3), ((1, 1), 1), ((1, 9), 2), ((2, 2), 2)],
    ids=["more than run", "fewer than run", "wider", "as many as run"],
)
def test_the_wanted_number_follows_new_bounds(make: Callable[..., World], bounds: Bounds, wanted: int) -> None:
    world = make("ab")
    world.scaler.set_bounds(bounds)
    assert (world.scaler.min_replicas, world.scaler.max_replicas) == bounds
    assert (world.scaler.wanted, world.store) == (wanted, Wanted(wanted, world.now))
    successor = make("ab", world.store)
    assert (successor.scaler.min_replicas, successor.scaler.max_replicas, successor.scaler.wanted) == (*bounds, wanted)


def test_an_inherited_number_is_within_the_bounds(make: Callable[..., World]) -> None:
    assert make("ab", Wanted(9, 99.0)).scaler.wanted == 4


@pytest.mark.parametrize(
    ("running", "age_s", "wanted"),
    [("ab", 1.0, 3), ("ab", 61.0, 2), ("", 61.0, 1), ("abcdef", 61.0, 4)],
    ids=["a fresh number", "a stale one", "none, and nothing runs", "none, and too many run"],
)
async def test_where_the_first_number_comes_from(
    make: Callable[..., World], running: str, age_s: float, wanted: int
) -> None:
    assert make(running, Wanted(3, 100.0 - age_s)).scaler.wanted == wanted


async def test_before_serve_has_been_asked_nothing_is_settled(make: Callable[..., World]) -> None:
    world = make("abc")
    world.listing.listed = False
    assert world.scaler.wanted == 1
    world.listing.listed = True
    assert world.scaler.wanted == 3


async def test_opening_is_bounded_and_told_at_once(make: Callable[..., World]) -> None:
    world = make()
    world.scaler.open(1)
    assert (world.scaler.wanted, world.scaler.opening, world.store and world.store.count) == (3, 1, 3)
    world.listing.starting = 1
    assert world.scaler.opening == 0
    world.scaler.open(5)
    assert world.scaler.wanted == 4


async def test_an_empty_replica_promises_to_stay_empty_and_is_stopped(make: Callable[..., World]) -> None:
    world = make()
    world.scaler.close([B], 7)
    world.scaler.close([B], 7)
    await settle()
    assert world.replicas.asked == [("b", "close", 7)], "once is enough"
    assert (world.stopped, world.scaler.wanted) == ([("b", 1)], 1)


@pytest.mark.parametrize("fault", [Refused("the replica is not empty", Cause.NOT_EMPTY), PeerLost("dead")])
async def test_one_that_does_not_promise_stays(make: Callable[..., World], fault: Exception) -> None:
    world = make(b=fault)
    world.scaler.close([B], 7)
    await settle()
    assert (world.stopped, world.scaler.wanted) == ([], 2)


async def test_where_serve_does_not_know_how_the_number_is_lowered_and_the_replica_opens_again(
    make: Callable[..., World],
) -> None:
    world = make(knows_how=False)
    world.scaler.close([B], 7)
    await settle()
    assert world.replicas.asked == [("b", "close", 7), ("b", "reopen", 7)]
    assert (world.scaler.wanted, world.store and world.store.count) == (1, 1)


AWAY = PeerLost("Serve's controller does not answer")


@pytest.mark.parametrize("fault", [AWAY, Refused("Serve does not run it", Cause.NOT_RUNNING), KeyError("x"), None])
async def test_however_often_closing_fails_the_number_falls_by_one_at_most(
    make: Callable[..., World], fault: Exception | None
) -> None:
    """Only where Serve cannot stop a replica by name does it fall, once, and then until Serve has followed nothing."""
    world = make("abcd", knows_how=False, c=None, d=None)
    world.fault = fault
    for replica in "abcd":
        world.scaler.close([ReplicaId(replica)], 7)
        await settle()
        world.scaler.publish()
    least = 3 if fault is None else 4
    assert (world.scaler.wanted, world.store and world.store.count) == (least, least)
    closed = [(replica, call) for replica, call, _ in world.replicas.asked]
    assert closed[:2] == [("a", "close"), ("a", "reopen")] and len(closed) == (2 if fault is None else 8)


async def test_while_serves_list_is_old_nothing_is_closed(make: Callable[..., World]) -> None:
    world = make()
    world.listing.is_current = False
    world.scaler.close([B], 7)
    world.scaler.close_drained([B], 7)
    await settle()
    assert world.replicas.asked == []


async def test_a_list_from_before_a_stop_neither_hides_a_replica_that_is_being_opened_nor_stops_one_twice(
    make: Callable[..., World],
) -> None:
    """One of two is drained, and its replacement asked for; then the controller is slow to list both."""
    world = make()
    world.scaler.open(1)
    world.scaler.close_drained([B], 7)
    await settle()
    assert (world.stopped, world.scaler.wanted, world.scaler.opening) == ([("b", 2)], 2, 1)
    world.scaler.measure_freed(set())
    world.scaler.close_drained([B], 7)
    await settle()
    assert len(world.stopped) == 1 and world.scaler.opening == 1
    world.listing.running, world.listing.starting = {"a"}, 1
    world.scaler.measure_freed(set())
    assert (world.scaler.opening, world.scaler._stopped) == (0, set())


async def test_a_drained_replica_stays_closed_until_the_controller_is_back(make: Callable[..., World]) -> None:
    world = make()
    world.fault = AWAY
    world.scaler.close_drained([B], 7)
    await settle()
    assert [call for _, call, _ in world.replicas.asked] == ["close"]
    world.fault = None
    world.scaler.close_drained([B], 7)
    await settle()
    assert (world.stopped, world.scaler.wanted) == ([("b", 1)], 1)


async def test_while_the_controller_stops_a_replica_the_number_is_its_own_to_write(make: Callable[..., World]) -> None:
    world = make("abcd", c=None)
    written: list[Wanted | None] = []

    def publish() -> None:
        world.store = None
        world.scaler.publish()
        written.append(world.store)

    world.while_stopping = publish
    world.scaler.close([A, B], 7)
    await settle()
    assert written == [None, None]
    assert world.stopped == [("a", 3), ("b", 2)], "one after the other"
    assert (world.scaler.wanted, world.store) == (2, Wanted(2, 100.0))


async def test_unless_the_scheduler_scales_the_number_is_serves(make: Callable[..., World]) -> None:
    world = make("abc", Wanted(4, 99.0))
    assert world.scaler.wanted == 4
    world.scaler.scales = False
    assert (world.scaler.wanted, world.scaler.opening) == (3, 0)
    world.listing.running = {"a", "b"}
    world.scaler.close_drained([B], 7)
    await settle()
    assert (world.stopped, world.store) == ([("b", 1)], Wanted(4, 99.0)), "the number is Serve's to write"
    world.store, world.scaler.scales = None, True
    assert world.scaler.wanted == 1, "b has been stopped, whatever the list has"


async def test_a_number_that_is_taken_over_is_within_the_bounds(make: Callable[..., World]) -> None:
    assert make("abcd", Wanted(9, 99.0)).scaler.wanted == 4


async def test_what_is_opened_while_another_closes_is_not_forgotten(make: Callable[..., World]) -> None:
    world = make()
    world.while_stopping = lambda: world.scaler.open(2)
    world.scaler.close([B], 7)
    await settle()
    assert world.scaler.wanted == 3


async def test_the_fewest_are_replaced(make: Callable[..., World]) -> None:
    world = make("a")
    world.scaler.close([A], 7)
    await settle()
    assert (world.stopped, world.scaler.wanted) == ([("a", 1)], 1)


async def test_only_a_drained_replica_that_serve_still_runs_is_closed(
    make: Callable[..., World],
) -> None:
    world = make()
    world.scaler.close_drained([B, ReplicaId("gone")], 7)
    await settle()
    assert world.stopped == [("b", 1)]


async def test_a_drain_is_the_replicas_own_to_begin(make: Callable[..., World]) -> None:
    world = make()
    await world.scaler.drain(B, 7)
    assert world.replicas.asked == [("b", "drain", 7)]
    with pytest.raises(Refused, match="not running"):
        await world.scaler.drain(ReplicaId("z"), 7)


async def test_the_time_to_free_a_replica_is_until_serve_lists_it_no_more(make: Callable[..., World]) -> None:
    world = make("abc")
    world.scaler.mark_emptying([A, B, ReplicaId("c")])
    world.scaler.measure_freed(filled={A})
    assert world.freed == []
    world.listing.running = {"a", "c"}
    world.scaler.measure_freed(filled=set())
    assert len(world.freed) == 1 and world.freed[0] >= 0
    world.listing.running = {"c"}
    world.scaler.measure_freed(filled=set())
    assert len(world.freed) == 1, "a was filled again, and closed by nobody"


class FakeSleeping:
    """Implements `Sleeping`: `ways` are the rungs of the next openings."""

    def __init__(self, *asleep: ReplicaId, keeps: bool = True) -> None:
        self.asleep = frozenset(asleep)
        self.waking = 0
        self.more = 0
        self.ended: set[ReplicaId] = set()
        self.while_asked: Callable[[], None] = lambda: None
        self.ways: list[Wake | Wait | None] = []
        self.refuses = False
        self._keeps = keeps

    def climb(self) -> Wake | Wait | None:
        return self.ways.pop(0)

    def keeps(self, replica: ReplicaId, others: Collection[ReplicaId]) -> bool:
        return self._keeps

    def has_ended(self, replica: ReplicaId) -> bool:
        return replica in self.ended

    def expect_wake(self, replica: ReplicaId) -> None:
        self.asleep, self.waking = self.asleep - {replica}, self.waking + 1

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        self.asleep -= {replica}
        self.while_asked()
        return MoveRejected(422, "no room") if self.refuses else MoveAccepted(replica)

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        self.asleep |= {replica}
        self.while_asked()
        if self.refuses:
            self.asleep -= {replica}
            return MoveRejected(503, "it is away")
        return MoveAccepted(replica)

    def follow(self) -> int:
        more, self.more = self.more, 0
        return more


async def test_a_closed_replica_sleeps_before_one_stops_and_serve_keeps_it(make: Callable[..., World]) -> None:
    world = make("ab", a=None)
    world.scaler.sleeping = sleeping = FakeSleeping()
    world.scaler.close([A], 3)
    await settle()
    assert not world.stopped and sleeping.asleep == {A}
    assert world.scaler.wanted == 1 and world.store == Wanted(2, 100.0)
    assert world.replicas.asked == [(A, "close", 3), (A, "reopen", 3)]
    assert world.scaler.opening == 0, "the sleeper is none that is missing"
    world.scaler.sleeping = FakeSleeping(A, keeps=False)
    world.scaler.min_replicas = 0
    world.scaler.close([B], 3)
    await settle()
    assert world.stopped == [(B, 1)], "Serve keeps the sleeper alone"


@pytest.mark.parametrize(("least", "keeps", "closes"), [(1, True, True), (0, False, True), (0, True, False)])
async def test_an_idle_replica_whose_memory_others_need_sleeps_or_stays(
    make: Callable[..., World], least: int, keeps: bool, closes: bool
) -> None:
    """Of two, one sleeps above a minimum of 1. Where none may sleep, and where both have requests, both stay."""
    answer = None if closes else Refused("the replica is not empty", Cause.NOT_EMPTY)
    world = make("ab", a=answer, b=answer)
    world.scaler.min_replicas = least
    world.scaler.sleeping = sleeping = FakeSleeping(keeps=keeps)
    world.scaler.put_to_sleep([A, B], 3)
    assert world.scaler.closing == (set() if not keeps else {A} if least else {A, B})
    await settle()
    asleep = {A} if keeps and closes else set()
    assert not world.stopped and not world.scaler.closing and sleeping.asleep == asleep
    assert world.scaler.wanted == 2 - len(asleep)


async def test_an_opening_wakes_before_another_replica_starts(make: Callable[..., World]) -> None:
    world = make("ab")
    world.scaler.sleeping = sleeping = FakeSleeping(A)
    assert world.scaler.wanted == 1
    sleeping.ways = [Wake(A, 0), None]
    world.scaler.open(2)
    await settle()
    assert world.scaler.wanted == 3 and world.store == Wanted(3, 100.0)
    assert world.scaler.opening == 2, "one wakes, and one is started"


async def test_while_another_one_wakes_nothing_opens(make: Callable[..., World]) -> None:
    world = make("ab")
    world.scaler.sleeping = sleeping = FakeSleeping(A)
    sleeping.ways = [Wait()]
    world.scaler.open(2)
    assert world.scaler.wanted == 1


@pytest.mark.parametrize("refused", [True, False])
async def test_a_wake_that_does_not_succeed_is_wanted_no_longer(make: Callable[..., World], refused: bool) -> None:
    world = make("ab")
    world.scaler.sleeping = sleeping = FakeSleeping(A)
    sleeping.ways, sleeping.refuses = [Wake(A, 0)], refused
    world.scaler.open(1)
    await settle()
    sleeping.more = 0 if refused else -1
    world.scaler.follow_sleep()
    assert world.scaler.wanted == 1


async def test_a_sleeper_that_ends_is_replaced_by_a_replica_that_is_awake(make: Callable[..., World]) -> None:
    world = make("ab")
    world.scaler.sleeping = FakeSleeping(A)
    assert world.scaler.wanted == 1
    world.scaler.sleeping = sleeping = FakeSleeping()
    sleeping.more = 1
    world.scaler.follow_sleep()
    world.scaler.publish()
    assert world.scaler.wanted == 2 and world.store == Wanted(2, 100.0)
    # Its replica reports that it drains, until Serve no longer lists it.
    sleeping.ended = {A}
    world.while_stopping = sleeping.ended.clear
    world.scaler.close_drained([A], 3)
    await settle()
    assert world.stopped == [(A, 2)] and world.scaler.wanted == 2


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_replica_that_fell_asleep_is_not_stopped_for_a_report_from_before(
    make: Callable[..., World], keeps: bool
) -> None:
    """It says that the replica drains, as it does while it is closed; so does that of one which is opened again."""
    world = make("ab")
    world.scaler.min_replicas = 0
    world.scaler.sleeping = sleeping = FakeSleeping(keeps=keeps)
    sleeping.refuses = not keeps
    world.scaler.sleeping = sleeping
    world.scaler.close([A], 3) if keeps else world.scaler._begin_closing([A], 3, scaler._Ending.SLEEP)
    await settle()
    for _ in range(2):
        world.scaler.close_drained([A], 3)
        await settle()
    assert not world.stopped
    world.scaler.close_drained([], 3)
    world.scaler.close_drained([A], 3)
    await settle()
    assert world.stopped, "a newer report has shown that it drained no longer, and then it did"


async def test_operators_close_and_open_by_sleep_within_the_bounds(make: Callable[..., World]) -> None:
    world = make("ab")
    assert isinstance(await world.scaler.sleep(A), MoveRejected)
    world.scaler.sleeping = FakeSleeping()
    assert await world.scaler.sleep(A) == MoveAccepted(A)
    assert world.scaler.wanted == 1 and world.store == Wanted(2, 100.0)
    answer = await world.scaler.sleep(B)
    assert isinstance(answer, MoveRejected) and "min_replicas is 1" in answer.message
    assert await world.scaler.wake(A) == MoveAccepted(A) and world.scaler.wanted == 2
    world.scaler.max_replicas = 2
    world.scaler.sleeping.asleep = frozenset({B})
    answer = await world.scaler.wake(B)
    assert isinstance(answer, MoveRejected) and "max_replicas is 2" in answer.message


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("wakes", [True, False])
async def test_serves_number_stays_while_an_order_to_sleep_or_to_wake_has_no_answer(
    make: Callable[..., World], wakes: bool, refused: bool
) -> None:
    world, published = make("ab"), []
    world.scaler.sleeping = sleeping = FakeSleeping(*([A] if wakes else []))
    assert world.scaler.wanted == (1 if wakes else 2)

    def epoch() -> None:
        world.scaler.publish()
        published.append(world.store)

    sleeping.while_asked, sleeping.refuses = epoch, refused
    await (world.scaler.wake(A) if wakes else world.scaler.sleep(A))
    assert published == [Wanted(2, 100.0)], "Serve would stop the replica that wakes, or start another one"
    if not refused:
        assert world.scaler.wanted == (2 if wakes else 1) and world.store == Wanted(2, 100.0)


async def test_a_replica_that_wakes_already_is_not_counted_twice(make: Callable[..., World]) -> None:
    world = make("ab")
    world.scaler.sleeping = FakeSleeping(A)
    world.scaler.sleeping.expect_wake(A)
    answer = await world.scaler.wake(A)
    assert isinstance(answer, MoveRejected) and answer.status == 409

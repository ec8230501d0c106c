"""The ladder: the rungs of openings and closings."""

from policies.memory.ladder import (
    DeviceState,
    Grow,
    OpeningNeed,
    SeatState,
    Sleep,
    Start,
    Stop,
    Wait,
    Wake,
    climb,
    descend,
    make_room,
)
from policies.model import Bytes, PoolId, ReplicaId

CHAT = PoolId("chat")
NEED = OpeningNeed(CHAT, Bytes(40))


def awake(name: str, pool: str = "code", least: int = 40, idle_since: float | None = None) -> SeatState:
    return SeatState(ReplicaId(name), PoolId(pool), True, Bytes(least), Bytes(5), idle_since, idle_since is None)


def asleep(name: str, pool: str = "chat") -> SeatState:
    return SeatState(ReplicaId(name), PoolId(pool), False, Bytes(5), Bytes(5))


def device(number: int, *seats: SeatState, is_waking: bool = False) -> DeviceState:
    return DeviceState(number, Bytes(100), seats, is_waking)


def test_memory_on_its_way_by_the_division_comes_first() -> None:
    sleepers = [device(0, asleep("s"))]
    lacking = OpeningNeed(CHAT, Bytes(40), Bytes(10), ReplicaId("a"), Bytes(20))
    assert climb(lacking, sleepers) == Grow(ReplicaId("a"))
    too_little = OpeningNeed(CHAT, Bytes(40), Bytes(30), ReplicaId("a"), Bytes(20))
    slow_steps = OpeningNeed(CHAT, Bytes(40), Bytes(0), ReplicaId("a"), Bytes(20))
    assert [climb(need, sleepers) for need in (too_little, slow_steps)] == [Wake(ReplicaId("s"), 0)] * 2


def test_a_sleeper_wakes_where_nothing_falls_asleep_then_where_least_is_at_work() -> None:
    crowded = device(0, asleep("s0"), awake("x", idle_since=1.0), awake("y"))
    at_work = device(1, asleep("s1"), awake("z"))
    empty = device(2, asleep("s2"))
    assert climb(NEED, [crowded, at_work, empty]) == Wake(ReplicaId("s2"), 2)
    assert climb(NEED, [crowded, at_work]) == Wake(ReplicaId("s1"), 1)
    assert climb(NEED, [crowded]) == Wake(ReplicaId("s0"), 0, (ReplicaId("x"),))


def test_of_idle_replicas_the_least_recently_used_make_room() -> None:
    full = device(0, asleep("s"), awake("x", idle_since=2.0), awake("y", idle_since=1.0))
    assert climb(NEED, [full]) == Wake(ReplicaId("s"), 0, (ReplicaId("y"),))
    large = OpeningNeed(CHAT, Bytes(90))
    assert climb(large, [full]) == Wake(ReplicaId("s"), 0, (ReplicaId("y"), ReplicaId("x")))


def test_those_that_wait_have_no_more_than_they_lack_fall_asleep_in_their_order() -> None:
    full = device(0, awake("x", idle_since=2.0), awake("y", "docs", idle_since=1.0))
    one, two = (CHAT, Bytes(40)), (PoolId("vision"), Bytes(40))
    assert make_room(full, [(CHAT, Bytes(20))]) == ()
    assert make_room(full, [one]) == ("y",)
    assert make_room(full, [one, two]) == ("y", "x")
    assert make_room(full, [(CHAT, Bytes(95)), two]) == ("y",), "nobody sleeps for one that lacks more than there is"
    assert make_room(full, [(PoolId("docs"), Bytes(40))]) == ("x",), "a pool's own replicas do not sleep for it"


def test_a_start_comes_after_wakes_and_where_the_pool_has_no_replica() -> None:
    full = device(0, asleep("s"), awake("x"), awake("y"))
    assert climb(NEED, [full, device(1)]) == Start(1)
    assert climb(NEED, [full, device(1, awake("own", "chat", 30))]) == Wait()


def test_one_replica_of_a_device_wakes_at_a_time_and_the_next_one_waits_for_it() -> None:
    waking = device(0, asleep("s0"), is_waking=True)
    assert climb(NEED, [waking, device(2)]) == Wait()
    assert climb(NEED, [waking, device(1, asleep("s1"), awake("x"))]) == Wake(ReplicaId("s1"), 1)


def test_a_start_stops_sleepers_of_other_models_only_if_it_has_to() -> None:
    sleepers = [asleep(f"o{number}", f"m{number}") for number in range(4)]
    busy = awake("x", least=50)
    assert climb(NEED, [device(0, busy, *sleepers)]) == Start(0, (), (ReplicaId("o0"), ReplicaId("o1")))
    own = device(1, asleep("s"), awake("y"), awake("z"))
    assert climb(NEED, [device(0, busy, *sleepers), own]) == Wait(), "the pool has a sleeper, if not for now"
    idle = awake("x", least=50, idle_since=1.0)
    assert climb(NEED, [device(0, idle, *sleepers)]) == Start(0, (ReplicaId("x"),))


def test_nothing_fits_beside_replicas_with_requests() -> None:
    assert climb(NEED, [device(0, asleep("s"), awake("x"), awake("y"))]) == Wait()


def test_a_closed_replica_sleeps_while_few_of_its_pool_sleep_there() -> None:
    seat = awake("a", "chat")
    assert descend(seat, device(0, seat), 1) == Sleep()
    assert descend(seat, device(0, seat, asleep("s")), 1) == Stop()
    assert descend(seat, device(0, seat, asleep("other", "code")), 1) == Sleep()
    assert descend(seat, device(0, seat), 0) == Stop()

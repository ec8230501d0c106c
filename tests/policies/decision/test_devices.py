"""The division of a device between the replicas of two pools, by what these have observed."""

import json
from dataclasses import replace

import pytest

from policies.cluster.changes import Arrival
from policies.decision.deciding import SchedulerMemory, decide, place
from policies.decision.devices import DivisionMemory
from policies.decision.limits import LiveLimits, Mode, Terms
from policies.decision.observation import Device, DeviceSeat, Observation
from policies.decision.recording import Epoch, epoch_line, parse_recording, terms_line
from policies.memory.plan import ModelMemory
from policies.model import Blocks, Bytes, PoolId, ReplicaId, RequestId, Tokens
from simulator.command.replay import play
from tests.policies.decision.observed import Watcher, observed

MODEL = ModelMemory(Bytes(0), Bytes(0), Bytes(0), Bytes(10), Blocks(5))
FIRST, SECOND = PoolId("first"), PoolId("second")
DECODE_RATE = 5.0
TERMS = Terms(limits=LiveLimits(linger_s=0.0, foresight_s=0.0), mode=Mode.ACT, decode_rate=DECODE_RATE)


class Shared:
    """Two pools on one device with room for `blocks` blocks of a token; replica `a` is in the first pool."""

    def __init__(self, mode: Mode = Mode.ACT, blocks: int = 100, decode_rate: float | None = DECODE_RATE) -> None:
        self.memory = SchedulerMemory(replace(TERMS, mode=mode, decode_rate=decode_rate))
        self.watchers = {pool: Watcher(self.memory.pool(pool)) for pool in (FIRST, SECOND)}
        self.sizes = {"a": 50, "b": 50}
        self.room = Bytes(blocks * 10)
        self.epochs: list[Epoch] = []

    def divide(self, first: str, second: str, now: float = 0.0) -> dict[str, int]:
        """The sizes of an epoch with these drawn pools; replicas have them in the next one."""
        reports = []
        for (pool, watcher), drawing in zip(self.watchers.items(), (first, second), strict=True):
            report = watcher.report(observed(drawing, now))
            reports.append(replace(report, pool=replace(report.pool, deployment=pool)))
        seats = tuple(
            DeviceSeat(ReplicaId(name), 1.0, MODEL, 1, Blocks(90), Blocks(size)) for name, size in self.sizes.items()
        )
        seen = Observation(now, tuple(reports), (Device("n", self.room, seats),))
        plans = decide(self.memory, seen)
        self.epochs.append(Epoch((), seen, plans, self.memory.division.newest))
        sizes = self.memory.division.newest.get("n", ())
        self.sizes |= {size.replica: size.blocks for size in sizes}
        return {size.replica: size.blocks for size in sizes}

    def want(self, name: str) -> int:
        (want,) = (size.want for size in self.memory.division.newest["n"] if size.replica == name)
        return want // 10


def test_what_one_pool_does_not_need_the_other_one_gets() -> None:
    shared = Shared()
    assert shared.divide("a: p60 q5?", "b:") == {"a": 90, "b": 10}
    assert shared.want("a") == 60 + 5 + 2 * 2 * DECODE_RATE, (
        "its requests, its queue, and two seconds of growth of each"
    )
    assert shared.divide("a: p60 q5?", "b:", 1.0) == {"a": 90, "b": 10}, "constant demand changes nothing"
    assert shared.divide("a:", "b: r60 s5?", 2.0) == {"a": 10, "b": 90}


def test_both_get_their_halves_where_there_is_too_little() -> None:
    assert Shared().divide("a: p40 q40?", "b: r90") == {"a": 50, "b": 50}


def test_requests_without_a_replica_count_for_the_newest_one() -> None:
    shared = Shared()
    shared.divide("a:", "b:")
    place(shared.memory.pool(FIRST), Arrival(RequestId("x"), Tokens(70)), 0.5, exclude=[ReplicaId("a")])
    shared.divide("a:", "b:", 1.0)
    assert shared.want("a") == 70 + 2 * DECODE_RATE


def test_requests_that_have_not_grown_yet_do_not_end_divisions() -> None:
    """A slow engine may decode nothing between two epochs in a row, and the first measured rate is 0."""
    shared = Shared(decode_rate=None)
    shared.divide("a: p60", "b:")
    assert shared.divide("a: p60", "b:", 0.1) and shared.want("a") == 60


def test_a_replica_that_stops_wants_no_more_than_it_uses() -> None:
    shared = Shared()
    shared.divide("a^: p30!", "b:")
    assert shared.want("a") == 30


def test_floors_are_given_even_where_a_starting_replica_leaves_less() -> None:
    assert Shared(blocks=8).divide("a: p60", "b:") == {"a": 5, "b": 5}


@pytest.mark.parametrize("mode", [Mode.ACT, Mode.OBSERVE])
def test_only_shrinks_that_are_ordered_are_remembered(mode: Mode) -> None:
    shared = Shared(mode)
    shared.sizes = {"a": 90, "b": 10}
    assert shared.divide("a: p60 q20", "b: r90")["a"] == 50
    assert shared.memory.division.shrunk_at == ({"a": 0.0} if mode is Mode.ACT else {})


def test_in_the_mode_off_nothing_is_divided() -> None:
    shared = Shared(Mode.OFF)
    assert shared.divide("a: p60", "b:") == {}
    shared.memory.set_mode(Mode.OBSERVE)
    assert shared.divide("a: p60", "b:", 1.0) != {}
    shared.memory.set_mode(Mode.OFF)
    assert shared.memory.division.newest == {}


def test_a_replay_of_a_recording_divides_again() -> None:
    shared = Shared()
    for now, first, second in ((0.0, "a: p60", "b:"), (1.0, "a: p60 q20", "b: r80"), (2.0, "a:", "b: r80")):
        shared.divide(first, second, now)
    lines = [terms_line(TERMS), *map(epoch_line, shared.epochs)]
    terms, epochs = parse_recording(lines, "recorded")
    assert [same for _, same in play(SchedulerMemory(terms), epochs)] == [True] * 3
    other = [replace(epoch, division={}) for epoch in shared.epochs]
    assert [same for _, same in play(SchedulerMemory(terms), iter(other))] == [False] * 3


def test_recordings_without_devices_have_no_member_for_them() -> None:
    line = json.loads(epoch_line(Epoch((), Observation(1.0, ()), {})))
    assert line.keys() == {"entries", "seen", "plans"} and line["seen"].keys() == {"now", "pools"}


def test_a_snapshot_of_all_replicas_begins_anew() -> None:
    shared = Shared()
    shared.sizes = {"a": 90, "b": 10}
    shared.divide("a: p60 q20", "b: r90")
    shared.watchers[FIRST].roster.restart()
    shared.divide("a: p30", "b: r90", 1.0)
    assert shared.memory.division.shrunk_at == {} and shared.memory.division != DivisionMemory()

"""Snapshots and changes of replicas come to the same observations, and so to the same memory and plans."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.decision.deciding import decide_pool
from policies.decision.limits import LiveLimits, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport
from policies.decision.reports import Report, Reporter, Roster, status_of
from policies.model import Phase, ReplicaId, ReplicaLoad, RequestId
from policies.rules.registry import POLICIES
from tests.policies.decision.observed import Drawn, observed

STATES = ["", "", "", "", "*", "^"]
MARKS = ["", "", "", "", "?", "~", ">", "!"]


def drawing(draw: random.Random, sizes: dict[str, int]) -> str:
    """A cluster of up to five replicas with those requests; now and then one is on two replicas."""
    replicas = [f"{name}{draw.choice(STATES)}:" for name in "abcde"[: draw.randrange(1, 6)]]
    for name, tokens in sizes.items():
        for index in draw.sample(range(len(replicas)), min(len(replicas), draw.choice([1, 1, 1, 1, 2]))):
            if "*" not in replicas[index]:
                replicas[index] += f" {name}{tokens}{draw.choice(MARKS)}"
    return " | ".join(replicas)


@st.composite
def histories(draw: st.DrawFn) -> list[Drawn]:
    """Requests that come, grow, go, and turn up elsewhere."""
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    sizes: dict[str, int] = {}
    history = []
    for at in range(draw(st.integers(1, 7))):
        for name in dice.sample(sorted(sizes), dice.randrange(0, len(sizes) + 1) // 2):
            del sizes[name]
        sizes = {name: tokens + dice.randrange(0, 9) for name, tokens in sizes.items()}
        sizes |= {dice.choice("pqrst") + dice.choice("uvwxyz"): dice.randrange(1, 60) for _ in range(dice.randrange(5))}
        history.append(observed(drawing(dice, sizes), float(at), most=6))
    return history


class Wire:
    """Replicas that report, and the scheduler's side. `forgets` says when a replica starts anew."""

    def __init__(self, changes: bool, dice: random.Random) -> None:
        self.roster = Roster()
        self.changes = changes
        self.dice = dice
        self.reporters: dict[ReplicaId, Reporter] = {}

    def observe(self, drawn: Drawn) -> PoolReport:
        self.roster.keep(load.id for load in drawn.loads)
        self.reporters = {replica: r for replica, r in self.reporters.items() if replica in {q.id for q in drawn.loads}}
        for load in drawn.loads:
            self.roster.take(self.report(load))
        return self.roster.observe(Pool(max_replicas=drawn.most))

    def report(self, load: ReplicaLoad) -> Report:
        if not self.changes:
            return Report(0, status_of(load), None, load.requests)
        if self.dice.random() < 0.1:
            self.reporters.pop(load.id, None)
        report = self.reporters.setdefault(load.id, Reporter()).report(load, self.roster.version(load.id))
        assert report.since is None or report.since == self.roster.version(load.id)
        return report


@given(st.sampled_from(sorted(POLICIES)), histories(), st.integers(0, 1 << 32))
def test_changes_and_snapshots_come_to_the_same(name: str, history: list[Drawn], seed: int) -> None:
    wires = [Wire(changes, random.Random(seed)) for changes in (False, True)]
    memories = [PoolMemory(Terms(name, LiveLimits(linger_s=0.0, foresight_s=0.0))) for _ in wires]
    for drawn in history:
        seen = [wire.observe(drawn) for wire in wires]
        assert seen[0] == seen[1]
        first, second = (decide_pool(memory, one, drawn.now) for memory, one in zip(memories, seen, strict=True))
        assert first == second
        places = [{q.id: (q.replica and q.replica.id, q.tokens) for q in m.cluster.requests.values()} for m in memories]
        assert places[0] == places[1]


@given(histories(), st.integers(0, 1 << 32))
def test_what_was_observed_adds_up_to_what_is_there(history: list[Drawn], seed: int) -> None:
    wire = Wire(True, random.Random(seed))
    there: dict[RequestId, tuple[ReplicaId | None, int]] = {}
    for drawn in history:
        seen = wire.observe(drawn)
        for gone in seen.gone:
            del there[gone]
        there |= {resident.load.id: (resident.replica, resident.load.tokens) for resident in seen.requests}
        there |= {name: (there[name][0], tokens) for name, tokens in seen.sizes.items()}
        places = {(load.id, request.id): request.tokens for load in drawn.loads for request in load.requests}
        assert set(there) == {name for _, name in places}
        assert all(places.get((replica or ReplicaId(""), name)) == tokens for name, (replica, tokens) in there.items())


def one(drawing: str) -> ReplicaLoad:
    (load,) = observed(drawing).loads
    return load


def test_a_replica_answers_its_last_version_with_changes_and_any_other_with_a_snapshot() -> None:
    reporter = Reporter()
    first = reporter.report(one("a: p10 q20"), None)
    second = reporter.report(one("a: p12 r30"), first.version)
    assert (first.since, [q.id for q in first.requests]) == (None, ["p", "q"])
    assert (second.since, [q.id for q in second.requests]) == (first.version, ["r"])
    assert (dict(second.sizes), second.gone) == ({"p": 12}, ("q",))
    assert reporter.report(one("a: p13"), first.version).since is None
    waiting = reporter.report(one("a: p13?"), reporter._version)
    assert [(q.id, q.phase) for q in waiting.requests] == [("p", Phase.WAITING)]


def test_changes_since_another_version_are_refused() -> None:
    roster, reporter = Roster(), Reporter()
    first = reporter.report(one("a: p10"), None)
    second = reporter.report(one("a: p11"), first.version)
    with pytest.raises(ValueError, match="changes since"):
        roster.take(second)
    roster.take(first)
    roster.take(second)
    assert roster.version(ReplicaId("a")) == second.version

"""The scheduler's part in the copies of a replica that stops: who has what, and who gets what."""

import asyncio
from typing import Any

import pytest

from deployments.scheduler.evacuating import Evacuations
from migration.protocol.errors import PeerLost
from policies.decision.reports import Roster
from policies.model import ReplicaId
from policies.prefix.change import CacheChange, Tier
from policies.prefix.evacuation import EVACUATION_S, CachedContext, ContextCopy
from policies.prefix.tree import PromptTree
from tests.deployments.scheduler.fakes import AnsweringReplica, FakeListing, Reporting, given, make_report

pytestmark = pytest.mark.virtual_time

A, B, C = (ReplicaId(name) for name in "abc")
COLD, HOT = CachedContext(1, (10, 11, 12), 60.0, 3), CachedContext(2, (20, 21), 1.0, 2)


class Caches:
    """Implements `RemoteReplicas[ControlApi]`: replicas with contexts, or with a fault instead."""

    def __init__(self, **contexts: Any) -> None:
        self.contexts = contexts
        self.fault: Any = None
        """The fault of copies."""
        self.ordered: list[tuple[Any, ...]] = []

    def at(self, replica: ReplicaId, routed: bool = True) -> AnsweringReplica:
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None: ...

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any:
        if call == "cached_contexts":
            assert args == (7,)
            return await given(self.contexts[replica])
        self.ordered.append((replica, call, *args))
        return await given(len(args[0]) if self.fault is None else self.fault)


async def evacuated(
    caches: Caches,
    free: dict[str, int],
    tree: PromptTree | None = None,
    listing: str = "abc",
    model: str = "",
    within_s: float = 60.0,
) -> None:
    """Stop replica a."""
    reporting, roster = Reporting(), Roster()
    for name, blocks in free.items():
        roster.take(reporting.report(make_report(name, blocks), None).report)
    clock = asyncio.get_running_loop().time
    found = tree or PromptTree(60.0)
    made = Evacuations(caches, roster, FakeListing(listing), lambda: found, lambda: (), 7, clock)
    await made.evacuate(A, model, within_s)


def order(*copies: tuple[int, ReplicaId], within_s: float = EVACUATION_S) -> tuple[Any, ...]:
    return A, "evacuate", tuple(ContextCopy(*copy) for copy in copies), within_s, 7


async def test_contexts_go_to_those_that_stay() -> None:
    caches = Caches(a=(HOT, COLD), b=(), c=())
    await evacuated(caches, {"a": 10, "b": 10, "c": 9})
    assert caches.ordered == [order((2, B), (1, C))]


async def test_what_another_replica_has_is_not_copied() -> None:
    tree = PromptTree(60.0)
    tree.apply(C, CacheChange({Tier.HBM: (20, 21, 22)}, {}, True))
    caches = Caches(a=(HOT, COLD), b=(), c=())
    await evacuated(caches, {"a": 10, "b": 10, "c": 9}, tree)
    assert caches.ordered == [order((1, B))]


async def test_hotter_contexts_of_another_replica_stay() -> None:
    caches = Caches(a=(HOT, COLD), b=(CachedContext(1, (30, 31), 30.0, 2),))
    await evacuated(caches, {"a": 10, "b": 4})
    assert caches.ordered == [order((2, B))], "the cold one would need three of the last two blocks"


async def test_replica_without_an_answer_gets_nothing() -> None:
    caches = Caches(a=(HOT, COLD), b=PeerLost("dead"), c=())
    await evacuated(caches, {"a": 10, "b": 10, "c": 9})
    assert caches.ordered == [order((2, C), (1, C))]


@pytest.mark.parametrize(
    ("contexts", "free"),
    [
        ({"a": (), "b": ()}, {"a": 10, "b": 10}),
        ({"a": (HOT,)}, {"a": 10}),
        ({"a": (HOT,), "b": ()}, {"a": 10, "b": 0}),
        ({"a": PeerLost("dead"), "b": ()}, {"a": 10, "b": 10}),
        ({"a": "silent", "b": ()}, {"a": 10, "b": 10}),
    ],
    ids=["nothing cached", "no other replica", "no room", "it is dead", "it does not answer"],
)
async def test_replica_stops_without_copies(contexts: dict[str, Any], free: dict[str, int]) -> None:
    caches = Caches(**{"a": ()} | contexts)
    await evacuated(caches, free)
    assert caches.ordered == []


async def test_replica_that_is_not_in_the_reports_any_more_is_emptied_nevertheless() -> None:
    caches = Caches(a=(HOT,), b=())
    await evacuated(caches, {"b": 10})
    assert caches.ordered == [order((2, B))]


async def test_replicas_with_another_model_get_nothing() -> None:
    caches = Caches(a=(HOT,), b=())
    await evacuated(caches, {"a": 10, "b": 10}, model="newer")
    assert caches.ordered == []


async def test_copies_end_with_the_time_that_the_replica_has() -> None:
    caches = Caches(a=(HOT,), b=())
    await evacuated(caches, {"b": 10}, within_s=4.0)
    assert caches.ordered == [order((2, B), within_s=4.0)]


@pytest.mark.parametrize("fault", [PeerLost("dead"), ValueError("a defect"), "silent"])
async def test_failed_copies_do_not_keep_the_replica(fault: Any) -> None:
    caches, began = Caches(a=(HOT,), b=()), asyncio.get_running_loop().time()
    caches.fault = fault
    await evacuated(caches, {"a": 10, "b": 10}, within_s=12.0)
    assert len(caches.ordered) == 1 and asyncio.get_running_loop().time() - began <= 12.0


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves, too", "gets no arrivals"])
async def test_replica_that_could_not_use_it_gets_nothing(leaves: bool) -> None:
    caches = Caches(a=(HOT,), b=(), c=())
    reporting, roster = Reporting(), Roster()
    for name in "abc":
        roster.take(reporting.report(make_report(name), None).report)
    listing = FakeListing("abc")
    if leaves:
        listing.leaving = lambda: (B,)  # type: ignore[method-assign]
    tree, clock = PromptTree(60.0), asyncio.get_running_loop().time
    barred = () if leaves else (B,)
    await Evacuations(caches, roster, listing, lambda: tree, lambda: barred, 7, clock).evacuate(A, "", 60.0)
    assert caches.ordered == [order((2, C))]

"""Replicas that are given up though they live, and return later: the tokens are those of an undisturbed run, and
no two replicas own the request, at any moment.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from migration.protocol.errors import MigrationError, PeerLost
from migration.protocol.messages import PathRequest
from migration.protocol.record import Outcome
from migration.protocol.tables.reader import TERM
from policies.causes import Cause
from policies.model import ReplicaId, RequestId
from tests.app.ingress.fakes import Service, eventually, make_service, output
from tests.app.ingress.streams.streaming import KV, LONG, TOKENS, whole
from tests.migration.world import spec

pytestmark = pytest.mark.virtual_time

A = ReplicaId("a")


def claims(service: Service, request: RequestId) -> list[tuple[str, int]]:
    """The replicas that run a request, publish it and hold it under no lease, each with its hop there."""
    found = []
    for replica in service.replicas.values():
        run = replica.host._runs.get(request)
        leased = run is not None and any(
            (coming.request, coming.hop) == (request, run.hop) for coming in replica.moves._coming.values()
        )
        if run is not None and not run.muted and not leased:
            found.append((str(replica.id), run.hop))
    return found


@asynccontextmanager
async def one_owner(service: Service, request: RequestId) -> AsyncIterator[None]:
    """At no moment in here do two replicas claim the request in the same term."""
    seen: list[list[tuple[str, int]]] = []

    async def look() -> None:
        while True:
            found = claims(service, request)
            if len({hop // TERM for _, hop in found}) < len(found):
                seen.append(found)
            await asyncio.sleep(0.002)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
    assert seen == []


@pytest.mark.parametrize("path", [KV, TOKENS])
async def test_source_out_of_reach_in_the_hand_over_lets_go_when_it_hears_of_its_reader(path: PathRequest) -> None:
    service, request = make_service("abc", order="acb"), spec(tokens=900)
    service.replica("b").faults["adopted"] = "silent"
    async with service.open(request) as conversation, one_owner(service, request.id):
        await service.reading(conversation, 10)
        service.move(request.id, "b", path)
        await eventually(lambda: "b" in service.hosts(request.id))
        service.wires.hushed.add(A)
        service.wires.cut("a", PeerLost("replica a said nothing", Cause.NO_ANSWER))
        await service.reading(conversation, 500)
        assert service.hosts(request.id) == "ab" and claims(service, request.id) == [("b", 1)]
        service.wires.hushed.clear()
        await eventually(lambda: service.hosts(request.id) == "b")
        assert await output(conversation) == whole(request)
    assert service.replica("a").moves.records()[0].outcome is Outcome.COMMITTED
    assert ("c", "submit") not in service.wires.calls
    await service.idle()


async def test_late_source_lets_go_of_a_request_submitted_elsewhere() -> None:
    """The target's lease runs out before the reader gives the source up."""
    service, request = make_service("abc", order="acb"), spec(tokens=900)
    service.replica("b").faults["adopted"] = "silent"
    async with service.open(request) as conversation, one_owner(service, request.id):
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: "b" in service.hosts(request.id))
        service.wires.hushed.add(A)
        await eventually(lambda: "b" not in service.hosts(request.id))
        service.wires.cut("a", PeerLost("replica a said nothing", Cause.NO_ANSWER))
        await eventually(lambda: "c" in service.hosts(request.id))
        assert claims(service, request.id) == [("c", TERM)], "the source goes on by itself"
        service.wires.hushed.clear()
        await eventually(lambda: service.hosts(request.id) == "c")
        assert await output(conversation) == whole(request)
    (record,) = service.replica("a").moves.records()
    assert (record.outcome, record.cause) == (Outcome.ABORTED, Cause.NO_ANSWER)
    await service.idle()


async def test_source_in_doubt_goes_on_by_its_readers_decision() -> None:
    service, request = make_service(), spec(tokens=900)
    service.replica("b").faults["adopted"] = service.replica("b").faults["cancel"] = "silent"
    async with service.open(request) as conversation, one_owner(service, request.id):
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        assert await output(conversation) == whole(request) and conversation.reader.host == "a"
    assert ("a", "keep") in service.wires.calls and service.scheduler.records == []
    await service.idle()


async def test_kept_source_that_dies_is_not_looked_for_at_the_target_it_gave_up() -> None:
    service, request = make_service("abc", order="acb", lease_s=60), spec(tokens=900)
    service.replica("b").faults["adopted"] = service.replica("b").faults["cancel"] = "silent"
    async with service.open(request) as conversation, one_owner(service, request.id):
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: ("a", "keep") in service.wires.calls)
        service.kill("a")
        assert await output(conversation) == whole(request) and conversation.reader.host == "c"
    assert ("b", "attach") not in service.wires.calls
    await service.idle()


async def test_replica_that_returns_gets_the_order_to_end_outdated_runs() -> None:
    service, request = make_service(step_s=0.01), spec(tokens=LONG)
    async with service.open(request) as conversation, one_owner(service, request.id):
        await service.reading(conversation, 10)
        service.wires.hushed.add(A)
        service.wires.cut("a", PeerLost("replica a said nothing", Cause.NO_ANSWER))
        await service.reading(conversation, 50)
        assert claims(service, request.id) == [("a", 0), ("b", TERM)]
        service.wires.hushed.clear()
        await eventually(lambda: service.hosts(request.id) == "b")
        assert await output(conversation) == whole(request)
    await service.idle()


@pytest.mark.parametrize("seed", range(60))
async def test_at_any_moment_and_for_any_time(seed: int) -> None:
    """Replicas out of reach of their reader, answers that do not come, and moves back and forth."""
    draw = random.Random(seed)
    service, request = make_service("abc", lease_s=draw.choice([0.1, 0.3, 1.0])), spec(tokens=900)

    async def disturb() -> None:
        while True:
            name = draw.choice("abc")
            replica = service.replica(name)
            if draw.random() < 0.3:
                faults: list[Exception | str] = ["silent", PeerLost("broken")]
                replica.faults[draw.choice(["adopt", "adopted", "cancel", "receive"])] = draw.choice(faults)
            if draw.random() < 0.3:
                replica.faults.clear()
            with contextlib.suppress(MigrationError, StopIteration):  # it is not to be moved now, or nowhere
                service.move(request.id, draw.choice("abc"), draw.choice([KV, TOKENS]))
            await asyncio.sleep(draw.choice([0.001, 0.005, 0.02, 0.3]))
            if draw.random() < 0.4 and not service.wires.hushed:
                service.wires.hushed.add(replica.id)
                await asyncio.sleep(draw.choice([0.001, 0.05, 0.4]))
                service.wires.cut(name, PeerLost(f"replica {name} said nothing", Cause.NO_ANSWER))
                await asyncio.sleep(draw.choice([0.001, 0.05, 0.4, 1.5]))
                service.wires.hushed.clear()

    async with service.open(request) as conversation, one_owner(service, request.id):
        disturbing = asyncio.create_task(disturb())
        try:
            assert await output(conversation, within_s=120) == whole(request)
        finally:
            disturbing.cancel()
            service.wires.hushed.clear()
    for replica in service.replicas.values():
        replica.faults.clear()
    await service.idle()

"""A reader that asks a target for its request, while the source's word is on its way."""

import asyncio
import contextlib
from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from migration.protocol.continuing import plain_spec
from migration.protocol.ports import Prospects
from migration.protocol.reading import Output, Reader
from migration.protocol.request import Delta, Moved, Moving, RequestSpec
from migration.protocol.tables.reader import TERM, ReaderState
from migration.run.reader import ReaderRun, ReaderWorld
from policies.model import ReplicaId, RequestId
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time
R = RequestId("r")
A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")


class Calls:
    """Implements `Hosts`: replicas that take everything. A question to a replica waits for its `answers`."""

    awake = (A, B, C)
    prospects = Prospects()

    def __init__(self) -> None:
        self.answers: dict[ReplicaId, asyncio.Future[bool]] = {}
        self.submitted: list[tuple[ReplicaId, int]] = []
        self.released: list[tuple[ReplicaId, int | None]] = []

    async def changed(self, within_s: float) -> bool:
        await asyncio.sleep(within_s)
        return False

    def reachable(self, replica: ReplicaId) -> bool:
        return True

    async def place(self, spec: RequestSpec, outputs: int, exclude: AbstractSet[ReplicaId]) -> ReplicaId | None:
        return next(replica for replica in self.awake if replica not in exclude)

    async def submit(self, replica: ReplicaId, spec: RequestSpec, hop: int, *_: Any) -> str:
        self.submitted.append((replica, hop))
        return "model"

    async def attach(self, replica: ReplicaId, request: RequestId, hop: int, index: int) -> bool:
        answer = self.answers.get(replica)
        while answer is not None and not answer.done():
            with contextlib.suppress(asyncio.CancelledError):  # Too late: the answer is on its way.
                await asyncio.wait([answer])
        return answer.result() if answer is not None else True

    async def keep(self, replica: ReplicaId, request: RequestId, hop: int, next_hop: int) -> None: ...

    async def release(self, replica: ReplicaId, request: RequestId, hop: int | None) -> None:
        self.released.append((replica, hop))
        await asyncio.sleep(1.0)


class Silent:
    """Implements `Journal` and `Listener`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def deliver(self, output: Output) -> None:
        self.tokens.extend(output.tokens)

    def lost(self, *_: Any, **__: Any) -> None: ...

    def hosted(self, *_: Any) -> None: ...

    def took(self, *_: Any) -> None: ...

    def continued(self, *_: Any) -> None: ...


async def finding(hosts: Calls, ear: Silent) -> ReaderRun:
    """A reader that has lost replica a during a move, and asks b."""
    world = ReaderWorld(hosts, ear, now, patience_s=1.0, max_engine_losses=2)
    run = ReaderRun(plain_spec("r", (1, 2), 8), Reader(), ear, world)
    await run.start()
    run.take(Delta(R, 0, 0, (10,)), A)
    run.take(Moving(R, 0, 1, B), A)
    hosts.answers[B] = asyncio.get_running_loop().create_future()
    run.host_lost(A, "its stream broke")
    await asyncio.sleep(0.1)
    assert run.reader.state is ReaderState.FINDING
    return run


async def test_the_late_answer_of_a_target_is_never_fed() -> None:
    hosts, ear = Calls(), Silent()
    run = await finding(hosts, ear)
    question = hosts.answers.pop(B)
    run.take(Moved(R, 0, 1, 1, B), A)
    run.take(Moving(R, 1, 2, C), B)
    question.set_result(True)
    await asyncio.sleep(0.1)
    assert (run.reader.state, run.reader.host, run.reader.cursor.hop) == (ReaderState.MOVING, B, 1)
    run.take(Delta(R, 1, 1, (11,)), B)
    run.take(Moved(R, 1, 2, 2, C), B)
    run.take(Delta(R, 2, 2, (12,)), C)
    await asyncio.sleep(0.1)
    run.host_lost(C, "it died")
    await asyncio.sleep(0.1)
    assert ear.tokens == [10, 11, 12] and hosts.submitted == [(A, 0), (A, TERM)]


async def test_an_order_to_end_later_runs_waits_for_no_earlier_one() -> None:
    hosts, ear = Calls(), Silent()
    run = ReaderRun(plain_spec("r", (1, 2), 8), Reader(), ear, ReaderWorld(hosts, ear, now, 1.0, 2))
    await run.start()
    run.take(Moving(R, 0, 1, B), A)
    run.take(Moved(R, 0, 1, 0, B), A)
    run.take(Delta(R, 0, 0, (10,)), A)  # A has not heard that it is over
    await asyncio.sleep(0.1)
    run.take(Moving(R, 1, 2, A), B)
    run.take(Moved(R, 1, 2, 0, A), B)
    await asyncio.sleep(0.1)
    run.leave()
    await asyncio.sleep(0.1)
    assert hosts.released[0] == (A, 1) and (A, None) in hosts.released

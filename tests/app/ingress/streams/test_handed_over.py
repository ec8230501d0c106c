"""Moves that come with submissions: what the end, the refusal or the silence of each party costs in each phase.

A request is prefilled on a and moves on to b; c runs, too. The rows are those of the table in docs/policies.md.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from deployments.api.calls import PlaceCall
from migration.protocol.errors import PeerLost, Refused, TransferFailed
from migration.protocol.record import MigrationRecord, Outcome
from migration.protocol.request import RequestSpec
from policies.causes import Cause
from policies.decision.placement import Decision, Place
from policies.model import ReplicaId
from policies.plan import Move, Path, Reason
from tests.app.ingress.fakes import Conversation, Service, eventually, make_service, output
from tests.app.ingress.streams.streaming import SLOW_S, whole
from tests.deployments.engine.quick_engine import set_pace
from tests.migration.world import spec

pytestmark = pytest.mark.virtual_time

A, B = ReplicaId("a"), ReplicaId("b")
Fault = Exception | str
NO_FAULTS: Mapping[str, Fault] = {}

LASTING: dict[str, dict[str, Fault]] = {
    "prepare": {"prepare": "silent"},
    "handover": {"adopt": "silent"},
    "handover, b has it": {"adopted": "silent"},
}
"""The phases that last because b does not answer."""

UNNOTICED = ["prepare", "follow"]
"""The phases before the first token, of which the reader knows nothing."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """A service, and a request on its move."""

    service: Service
    request: RequestSpec
    conversation: Conversation

    @property
    def record(self) -> MigrationRecord:
        """The record of the move."""
        return self.service.replica("a").moves.records()[-1]

    def lose(self, name: str) -> None:
        """A replica dies, and Serve tells the others so."""
        self.service.kill(name)
        self.service.replica("a").moves.outgoing.follow(self.service.members.running)

    async def over(self) -> MigrationRecord:
        """The record once a has ended the move."""
        await eventually(lambda: self.record.outcome is not None)
        return self.record

    async def answered(self) -> None:
        """The client gets all tokens."""
        assert await output(self.conversation) == whole(self.request)

    @property
    def submissions(self) -> str:
        """The replicas to which the request was submitted, in turn."""
        return "".join(replica for replica, method in self.service.wires.calls if method == "submit")


def with_moves(service: Service) -> None:
    """Have the scheduler place requests on a with their move to b."""
    decide = service.scheduler.decide

    def decide_with_move(call: PlaceCall) -> Decision:
        decision = decide(call)
        if not isinstance(decision, Place) or decision.replica != A:
            return decision
        return replace(decision, then=Move(call.arrival.id, A, B, call.arrival.tokens, Reason.DISAGGREGATE, 1, Path.KV))

    service.scheduler.decide = decide_with_move  # type: ignore[method-assign]


@asynccontextmanager
async def handing_over(
    phase: str = "", faults: Mapping[str, Fault] = NO_FAULTS, prompt: int = 100
) -> AsyncIterator[HandOver]:
    """A request whose move is in a phase; its prefill takes seven steps. In the end nothing is left of it anywhere.

    `faults` are b's, by its calls.
    """
    service, request = make_service("abc", order="acb", step_s=SLOW_S, lease_s=1.0), spec(prompt=prompt)
    with_moves(service)
    for replica in service.replicas.values():
        set_pace(replica.engine, max_num_batched_tokens=16)
    service.replica("b").faults |= {**LASTING.get(phase, {}), **faults}
    async with service.open(request) as conversation:
        made = HandOver(service, request, conversation)
        if phase == "follow":
            await asyncio.sleep(2.5 * SLOW_S)
            assert made.record.blocks > 0
        elif phase == "handover, b has it":
            await eventually(lambda: "b" in service.hosts(request.id))
        elif phase == "committed":
            await eventually(lambda: made.record.outcome is Outcome.COMMITTED)
        if phase:
            await eventually(lambda: made.record.state == phase.split(",")[0])
        yield made
    service.wires.hushed.clear()
    await service.idle()


# --- the order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [3, 17, 100])
async def test_every_prefill_is_followed_however_short(prompt: int) -> None:
    async with handing_over(prompt=prompt) as made:
        await made.answered()
        assert (made.record.outcome, made.record.path) == (Outcome.COMMITTED, Path.KV)
        assert made.record.waited_s > 0 and made.record.tokens == prompt + 1, "frozen behind the first token"


async def test_move_that_cannot_begin_costs_nothing() -> None:
    service, request = make_service("ab"), spec()
    with_moves(service)
    service.tie()
    async with service.open(request) as conversation:
        assert await output(conversation) == whole(request)
    assert service.replica("a").moves.records() == []


# --- the replica of the prefill -----------------------------------------------------------------------


@pytest.mark.parametrize("phase", [*UNNOTICED, "handover"])
async def test_prefill_replica_dies_while_it_alone_has_the_request(phase: str) -> None:
    async with handing_over(phase) as made:
        made.lose("a")
        await made.answered()
        assert made.submissions == "ac"


async def test_prefill_replica_dies_once_the_other_one_has_the_request() -> None:
    async with handing_over("handover, b has it") as made:
        made.lose("a")
        await made.answered()
        assert made.submissions == "a", "its reader has found it on b"


@pytest.mark.parametrize("phase", UNNOTICED)
async def test_prefill_replica_stands_still(phase: str) -> None:
    """Its reader waits no longer than for a dead stream, and a's later word counts for nothing."""
    async with handing_over(phase) as made:
        made.service.wires.hushed.add(A)
        made.service.wires.cut("a", PeerLost("nothing comes"))
        made.service.members.become("b", "c")
        await made.answered()
        assert made.submissions == "ac"


@pytest.mark.parametrize("phase", ["prepare", "follow", "handover", "committed"])
async def test_prefill_replica_that_stops_hands_over_all_the_same(phase: str) -> None:
    async with handing_over(phase) as made:
        made.service.replica("a").moves.stop()
        made.service.replica("b").faults.clear()
        await made.answered()
        assert made.submissions == "a"


# --- the replica that decodes -------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [*UNNOTICED, "handover", "handover, b has it"])
async def test_decode_replica_dies_before_it_owns_the_request(phase: str) -> None:
    async with handing_over(phase) as made:
        made.lose("b")
        record = await made.over()
        await made.answered()
        assert (record.outcome, record.cause) == (Outcome.ABORTED, Cause.PEER_LOST)
        assert (record.pause_s is None) is (phase in UNNOTICED)
        assert made.submissions == "a", "it decodes where it was prefilled"


async def test_decode_replica_dies_with_the_request() -> None:
    async with handing_over("committed") as made:
        await made.service.reading(made.conversation, 5)
        made.lose("b")
        await made.answered()
        assert made.submissions == "aa"
        assert [record.source for record in made.service.scheduler.records] == [B]


@pytest.mark.parametrize("call", ["prepare", "adopt"])
async def test_decode_replica_refuses(call: str) -> None:
    async with handing_over(faults={call: Refused("no room", Cause.NO_ROOM)}) as made:
        record = await made.over()
        await made.answered()
        assert record.outcome is (Outcome.REFUSED if call == "prepare" else Outcome.ABORTED)
        assert (record.cause, made.submissions) == (Cause.NO_ROOM, "a")


@pytest.mark.parametrize("call", ["prepare", "adopt"])
async def test_decode_replica_does_not_answer(call: str) -> None:
    async with handing_over(faults={call: "silent"}) as made:
        record = await made.over()
        await made.answered()
        assert (record.outcome, record.cause, made.submissions) == (Outcome.ABORTED, Cause.NO_ANSWER, "a")


@pytest.mark.parametrize("phase", [*UNNOTICED, "handover"])
async def test_decode_replica_stops(phase: str) -> None:
    async with handing_over(phase) as made:
        made.service.replica("b").moves.stop()
        made.service.replica("b").faults.clear()
        record = await made.over()
        await made.answered()
        assert record.outcome is not Outcome.COMMITTED and (record.pause_s is None) is (phase in UNNOTICED)
        assert made.submissions == "a"


# --- the link, the scheduler, and the client ----------------------------------------------------------


@pytest.mark.parametrize("call", ["load", "receive"])
@pytest.mark.parametrize("fault", [TransferFailed("cut"), "silent"], ids=["fails", "is silent"])
async def test_link_that_fails_leaves_the_prefill_alone_and_turns_to_tokens(call: str, fault: Fault) -> None:
    async with handing_over(faults={call: fault}) as made:
        await made.answered()
        assert (made.record.outcome, made.record.path, made.submissions) == (Outcome.COMMITTED, Path.TOKENS, "a")
        assert made.record.fell_back or made.record.blocks == 0


@pytest.mark.parametrize("phase", ["prepare", "follow", "handover", "committed"])
async def test_scheduler_dies_meanwhile(phase: str) -> None:
    async with handing_over(phase) as made:
        made.service.scheduler.fault = "silent"
        made.service.replica("b").faults.clear()
        await made.answered()
        assert made.submissions == "a"


async def test_while_the_scheduler_is_away_requests_stay_where_they_are_prefilled() -> None:
    service, request = make_service("ab"), spec()
    with_moves(service)
    service.scheduler.fault = "silent"
    async with service.open(request) as conversation:
        assert await output(conversation) == whole(request)
    assert [record for replica in service.replicas.values() for record in replica.moves.records()] == []


@pytest.mark.parametrize("phase", [*LASTING, "follow", "committed"])
async def test_client_that_leaves_leaves_nothing(phase: str) -> None:
    async with handing_over(phase) as made:
        assert made.conversation.reader.cursor.finish is None

"""Every cause comes from the code that finds it, and arrives where it is read: in the record, or in the answer."""

import pickle
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments.engine.paced import PacedEngine
from deployments.replica.deployment import EngineReplica
from deployments.scheduler import scaler
from migration.protocol import errors
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import MigrationError, PeerLost, Refused, Stopping, TransferFailed, TransferTimeout
from migration.protocol.messages import PathRequest
from migration.protocol.record import MigrationRecord, Outcome
from migration.run.slots import Slots
from migration.run.world import MigrationLimits
from policies.causes import Cause
from policies.model import RequestId
from policies.plan import Path
from tests.deployments.engine.quick_engine import preempt, tie
from tests.deployments.scheduler.test_scaler import World as ScalerWorld
from tests.migration.world import Pair, make_pair, spec

R = RequestId("r")
pytestmark = pytest.mark.virtual_time
SHORT = MigrationLimits(prepare_s=0.1, copy_s=0.1, final_s=0.1, adopt_s=0.1)


async def begun(**knobs: Any) -> Pair:
    """Two replicas; request r decodes on a."""
    pair = make_pair(limits=SHORT, **knobs)
    await pair.until(pair.submit(spec(tokens=600)), 10)
    return pair


async def moved(pair: Pair, path: PathRequest = PathRequest.KV) -> MigrationRecord:
    pair.move(R, path=path)
    return await pair.settled()


def ends(record: MigrationRecord, outcome: Outcome, cause: Cause) -> None:
    assert (record.outcome, record.cause) == (outcome, cause) and record.error
    assert record.to_json()["cause"] == cause.value


def goes_by_tokens(record: MigrationRecord, cause: Cause) -> None:
    assert (record.outcome, record.path, record.cause) == (Outcome.COMMITTED, Path.TOKENS, cause)
    assert record.error is None


async def test_what_goes_as_ordered_has_no_cause() -> None:
    for path in (PathRequest.KV, PathRequest.TOKENS):
        record = await moved(await begun(), path)
        assert (record.outcome, record.path, record.cause) == (Outcome.COMMITTED, path.first, None)


async def test_the_request_ends_by_itself() -> None:
    pair = make_pair(limits=SHORT)
    await pair.until(pair.submit(spec(tokens=12)), 10)
    pair.b.faults["prepare"] = "silent"
    ends(await moved(pair), Outcome.ABORTED, Cause.REQUEST_ENDED)


async def test_the_client_leaves() -> None:
    pair = await begun()
    pair.b.faults["prepare"] = "silent"
    pair.move(R)
    pair.a.moves.release(R, None)
    ends(await pair.settled(), Outcome.ABORTED, Cause.CLIENT_GONE)


@pytest.mark.parametrize(
    ("cause", "prepare"),
    [
        (Cause.NO_ROOM, lambda pair: setattr(pair.b, "room", 5)),
        (Cause.STOPPING, lambda pair: pair.b.moves.stop()),
        (Cause.ALREADY_THERE, lambda pair: pair.b.host.submit(spec(), 0, ())),
    ],
)
async def test_the_target_refuses(cause: Cause, prepare: Callable[[Pair], None]) -> None:
    pair = await begun()
    prepare(pair)
    ends(await moved(pair), Outcome.REFUSED, cause)


async def test_the_models_or_the_caches_differ() -> None:
    ends(await moved(await begun(model_b="other")), Outcome.REFUSED, Cause.FINGERPRINT)
    ends(await moved(await begun(cache_b="other")), Outcome.REFUSED, Cause.FINGERPRINT)
    goes_by_tokens(await moved(await begun(cache_b="other"), PathRequest.AUTO), Cause.FINGERPRINT)


async def test_the_target_has_given_the_migration_up() -> None:
    """Its lease has run out when the source hands the request over."""
    pair = await begun()
    adopt = pair.b.moves.adopt

    async def late(message: Any) -> None:
        pair.b.moves.cancel(message.migration)
        await adopt(message)

    pair.b.moves.adopt = late  # type: ignore[method-assign]
    ends(await moved(pair), Outcome.ABORTED, Cause.MIGRATION_GONE)


@pytest.mark.parametrize("call", ["prepare", "receive", "adopt"])
async def test_the_target_dies(call: str) -> None:
    pair = await begun()
    pair.b.faults[call] = PeerLost("dead")
    ends(await moved(pair), Outcome.ABORTED, Cause.PEER_LOST)


async def test_the_target_is_found_dead() -> None:
    pair = await begun()
    pair.b.faults["prepare"] = "silent"
    pair.move(R)
    pair.a.moves.outgoing.follow([pair.a.id])
    ends(await pair.settled(), Outcome.ABORTED, Cause.PEER_LOST)


@pytest.mark.parametrize("call", ["prepare", "adopt"])
async def test_the_target_does_not_answer(call: str) -> None:
    pair = await begun()
    pair.b.faults[call] = "silent"
    ends(await moved(pair), Outcome.ABORTED, Cause.NO_ANSWER)


@pytest.mark.parametrize("call", ["prepare", "adopt"])
async def test_what_nobody_expected(call: str) -> None:
    pair = await begun()
    pair.b.faults[call] = ValueError("a mistake of ours")
    ends(await moved(pair), Outcome.ABORTED, Cause.UNEXPECTED)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("silent", Cause.TRANSFER_TIMEOUT),
        (TransferTimeout("not in time"), Cause.TRANSFER_TIMEOUT),
        (TransferFailed("broken"), Cause.TRANSFER_FAILED),
        (ValueError("a mistake of ours"), Cause.UNEXPECTED),
    ],
    ids=["silent", "late", "broken", "unexpected"],
)
async def test_blocks_do_not_arrive(fault: Exception | str, cause: Cause) -> None:
    pair = await begun()
    pair.b.faults["receive"] = fault
    goes_by_tokens(await moved(pair), cause)


async def test_there_are_no_blocks() -> None:
    pair = await begun()
    preempt(pair.a.engine)
    goes_by_tokens(await moved(pair), Cause.BLOCKS_GONE)


async def test_no_slot_is_free() -> None:
    slots = Slots(1, 64)
    lease = await slots.lease(1.0)
    with pytest.raises(TransferTimeout) as caught:
        await slots.lease(0.01)
    assert caught.value.cause is Cause.NO_SLOT
    lease.end()
    slots.close()


# --- orders and calls that are refused: nothing begins ------------------------------------------------


async def order(prepare: Callable[[Pair], object], target: str = "b") -> None:
    pair = await begun()
    prepare(pair)
    pair.move(R, target=target)


async def too_long() -> None:
    pair = await begun()
    pair.a.host.submit(spec("long", tokens=1 << 20), 0, ())


async def not_exact() -> None:
    pair = await begun()
    tie(pair.b.engine)
    pair.b.host.submit(spec(), 1, (1, 2))


async def not_empty() -> None:
    host, moves = SimpleNamespace(loads=lambda: [R]), SimpleNamespace(pending=0)
    await cast(Any, EngineReplica).close(SimpleNamespace(_check_fence=lambda _: None, _host=host, _moves=moves), 1)


async def superseded() -> None:
    cast(Any, EngineReplica)._check_fence(SimpleNamespace(_fence=7), 3)


REFUSALS: list[tuple[Cause, Callable[[], Awaitable[None]]]] = [
    (Cause.ALREADY_MOVING, lambda: order(lambda pair: pair.move(R))),
    (Cause.ALREADY_THERE, lambda: order(lambda pair: None, target="a")),
    (Cause.IMMOVABLE, lambda: order(lambda pair: tie(pair.a.engine))),
    (Cause.IMMOVABLE, not_exact),
    (Cause.TOO_LONG, too_long),
    (Cause.SUPERSEDED, superseded),
    (Cause.NOT_EMPTY, not_empty),
    (Cause.ADAPTER, lambda: PacedEngine.load_adapter(cast(Any, None), Adapter("a", 1, "/a"))),
    (Cause.NOT_RUNNING, lambda: ScalerWorld().scaler.drain(cast(Any, "c"), 1)),
]


@pytest.mark.parametrize(("cause", "ask"), REFUSALS, ids=[cause for cause, _ in REFUSALS])
async def test_a_call_is_refused(
    monkeypatch: pytest.MonkeyPatch, cause: Cause, ask: Callable[[], Awaitable[None]]
) -> None:
    monkeypatch.setattr(scaler, "generation", lambda: "g")
    monkeypatch.setattr(scaler, "read_bounds", lambda app, pool, generation, configured: configured)
    with pytest.raises(Refused) as caught:
        await ask()
    assert caught.value.cause is cause


# --- on the way ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        Refused("no room", Cause.NO_ROOM),
        Stopping("stopping"),
        PeerLost("dead"),
        TransferTimeout("slots", Cause.NO_SLOT),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_cause_survives_the_way_between_processes(error: MigrationError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.cause) == (type(error), str(error), error.cause)


def test_every_error_says_what_it_is() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MigrationError)]
    own = {kind: kind("text").cause for kind in kinds if kind is not Refused}
    assert {kind for kind, cause in own.items() if cause is Cause.UNEXPECTED} == {MigrationError, errors.IllegalEvent}

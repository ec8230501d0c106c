"""Which replica a call goes to, and how Ray's errors about it are told. Serve's router base is left out."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.exceptions import ReplicaUnavailableError

from deployments.routing import TargetRouter, Unrouted, _peer_errors
from migration.errors import PeerLost, Refused
from policies.model import ReplicaId


@dataclass(eq=False)
class Pending:
    """A request that waits for a replica."""

    target: str = ""
    future: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    routing_context: Any = field(default_factory=SimpleNamespace)

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(session_id=self.target)


class Router(TargetRouter):
    """The router without what Serve's base class connects to."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths = {replica(name).replica_id: length for name, length in lengths.items()}
        self.removed: list[Pending] = []

    @property
    def replica_queue_len_cache(self) -> Any:
        return self.lengths

    def _record_queue_wait_time(self, pending: Any) -> None:
        pass

    def _remove_pending_request_from_indices(self, pending: Any) -> None:
        self.removed.append(pending)


@dataclass(frozen=True)
class Id:
    unique_id: str


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=Id(name))


async def choice(target: str, names: str = "abc", **lengths: int) -> str:
    """The replica that a request is settled on."""
    router, pending = Router(lengths), Pending(target)
    await router.choose_replicas([replica(name) for name in names], pending)
    assert router.removed == [pending]
    return str((await pending.future).replica_id.unique_id)


@pytest.mark.parametrize("target", ["a", "b", "c"])
async def test_a_request_goes_to_the_replica_it_names(target: str) -> None:
    assert await choice(target, a=0, b=5, c=100) == target


@pytest.mark.parametrize("target", ["d", "A", "ab"])
async def test_a_request_to_a_replica_that_is_not_listed_fails_at_once(target: str) -> None:
    with pytest.raises(ReplicaUnavailableError):
        await choice(target)


async def test_a_request_that_names_none_goes_to_the_less_busy_of_two() -> None:
    assert {await choice("", "ab", a=5, b=1) for _ in range(20)} == {"b"}


async def test_of_many_replicas_the_busiest_is_never_chosen() -> None:
    assert {await choice("", "abc", a=9, b=1, c=1) for _ in range(100)} == {"b", "c"}


async def test_a_replica_of_unknown_length_counts_as_free() -> None:
    assert {await choice("", "ab", a=1) for _ in range(20)} == {"b"}


async def test_one_replica_serves_what_names_none() -> None:
    assert await choice("", "a") == "a"


async def test_a_request_that_was_cancelled_meanwhile_stays_so() -> None:
    router, pending = Router({}), Pending("a")
    pending.future.cancel()
    await router.choose_replicas([replica("a")], pending)
    assert pending.future.cancelled() and router.removed == []


async def test_without_replicas_a_request_goes_on_waiting() -> None:
    router, pending = Router({}), Pending("a")
    assert await router.choose_replicas([], pending) == []
    assert not pending.future.done()


async def test_without_a_request_nothing_is_chosen() -> None:
    assert await Router({}).choose_replicas([replica("a")], None) == []


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ReplicaUnavailableError("a"), Unrouted),
        (RayActorError(), PeerLost),
        (ActorUnavailableError("away", None), PeerLost),
        (Refused("no"), Refused),
        (ValueError("ours"), ValueError),
    ],
    ids=["not routable", "dead", "unavailable", "refused", "another error"],
)
def test_errors_about_a_replica_are_told_in_our_words(raised: Exception, told: type[Exception]) -> None:
    with pytest.raises(told) as caught, _peer_errors(ReplicaId("a")):
        raise raised
    assert type(caught.value) is told

"""What Serve's controller lists, and what follows of it."""

from enum import Enum
from typing import Any

import pytest

from deployments.scheduler.listing import ServeListing
from policies.model import SOLE_POOL, ReplicaId, ReplicaState


class Details:
    """Serve's controller, with one word on each replica."""

    def __init__(self, **states: Any) -> None:
        self.states = states
        self.application: dict[str, Any] = {}
        self.get_serve_instance_details = self

    async def remote(self) -> dict[str, Any]:
        replicas = [{"replica_id": r, "state": state, "node_id": None} for r, state in self.states.items()]
        return {"applications": {"app": self.application | {"deployments": {SOLE_POOL: {"replicas": replicas}}}}}


class Word(Enum):
    """Serve's states are enums in some versions, strings in others."""

    RUNNING = "RUNNING"
    STARTING = "STARTING"


async def listed(monkeypatch: pytest.MonkeyPatch, **states: Any) -> ServeListing:
    """What Serve's controller has said."""
    listing = ServeListing("app", SOLE_POOL, 1.0)
    monkeypatch.setattr("deployments.scheduler.listing.controller", lambda: Details(**states))
    await listing.refresh()
    return listing


@pytest.mark.parametrize(
    ("state", "known_as"),
    [
        ("STARTING", ReplicaState.STARTING),
        (Word.STARTING, ReplicaState.STARTING),
        ("RECOVERING", ReplicaState.STARTING),
        ("STOPPING", ReplicaState.DRAINING),
        (Word.RUNNING, ReplicaState.DRAINING),
        ("PENDING_MIGRATION", ReplicaState.DRAINING),
    ],
)
async def test_what_only_serve_knows_has_no_room(
    monkeypatch: pytest.MonkeyPatch, state: Any, known_as: ReplicaState
) -> None:
    (status,) = (await listed(monkeypatch, x=state)).others(())
    assert (status.id, status.state, status.node, status.free_blocks) == ("x", known_as, "", 0)


@pytest.mark.parametrize(("state", "leaving"), [("RUNNING", ()), ("STOPPING", ("a",)), ("PENDING_MIGRATION", ("a",))])
async def test_replicas_that_serve_stops_or_is_about_to_stop_are_leaving(
    monkeypatch: pytest.MonkeyPatch, state: str, leaving: tuple[str, ...]
) -> None:
    assert (await listed(monkeypatch, a=state, b="RUNNING")).leaving() == leaving


async def test_a_stopping_replica_still_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    listing, b = await listed(monkeypatch, a="RUNNING", b="STOPPING"), ReplicaId("b")
    assert listing.stopping() == (b,) and not listing.others({ReplicaId("a"), b})
    assert (listing.wanted_by_serve, listing.runs(b), listing.lists(b)) == (1, False, True)


async def test_while_the_controller_is_away_its_last_list_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = await listed(monkeypatch, x="STARTING")
    monkeypatch.setattr("deployments.scheduler.listing.controller", lambda: None)
    await listing.refresh()
    assert listing.listed and listing.lists(ReplicaId("x"))


async def test_before_the_first_answer_nothing_is_listed() -> None:
    listing = ServeListing("app", SOLE_POOL, 1.0)
    assert not listing.listed and listing.wanted_by_serve == 0 and not listing.lists(ReplicaId("x"))


@pytest.mark.parametrize(("before", "stopping"), [("STARTING", ()), ("RUNNING", ("a",)), (None, ("a",))])
async def test_a_replica_that_never_started_has_nothing_to_report_when_serve_stops_it(
    monkeypatch: pytest.MonkeyPatch, before: str | None, stopping: tuple[str, ...]
) -> None:
    listing = await listed(monkeypatch, **({"a": before} if before else {}))
    monkeypatch.setattr("deployments.scheduler.listing.controller", lambda: Details(a="STOPPING"))
    for _ in range(2):
        await listing.refresh()
        assert listing.stopping() == stopping and listing.leaving() == ("a",)


async def test_after_an_outage_of_the_controller_every_replica_may_have_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listing = await listed(monkeypatch, a="STARTING")
    current = [listing.is_current]
    monkeypatch.setattr("deployments.scheduler.listing.controller", lambda: None)
    await listing.refresh()
    current.append(listing.is_current)
    assert listing.lists(ReplicaId("a"))
    monkeypatch.setattr("deployments.scheduler.listing.controller", lambda: Details(a="STOPPING"))
    await listing.refresh()
    current.append(listing.is_current)
    assert current == [True, False, True] and listing.stopping() == ("a",)


@pytest.mark.parametrize(("config", "at"), [({"name": "app"}, 5.0), (None, None)], ids=["serve deploy", "serve.run"])
async def test_the_time_of_a_deployment_is_known_if_serve_keeps_it(
    monkeypatch: pytest.MonkeyPatch, config: Any, at: float | None
) -> None:
    details = Details(a="RUNNING")
    details.application = {"last_deployed_time_s": 5.0, "deployed_app_config": config}
    listing = ServeListing("app", SOLE_POOL, 1.0)
    monkeypatch.setattr("deployments.scheduler.listing.controller", lambda: details)
    await listing.refresh()
    assert listing.deployed_at == at

"""Gathering reports from replicas of which some are slow, dead, or obey another scheduler."""

import asyncio
from enum import Enum
from typing import Any

import pytest

from deployments.cluster import Cluster
from deployments.membership import Membership
from deployments.report import ReplicaReport
from deployments.routing import Replicas
from migration.errors import PeerLost, Refused
from policies.causes import Cause
from policies.model import Blocks, ReplicaId, ReplicaLoad, ReplicaState, RequestLoad, Tokens

TIMEOUT_S = 0.05


def make_report(name: str, free: int = 10, requests: tuple[RequestLoad, ...] = ()) -> ReplicaReport:
    load = ReplicaLoad(
        ReplicaId(name), ReplicaState.RUNNING, "node", Tokens(1024), 4, Blocks(free), 64, requests=requests
    )
    return ReplicaReport(load, (1, 2, 3), 0, 0, 0, 1, ())


class Answers(Replicas):
    """What replicas say: a report, an error, or nothing ("silent")."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    async def call(self, replica: ReplicaId, method: str, *args: Any) -> Any:
        self.asked.append((replica, method, *args))
        await asyncio.sleep(0)
        answer = self.answers[replica]
        if answer == "silent":
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Running(Membership):
    """The replicas that run."""

    def __init__(self, names: str) -> None:
        self.running = tuple(ReplicaId(name) for name in names)
        self.known = asyncio.Event()
        self.known.set()


def make_cluster(running: str = "ab", **answers: Any) -> tuple[Cluster, Answers, Running]:
    replicas, members = Answers(**answers), Running(running)
    return Cluster(replicas, members, "app", TIMEOUT_S), replicas, members


async def test_every_running_replica_is_asked_with_the_fence() -> None:
    a, b = make_report("a"), make_report("b")
    cluster, replicas, _ = make_cluster(a=a, b=b)
    assert await cluster.gather(7) == {"a": a, "b": b}
    assert sorted(replicas.asked) == [("a", "report", 7), ("b", "report", 7)]


@pytest.mark.parametrize("fault", ["silent", PeerLost("dead")], ids=["silent", "dead"])
async def test_a_replica_that_does_not_report_keeps_its_last(fault: Any) -> None:
    a, b, newer = make_report("a"), make_report("b"), make_report("b", free=5)
    cluster, replicas, _ = make_cluster(a=a, b=b)
    await cluster.gather(1)
    replicas.answers = {"a": fault, "b": newer}
    assert await cluster.gather(1) == {"a": a, "b": newer}


async def test_a_replica_whose_engine_fails_gets_no_more_requests() -> None:
    cluster, replicas, _ = make_cluster(a=make_report("a"), b=make_report("b"))
    await cluster.gather(1)
    replicas.answers["a"] = RuntimeError("the engine died")
    assert set(await cluster.gather(1)) == {"b"}


async def test_a_replica_that_never_reported_is_unknown() -> None:
    cluster, _, _ = make_cluster(a=make_report("a"), b="silent")
    assert set(await cluster.gather(1)) == {"a"}


async def test_a_replica_that_runs_no_more_is_forgotten() -> None:
    cluster, _, members = make_cluster(a=make_report("a"), b=make_report("b"))
    await cluster.gather(1)
    members.running = (ReplicaId("b"),)
    assert set(await cluster.gather(1)) == {"b"}


async def test_a_newer_scheduler_ends_this_one() -> None:
    cluster, _, _ = make_cluster(a=make_report("a"), b=Refused("a newer scheduler is at work", Cause.SUPERSEDED))
    with pytest.raises(Refused, match="newer"):
        await cluster.gather(1)


class Details:
    """Serve's controller, with one word on each replica."""

    def __init__(self, **states: Any) -> None:
        self.states = states
        self.get_serve_instance_details = self

    async def remote(self) -> dict[str, Any]:
        replicas = [{"replica_id": r, "state": state, "node_id": None} for r, state in self.states.items()]
        return {"applications": {"app": {"deployments": {"Engine": {"replicas": replicas}}}}}


class Word(Enum):
    """Serve's states are enums in some versions, strings in others."""

    RUNNING = "RUNNING"
    STARTING = "STARTING"


async def listed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, **states: Any) -> None:
    monkeypatch.setattr("deployments.cluster.controller", lambda: Details(**states))
    await cluster.refresh()


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
    cluster, _, _ = make_cluster(running="")
    await listed(cluster, monkeypatch, x=state)
    (load,) = cluster.others()
    assert (load.id, load.state, load.node, load.free_tokens) == ("x", known_as, "", 0)


@pytest.mark.parametrize(
    ("state", "known_as"),
    [
        ("RUNNING", ReplicaState.RUNNING),
        ("STOPPING", ReplicaState.DRAINING),
        ("PENDING_MIGRATION", ReplicaState.DRAINING),
    ],
)
async def test_serve_has_the_last_word_on_who_stays(
    monkeypatch: pytest.MonkeyPatch, state: str, known_as: ReplicaState
) -> None:
    cluster, _, _ = make_cluster(a=make_report("a"), b=make_report("b"))
    await listed(cluster, monkeypatch, a=state, b="RUNNING")
    reports = await cluster.gather(1)
    assert {r: report.load.state for r, report in reports.items()} == {"a": known_as, "b": ReplicaState.RUNNING}


async def test_a_stopping_replica_is_asked_although_no_router_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _, _ = make_cluster(running="a", a=make_report("a"), b=make_report("b"))
    await listed(cluster, monkeypatch, a="RUNNING", b="STOPPING")
    reports = await cluster.gather(1)
    assert reports[ReplicaId("b")].load.state is ReplicaState.DRAINING
    assert not cluster.others()
    assert (cluster.wanted_by_serve, cluster.runs(ReplicaId("b")), cluster.knows(ReplicaId("b"))) == (1, False, True)


async def test_while_the_controller_is_away_its_last_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _, _ = make_cluster(running="")
    await listed(cluster, monkeypatch, x="STARTING")
    monkeypatch.setattr("deployments.cluster.controller", lambda: None)
    await cluster.refresh()
    assert [load.id for load in cluster.others()] == ["x"]

"""The feed: its events add up to `/mell/state`, with one poll per interval."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.ingress.page.feed import MAX_PAGES, Feed
from app.ingress.page.updates import PageSample, PageState
from policies.model import Phase, ReplicaState
from policies.plan import Reason
from tests.app.client.sample import elastic, replica
from tests.app.client.sample import state as document
from tests.app.ingress.fakes import eventually
from tests.app.page.synthetic import SyntheticCluster

NOTHING = [0.0, 0, 0, 0, None, None, None, None, None, None, None]


class PageModel:
    """A page's model of the cluster after its events, like app/page/model.js."""

    def __init__(self) -> None:
        self.requests: dict[int, list[Any]] = {}
        self.replicas: dict[str, list[Any]] = {}
        self.used: dict[str, int] = {}
        self.caches: dict[str, Any] = {}
        self.migrations: dict[str, Any] = {}

    def apply(self, data: dict[str, Any]) -> None:
        for number in data.get("gone", ()):
            del self.requests[number]
        self.requests.update({row[0]: list(row) for row in data["requests"]})
        growth = data.get("grown", [0] * len(self.requests))
        for row, tokens in zip(self.requests.values(), growth, strict=True):
            row[8] += tokens
        for id in data.get("left", ()):
            del self.replicas[id]
        self.replicas.update({row[0]: row for row in data["replicas"]})
        self.used = dict(zip(self.replicas, data["used"], strict=True))
        self.caches = dict(zip(self.replicas, data["caches"], strict=True))
        self.migrations.update({record["id"]: record for record in data["migrations"]})

    @property
    def shown(self) -> set[tuple[Any, ...]]:
        """(replica, id, label, tokens, phase, reason if immovable, hop) of every request."""
        return {(r[3], r[1], r[2], r[8], r[4], r[5], r[6]) for r in self.requests.values()}


def listed(state: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {
        (replica["id"], r["id"], r["label"], r["tokens"], r["phase"], r["immovable_reason"], r["hop"])
        for replica in state["replicas"]
        for r in replica["requests"]
    }


def sample_of(cluster: SyntheticCluster) -> PageSample:
    records = [record.to_json() for record in reversed(cluster.records)]
    return PageSample(cluster.state(), records, list(NOTHING), cluster.now)


def check(model: PageModel, cluster: SyntheticCluster) -> None:
    state = cluster.state()
    assert model.shown == listed(state)
    assert model.used == {r["id"]: r["used_tokens"] for r in state["replicas"]}
    shown = {id: cache and cache[1] for id, cache in model.caches.items()}
    assert shown == {r["id"]: r["cache"] and r["cache"]["hbm"]["historical"] for r in state["replicas"]}
    stated = {r["id"]: (r["state"], r["role"], r["role_by_hand"]) for r in state["replicas"]}
    assert {id: (row[1], row[5], row[6]) for id, row in model.replicas.items()} == stated


# --- the state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_deltas_add_up_to_the_state_while_everything_changes(seed: int) -> None:
    cluster, page_state, model = SyntheticCluster(4, 60, seed=seed), PageState(), PageModel()
    for step in range(120):
        cluster.step(1.0, rate=60)
        if step % 30 == 10:
            cluster.states[cluster.open()] = ReplicaState.RUNNING
        if step % 30 == 20:
            cluster.states[cluster.running()[0]] = ReplicaState.DRAINING
        delta = json.loads(json.dumps(page_state.update(sample_of(cluster))))
        model.apply(delta)
        check(model, cluster)
    assert cluster.records, "nothing was moved"


def test_a_snapshot_and_later_deltas_add_up_to_the_state() -> None:
    cluster, page_state, model = SyntheticCluster(4, 60), PageState(), PageModel()
    for _ in range(20):
        cluster.step(1.0, rate=60)
        page_state.update(sample_of(cluster))
    model.apply(page_state.snapshot())
    check(model, cluster)
    for _ in range(20):
        cluster.step(1.0, rate=60)
        model.apply(page_state.update(sample_of(cluster)))
        check(model, cluster)


def test_a_request_in_hand_over_is_on_both_replicas() -> None:
    cluster, page_state, model = SyntheticCluster(2, 1), PageState(), PageModel()
    (source, live), target = next((n, r) for n, held in cluster.held.items() for r in held), "engine-001"
    target = next(name for name in cluster.states if name != source)
    live.phase = Phase.MOVING
    cluster.held[target].append(live)
    model.apply(page_state.update(sample_of(cluster)))
    assert {row[3] for row in model.requests.values()} == {source, target}


def test_unchanged_values_are_not_sent_again() -> None:
    cluster, page_state = SyntheticCluster(3, 30), PageState()
    page_state.update(sample_of(cluster))
    delta = page_state.update(sample_of(cluster))
    assert not any(delta[part] for part in ("requests", "gone", "replicas", "left", "migrations"))
    assert delta["grown"] == [0] * 30


def test_devices_are_sent_when_they_change() -> None:
    cluster, page_state = SyntheticCluster(2, 2, models={"org/chat": ["chat", "gpt"]}, budget_mib=1100), PageState()
    first = page_state.update(sample_of(cluster))
    seats = [[name, "org/chat", "demand", 300, 300, "its requests want more than there is for it"] for name in (
        "engine-001", "engine-002",
    )]  # fmt: skip
    assert first["devices"] == page_state.snapshot()["devices"] == [["10.0.0.4", 1100, 600, 600, seats]]
    assert first["names"] == {"org/chat": "chat"}
    assert "devices" not in page_state.update(sample_of(cluster))
    cluster.free_mib = 100
    assert page_state.update(sample_of(cluster))["devices"][0][:4] == ["10.0.0.4", 1100, 1000, 1000]


def test_the_dry_run_is_sent_in_mode_observe() -> None:
    cluster, page_state = SyntheticCluster(3, 30), PageState()
    assert page_state.update(sample_of(cluster))["dry_run"] is None
    cluster.dry_run = {"said": "would run 2 replicas instead of 4, with 3 moves in 5 minutes"}
    assert (
        page_state.update(sample_of(cluster))["dry_run"] == page_state.snapshot()["dry_run"] == cluster.dry_run["said"]
    )


def test_a_delta_of_a_large_cluster_is_a_fraction_of_the_state() -> None:
    cluster, page_state = SyntheticCluster(200, 5000), PageState()
    page_state.update(sample_of(cluster))
    cluster.step(1.0)
    delta = len(json.dumps(page_state.update(sample_of(cluster)), separators=(",", ":")))
    assert delta < len(json.dumps(cluster.state())) / 10


def test_a_migration_is_sent_at_its_begin_and_its_end() -> None:
    cluster, page_state = SyntheticCluster(2, 2), PageState()
    source, live = next((n, r) for n, held in cluster.held.items() for r in held)
    page_state.update(sample_of(cluster))
    record = cluster.move(live, source, next(n for n in cluster.states if n != source), Reason.BALANCE).to_json()
    running = record | {"outcome": None}
    state = cluster.state()
    first = page_state.update(PageSample(state, [running], list(NOTHING), 0.0))["migrations"]
    again = page_state.update(PageSample(state, [running], list(NOTHING), 0.0))["migrations"]
    ended = page_state.update(PageSample(state, [record], list(NOTHING), 0.0))["migrations"]
    assert [len(first), len(again), len(ended)] == [1, 0, 1]
    assert ended[0]["outcome"] == "committed"


# --- the feed -----------------------------------------------------------------------------------------


class CountingPoll:
    """A poll that counts its calls; `fault` is raised."""

    def __init__(self) -> None:
        self.cluster = SyntheticCluster(2, 5)
        self.count = 0
        self.fault: Exception | None = None

    async def __call__(self) -> PageSample:
        self.count += 1
        if self.fault:
            raise self.fault
        self.cluster.step(0.1)
        return sample_of(self.cluster)


async def read(events: AsyncIterator[bytes]) -> tuple[str, dict[str, Any]]:
    """The next event that is not a heartbeat."""
    async with asyncio.timeout(5):
        while (event := await anext(events)).startswith(b":"):
            pass
    kind, data, end = event.decode().split("\n", 2)
    assert end == "\n"
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def close(*pages: AsyncIterator[bytes]) -> None:
    for page in pages:
        await page.aclose()  # type: ignore[attr-defined]


async def test_a_page_gets_a_snapshot_then_deltas() -> None:
    page = Feed(CountingPoll(), interval_s=0.01).events()
    kinds = [(await read(page))[0] for _ in range(4)]
    await close(page)
    assert kinds == ["snapshot", "delta", "delta", "delta"]


async def test_many_pages_share_one_poll() -> None:
    poll = CountingPoll()
    feed = Feed(poll, interval_s=60)
    pages = [feed.events() for _ in range(20)]
    answers = await asyncio.gather(*(read(page) for page in pages))
    await close(*pages)
    assert [kind for kind, _ in answers] == ["snapshot"] * 20
    assert poll.count == 1


async def test_without_open_pages_there_are_no_polls() -> None:
    poll = CountingPoll()
    feed = Feed(poll, interval_s=0.01)
    page = feed.events()
    await read(page)
    await close(page)
    await eventually(lambda: feed._poller is None)
    count = poll.count
    await asyncio.sleep(0.05)
    assert poll.count == count
    again = feed.events()
    assert (await read(again))[0] == "snapshot" and poll.count > count
    await close(again)


async def test_a_slow_page_skips_to_the_newest_snapshot() -> None:
    poll = CountingPoll()
    feed = Feed(poll, interval_s=0.005)
    page, model = feed.events(), PageModel()
    await read(page)
    before = poll.count
    await eventually(lambda: poll.count > before + 20)
    kind, data = await read(page)
    model.apply(data)
    assert kind == "snapshot"
    assert data["as_of"] == pytest.approx(poll.cluster.now, abs=0.35)
    assert (await read(page))[0] == "delta"
    await close(page)


async def test_a_page_that_keeps_up_misses_nothing() -> None:
    poll = CountingPoll()
    poll.cluster = SyntheticCluster(3, 40)
    feed = Feed(poll, interval_s=0.005)
    page, model = feed.events(), PageModel()
    for at in range(30):
        kind, data = await read(page)
        assert kind == ("delta" if at else "snapshot")
        model.apply(data)
    feed.close()
    assert len(model.requests) == 40
    await close(page)


async def test_failed_polls_do_not_end_the_feed_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    poll = CountingPoll()
    poll.fault = RuntimeError("the scheduler is unavailable")
    page = Feed(poll, interval_s=0.005, heartbeat_s=0.01).events()
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert (await anext(page)).startswith(b": ")
        await eventually(lambda: poll.count >= 3)
    assert len(caplog.records) == 1
    poll.fault = None
    assert (await read(page))[0] == "snapshot"
    await close(page)


async def test_close_ends_all_pages_and_accepts_no_more() -> None:
    feed = Feed(CountingPoll(), interval_s=60)
    pages = [feed.events() for _ in range(3)]
    for page in pages:
        await read(page)
    waiting = [asyncio.ensure_future(anext(page, None)) for page in pages]
    await asyncio.sleep(0)
    feed.close()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*waiting) == [None] * 3
    assert feed.full


async def test_the_number_of_pages_is_limited() -> None:
    feed = Feed(CountingPoll(), interval_s=60)
    pages = [feed.events() for _ in range(MAX_PAGES)]
    for page in pages[:-1]:
        await read(page)
    full = [feed.full]
    await read(pages[-1])
    full.append(feed.full)
    await close(pages[0])
    full.append(feed.full)
    await close(*pages)
    assert full == [False, True, False]


def test_a_page_has_the_time_when_a_replica_fell_asleep() -> None:
    asleep = replica("a", state=ReplicaState.ASLEEP, memory=elastic("a", None, asleep_at=9.0))
    page = PageState()
    page.update(PageSample(document(asleep, replica("b")), [], list(NOTHING), 10.0))
    assert {row[0]: row[8] for row in page.snapshot()["replicas"]} == {"a": 9.0, "b": None}

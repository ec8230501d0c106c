"""The page in a real browser, over the real routes and a synthetic cluster."""

import asyncio
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import uvicorn

from app.ingress.http.control import ControlRoutes
from policies.model import ReplicaState
from policies.plan import Reason
from tests.app.page.synthetic import SyntheticBackend, SyntheticCluster, SyntheticModel
from tests.counts import LONG_ONLY

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright for Python is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"),
]
KEY = "open-sesame"
WITHIN_MS = 20_000


class Served:
    """The routes over a synthetic cluster, on a free port."""

    def __init__(self, cluster: SyntheticCluster, admin_key: str | None = None, live: bool = False) -> None:
        self.cluster = cluster
        self.admin_key, self.live = admin_key, live
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mell/"
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.thread.start()
        assert self.ready.wait(60)

    async def _serve(self) -> None:
        self.backend = SyntheticBackend(self.cluster, self.admin_key, self.live)
        self.model = SyntheticModel(self.cluster)
        self.routes = ControlRoutes(self.backend)
        config = uvicorn.Config(
            self.routes.app(self.model.app), log_config=None, lifespan="off", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.loop = asyncio.get_running_loop()
        self.ready.set()
        await self.server.serve(sockets=[self.socket])

    def call(self, change: Any) -> Any:
        """Change the cluster between two polls."""

        async def changing() -> Any:
            return change(self.cluster)

        return asyncio.run_coroutine_threadsafe(changing(), self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.routes.close)
        self.server.should_exit = True
        self.thread.join(60)
        self.socket.close()
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def served() -> Iterator[Served]:
    service = Served(SyntheticCluster(6, 40))
    yield service
    service.close()


class Opened:
    """A page, and the errors and warnings on its console."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(WITHIN_MS)
        self.errors: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)

    def until(self, expression: str, argument: Any = None) -> None:
        """Wait until a JavaScript expression is true."""
        self.page.wait_for_function(expression, arg=argument)

    def live(self) -> Any:
        self.until("() => document.querySelector('#status').dataset.state === 'live' && mell.model.replicas.size > 0")
        return self.page

    def drawn(self) -> dict[str, Any]:
        """The places of all requests on the stage, by number."""
        script = "() => [...mell.stage.drawn].map(([n, to]) => [mell.model.requests.get(n).id, to])"
        return {id: place for id, place in self.page.evaluate(script)}


@pytest.fixture
def opened(browser: Any, served: Served) -> Iterator[Opened]:
    page = Opened(browser, served.url)
    yield page
    page.context.close()


def test_every_replica_and_request_of_the_state_is_drawn(opened: Opened, served: Served) -> None:
    opened.live()
    ids = {r["id"] for replica in served.cluster.state()["replicas"] for r in replica["requests"]}
    drawn = opened.drawn()
    assert set(drawn) == ids and len(ids) == 40
    assert opened.page.get_attribute("#stage", "data-replicas") == "6"
    box = opened.page.locator("#stage").bounding_box()
    for place in drawn.values():
        assert place["w"] >= 2 and place["x"] >= 0 and place["x"] + place["w"] <= box["width"]
        assert place["y"] >= 0 and place["y"] + place["h"] <= box["height"]
    colours = opened.page.evaluate("""() => {
        const c = document.querySelector('#stage'), seen = new Set();
        const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add(data.slice(i, i + 3).join());
        return seen.size; }""")
    assert colours >= 4
    assert opened.errors == []


def test_the_dry_run_is_shown(opened: Opened, served: Served) -> None:
    served.cluster.dry_run = {"said": "would run 2 replicas instead of 4, with 3 moves in 5 minutes"}
    opened.live().get_by_text("acting would run 2 replicas instead of 4, with 3 moves in 5 minutes").wait_for()
    assert opened.page.inner_text("#savings").startswith("6 replicas serve 40 requests")


def test_requests_of_a_class_are_together_and_do_not_overlap(opened: Opened) -> None:
    opened.live()
    columns: dict[str, list[Any]] = {}
    for place in opened.drawn().values():
        columns.setdefault(place["replica"], []).append(place)
    for places in columns.values():
        places.sort(key=lambda place: -place["y"])
        for below, above in pairwise(places):
            assert above["y"] + above["h"] <= below["y"] + 0.01


def test_a_move_appears(opened: Opened, served: Served) -> None:
    page = opened.live()

    def force(cluster: SyntheticCluster) -> tuple[str, str, str]:
        source, live = next((n, r) for n, held in cluster.held.items() for r in held)
        target = next(name for name in cluster.running() if name != source)
        cluster.move(live, source, target, Reason.BALANCE)
        return live.id, live.label, target

    id, label, target = served.call(force)
    began = time.monotonic()
    opened.until("([id, target]) => mell.model.byId(id)?.replica === target", [id, target])
    print(f"a move was on the page after {time.monotonic() - began:.2f} s")
    assert opened.drawn()[id]["replica"] == target
    row = page.locator("#moves tbody tr").first
    assert label in row.inner_text() and "balance" in row.inner_text()
    assert opened.errors == []


def test_replicas_come_drain_and_go(opened: Opened, served: Served) -> None:
    opened.live()
    name = served.call(lambda cluster: cluster.open())
    opened.until("(id) => mell.model.replicas.get(id)?.state === 'STARTING'", name)
    served.call(lambda cluster: cluster.states.update({name: ReplicaState.DRAINING}))
    opened.until("(id) => mell.model.replicas.get(id)?.state === 'DRAINING'", name)
    assert "1 draining" in opened.page.inner_text("#facts")
    served.call(lambda cluster: (cluster.states.pop(name), cluster.held.pop(name)))
    opened.until("(id) => !mell.model.replicas.has(id)", name)
    assert opened.errors == []


def test_small_requests_have_colours_and_names(browser: Any) -> None:
    service = Served(SyntheticCluster(2, 6, capacity=400_000))
    try:
        opened = Opened(browser, service.url)
        page = opened.live()
        drawn = opened.drawn().values()
        assert max(place["h"] for place in drawn) > 40 and min(place["w"] for place in drawn) > 200
        shown = page.evaluate("mell.stage.shown")
        largest = max(sum(live.tokens for live in held) for held in service.cluster.held.values())
        assert largest <= shown <= 10 * largest
        assert f"columns are cut at {shown:,}" in page.inner_text("#legend")
        kinds = page.evaluate("[...mell.stage.drawn.values()].map((place) => place.kind)")
        assert len(set(kinds)) > 1, "relative to what is shown, sizes differ"

        def grow(cluster: SyntheticCluster) -> None:
            live = next(live for held in cluster.held.values() for live in held)
            live.tokens = cluster.capacity * 3 // 4

        service.call(grow)
        opened.until("(capacity) => mell.stage.shown === capacity", service.cluster.capacity)
        assert "cut" not in page.inner_text("#legend") and opened.errors == []
        opened.context.close()
    finally:
        service.close()


def test_the_search_finds_replicas_and_ended_requests_and_names_what_it_does_not_find(
    opened: Opened, served: Served
) -> None:
    page = opened.live()
    page.fill("#query", "nobody")
    page.press("#query", "Enter")
    assert page.inner_text("#found") == "No request and no replica has “nobody” in its id or label."
    page.fill("#query", "engine-003")
    assert page.inner_text("#found") == ""
    page.press("#query", "Enter")
    assert page.inner_text("#detail-title") == "Replica engine-003"

    def move_and_end(cluster: SyntheticCluster) -> str:
        source, live = next((n, r) for n, held in cluster.held.items() for r in held)
        target = next(name for name in cluster.running() if name != source)
        cluster.move(live, source, target, Reason.BALANCE)
        for held in cluster.held.values():
            if live in held:
                held.remove(live)
        return live.label

    label = served.call(move_and_end)
    opened.until("(label) => [...mell.model.migrations.values()].some((m) => m.label === label)", label)
    page.fill("#query", label)
    page.press("#query", "Enter")
    assert page.inner_text("#detail-title") == label and "no longer running" in page.inner_text("#detail-sub")


def test_a_running_replica_has_the_colour_of_health(opened: Opened, served: Served) -> None:
    page = opened.live()
    served.call(lambda cluster: cluster.states.update({"engine-002": ReplicaState.DRAINING}))
    opened.until("() => mell.model.replicas.get('engine-002')?.state === 'DRAINING'")
    page.click("#listing summary")
    colours = {
        row.locator("td").first.inner_text(): row.locator("td")
        .nth(1)
        .evaluate("(cell) => getComputedStyle(cell).color")
        for row in page.locator("#replicas tbody tr").all()
    }
    by_name = page.evaluate("""() => Object.fromEntries(['good', 'warn'].map((name) => {
        const probe = document.body.appendChild(document.createElement('i'));
        probe.style.color = `var(--${name})`;
        return [name, getComputedStyle(probe).color]; }))""")
    assert (colours["engine-001"], colours["engine-002"]) == (by_name["good"], by_name["warn"])


def test_an_answer_streams_and_goes_on_while_its_block_moves(opened: Opened, served: Served) -> None:
    page = opened.live()
    page.fill("#ask-prompt", "Where do blocks move?")
    page.press("#ask-prompt", "Enter")
    opened.until("() => !document.querySelector('#ask-move').disabled")
    assert served.model.bodies[0]["messages"] == [{"role": "user", "content": "Where do blocks move?"}]
    assert "on replica 001" in page.inner_text("#ask-note")
    assert page.evaluate("mell.stage.asked") == page.evaluate("mell.model.find('page-').request")
    page.click("#ask-move")
    opened.until("() => document.querySelector('#ask-note').textContent.includes('moved once, paused ')")
    assert served.cluster.records[0].source == "engine-001"
    before = page.inner_text("#ask-answer")
    opened.until("(before) => document.querySelector('#ask-answer').innerText.length > before + 20", len(before))
    served.call(lambda cluster: served.model.finish.set())
    opened.until("() => document.querySelector('#ask-note').textContent.startsWith('complete, ')")
    words = page.inner_text("#ask-answer").replace("↷", "").split()
    assert words == [f"word{number}" for number in range(len(words))] and len(words) > 10
    assert page.evaluate("mell.stage.asked") is None and opened.errors == []


def test_an_answer_can_be_stopped(opened: Opened, served: Served) -> None:
    page = opened.live()
    page.fill("#ask-prompt", "x")
    page.click("#ask-send")
    opened.until("() => document.querySelector('#ask-answer').innerText.includes('word3')")
    page.click("#ask-send")
    opened.until("() => document.querySelector('#ask-note').textContent.startsWith('stopped')")
    opened.until("() => mell.model.find('page-') === null")


def test_without_a_chat_template_the_prompt_is_continued(opened: Opened, served: Served) -> None:
    page = opened.live()
    served.model.refusal = ("the tokenizer has no chat template", 400)
    served.model.finish.set()
    page.fill("#ask-prompt", "Blocks")
    page.click("#ask-send")
    opened.until("() => document.querySelector('#ask-note').textContent.startsWith('complete')")
    assert served.model.bodies[0]["prompt"] == "Blocks" and page.inner_text("#ask-answer").startswith("word0")
    served.model.refusal = ("the model is away", 503)
    page.reload()
    opened.live()
    page.fill("#ask-prompt", "Blocks")
    page.click("#ask-send")
    opened.until("() => document.querySelector('#ask-note').textContent.startsWith('the model is away')")


def test_a_key_for_the_model_is_asked_for_only_if_it_is_needed(opened: Opened, served: Served) -> None:
    page = opened.live()
    served.model.key = KEY
    served.model.finish.set()
    assert page.is_hidden("#ask-key")
    page.fill("#ask-prompt", "x")
    page.click("#ask-send")
    page.fill("#ask-key-value", KEY)
    page.click("#ask-send")
    opened.until("() => document.querySelector('#ask-note').textContent.startsWith('complete')")
    assert page.is_hidden("#ask-key")
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


def test_without_a_budget_no_memory_is_shown(opened: Opened) -> None:
    assert opened.live().is_hidden("#devices")


@pytest.mark.parametrize("models", [{}, {"org/chat": ["chat", "gpt"], "code": ["code"]}], ids=["one", "two"])
def test_a_bar_shows_who_holds_the_memory_of_a_node(browser: Any, models: dict[str, list[str]]) -> None:
    cluster = SyntheticCluster(10, 40, models=models, budget_mib=20_500)
    service = Served(cluster)
    try:
        service.call(lambda cluster: cluster.states.update({"engine-010": ReplicaState.ASLEEP}))
        opened = Opened(browser, service.url)
        page = opened.live()
        opened.until("() => document.querySelectorAll('#devices .bar i').length === 10")
        assert "20,000 of 20,500 MiB held (98 %), 20,000 ordered" in page.inner_text("#devices .device")
        boxes = [part.bounding_box() for part in page.locator("#devices .bar i").all()]
        bar = page.locator("#devices .bar").bounding_box()
        assert all(abs(box["width"] / bar["width"] - 2000 / 20_500) < 0.01 for box in boxes)
        assert all(one["x"] + one["width"] <= other["x"] + 0.5 for one, other in pairwise(boxes))
        colours = page.evaluate("[...document.querySelectorAll('#devices .bar i')].map((part) => part.dataset.colour)")
        assert len(set(colours)) == max(1, len(models)) and colours == sorted(colours, key=colours.index)
        legend = page.locator("#devices .legend li").all_inner_texts()
        assert [entry.split() for entry in legend] == ([] if not models else [
            ["code", "10,000", "MiB"], ["org/chat", "10,000", "MiB,", "1", "asleep"],
        ])  # fmt: skip
        assert "it sleeps" in page.inner_text("#devices tr:has-text('engine-010')")
        service.call(lambda cluster: cluster.states.update({"engine-010": ReplicaState.RUNNING}))
        opened.until("() => !document.querySelector('#devices table').innerText.includes('it sleeps')")
        page.click("#devices tr:has-text('engine-003') button")
        assert page.inner_text("#detail-title") == "Replica engine-003" and opened.errors == []
        opened.context.close()
    finally:
        service.close()


def test_the_box_asks_a_model_by_a_name_that_calls_have(browser: Any) -> None:
    service = Served(SyntheticCluster(2, 4, models={"org/chat": ["chat", "gpt"], "code": ["code"]}))
    try:
        opened = Opened(browser, service.url)
        page = opened.live()
        service.model.finish.set()
        assert page.locator("#ask-model option").all_inner_texts() == ["chat", "code"]
        page.select_option("#ask-model", "chat")
        page.fill("#ask-prompt", "x")
        page.click("#ask-send")
        opened.until("() => document.querySelector('#ask-note').textContent.startsWith('complete')")
        assert service.model.bodies[0]["model"] == "chat"
        opened.context.close()
    finally:
        service.close()


def test_a_request_shows_its_moves_and_moves_on_demand(opened: Opened, served: Served) -> None:
    page = opened.live()
    source, live = next((n, r) for n, held in served.cluster.held.items() for r in held if r.immovable is None)
    target = next(name for name in served.cluster.running() if name != source)
    page.fill("#query", live.label)
    page.press("#query", "Enter")
    assert page.inner_text("#detail-title") == live.label
    assert f"{live.tokens:,}" in page.inner_text("#detail-facts") and source in page.inner_text("#detail-facts")
    page.select_option("#detail select[name=target]", target)
    page.click("#detail button[type=submit]")
    assert live.label in page.inner_text("#sure-text")
    page.click("#sure-dialog button[value=no]")
    assert served.cluster.records == []
    page.click("#detail button[type=submit]")
    page.click("#sure-yes")
    opened.until("() => document.querySelector('#detail-message').textContent.includes('begun')")
    opened.until("(id) => document.querySelector('#detail-facts').innerText.includes(id)", target)
    opened.until("(id) => document.querySelector('#detail-list').innerText.includes('requested by operator')")
    assert served.cluster.records[0].target == target and opened.errors == []


def test_an_immovable_request_and_a_refusal_show_the_reason(opened: Opened, served: Served) -> None:
    live = served.call(lambda cluster: next(r for held in cluster.held.values() for r in held))
    live.immovable = "its stop strings are unknown elsewhere"
    page = opened.live()
    opened.until("(id) => mell.model.byId(id)?.why", live.id)
    page.fill("#query", live.id)
    page.press("#query", "Enter")
    assert "no: its stop strings" in page.inner_text("#detail-facts")
    page.click("#detail button[type=submit]")
    page.click("#sure-yes")
    opened.until("() => document.querySelector('#detail-message').dataset.kind === 'bad'")
    assert page.inner_text("#detail-message") == live.immovable


def test_a_replica_is_drained_on_demand(opened: Opened, served: Served) -> None:
    page = opened.live()
    page.click("#listing summary")
    page.locator("#replicas tbody tr").nth(2).locator("button").click()
    page.click("#detail button[type=submit]")
    page.click("#sure-yes")
    opened.until("() => document.querySelector('#detail-facts').innerText.includes('draining')")
    assert list(served.cluster.states.values()).count(ReplicaState.DRAINING) == 1
    assert opened.errors == []


def test_without_the_key_nothing_happens(browser: Any) -> None:
    service = Served(SyntheticCluster(2, 6), admin_key=KEY)
    try:
        opened = Opened(browser, service.url)
        page = opened.page
        page.wait_for_selector("#key-dialog[open]")
        assert service.backend.looks == 0 and page.evaluate("mell.model.replicas.size") == 0
        page.fill("#key-value", "wrong")
        page.press("#key-value", "Enter")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key-value", KEY)
        page.click("#key-dialog button[value=use]")
        opened.live()
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        page.evaluate("sessionStorage.clear()")
        page.focus("#stage")
        page.keyboard.press("Enter")
        page.click("#detail button[type=submit]")
        page.click("#sure-yes")
        opened.until("() => document.querySelector('#detail-message').innerText.includes('Authorization')")
        assert all(state is ReplicaState.RUNNING for state in service.cluster.states.values())
        opened.context.close()
    finally:
        service.close()


def test_keyboard_navigation_reaches_everything(opened: Opened, served: Served) -> None:
    page = opened.live()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#stage")
    announcements: set[str] = set()
    for _ in range(6):
        announcements.add(page.inner_text("#announcement"))
        for _ in range(40):
            before = page.inner_text("#announcement")
            page.keyboard.press("ArrowUp")
            announcement = page.inner_text("#announcement")
            if announcement == before:
                break
            announcements.add(announcement)
        page.keyboard.press("ArrowRight")
    for held in served.cluster.held.values():
        for live in held:
            assert any(f"Request {live.label}:" in announcement for announcement in announcements), live.label
    for name in served.cluster.states:
        assert any(f"Replica {name}:" in announcement for announcement in announcements)
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert page.is_visible("#detail")
    page.keyboard.press("Escape")
    assert page.is_hidden("#detail")
    assert page.evaluate("document.activeElement.id") == "stage"
    assert opened.errors == []


def test_a_lost_connection_is_shown_and_restored(browser: Any) -> None:
    service = Served(SyntheticCluster(3, 9))
    opened = Opened(browser, service.url)
    opened.live()
    service.close()
    opened.until("() => document.querySelector('#status').dataset.state === 'lost'")
    page = opened.page
    assert "trying again" in page.inner_text("#status")
    assert "stale" in page.get_attribute("#main", "class") and len(opened.drawn()) == 9
    opened.context.close()


def test_a_broken_stream_is_reopened(opened: Opened, served: Served) -> None:
    page = opened.live()
    page.context.set_offline(True)
    page.evaluate("() => { mell.model.clear(); }")
    page.context.set_offline(False)
    opened.until("() => mell.model.requests.size === 40")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_horizontal_scrolling(browser: Any, served: Served, scheme: str) -> None:
    opened = Opened(browser, served.url, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = opened.live()
    served.call(lambda cluster: [cluster.step(1.0, rate=400) for _ in range(30)])
    opened.until("() => document.querySelectorAll('#moves tbody tr').length > 0")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.focus("#stage")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    box = page.locator("#detail").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
    opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, served: Served, scheme: str) -> None:
    served.cluster.models, served.cluster.budget_mib = {"chat": ["chat"], "code": ["code"]}, 8192
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    opened = Opened(browser, served.url, color_scheme=scheme, bypass_csp=True)
    page = opened.live()
    served.call(lambda cluster: [cluster.step(1.0, rate=400) for _ in range(30)])
    page.click("#listing summary")
    page.focus("#stage")
    page.keyboard.press("Enter")
    page.wait_for_timeout(400)  # The panel fades in: axe takes half-faded text for low contrast.
    violations = axe.run(page).response["violations"]
    serious = [v for v in violations if v["impact"] in ("serious", "critical")]
    assert not serious, json.dumps([(v["id"], [n["html"] for n in v["nodes"]]) for v in serious], indent=1)
    opened.context.close()


def test_nothing_shifts_with_reduced_motion(browser: Any, served: Served) -> None:
    opened = Opened(browser, served.url, reduced_motion="reduce")
    opened.page.evaluate("""() => { window.shift = 0; new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
    }).observe({ type: 'layout-shift', buffered: true }); }""")
    page = opened.live()
    for _ in range(3):
        served.call(lambda cluster: cluster.step(1.0, rate=400))
        before = served.backend.looks
        while served.backend.looks < before + 1:
            time.sleep(0.02)
    assert page.evaluate("window.shift") < 0.05
    assert opened.errors == []
    opened.context.close()


@LONG_ONLY
def test_it_is_fluid_with_200_replicas_and_5000_requests(browser: Any) -> None:
    service = Served(SyntheticCluster(200, 5000), live=True)
    try:
        opened = Opened(browser, service.url)
        page = opened.live()
        opened.until("() => mell.model.requests.size >= 4900 && mell.stage.frames.length > 60")
        frames = sorted(page.evaluate("[...mell.stage.frames]"))
        mean = sum(frames) / len(frames)
        print(f"drawing a frame: mean {mean:.1f} ms, p95 {frames[int(len(frames) * 0.95)]:.1f} ms, of {len(frames)}")
        assert int(page.get_attribute("#stage", "data-replicas")) == 200
        assert mean < 500
        assert opened.errors == []
        opened.context.close()
    finally:
        service.close()

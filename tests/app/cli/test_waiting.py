"""Commands that wait for an outcome or run until Ctrl-C."""

import json
from contextlib import ExitStack

import pytest

from app.cli.endpoint import MellEndpoint
from app.cli.errors import Failed, NotThere
from app.cli.migrations import follow
from app.cli.orders import drain, drain_node, hand_over, move
from app.cli.terminal import PATIENCE_S
from app.cli.top import TopScreen, top
from migration.protocol.record import Outcome
from tests.app.cli.conftest import Stage, drawn
from tests.app.cli.fake_mell import FakeMell, free_port, serving
from tests.app.client.sample import BUSY, NOW, record, replica, request, state

ID = "0123456789abcdef"


def test_move_waits_for_the_outcome(url: str, mell: FakeMell) -> None:
    mell.migrations = {"migrations": [record(ID, None)]}
    stage = Stage(as_json=True)
    ended = {"migrations": [record(ID)]}
    stage.then = [lambda: None, lambda: setattr(mell, "migrations", ended)]
    with MellEndpoint(url) as endpoint:
        move(endpoint, stage.terminal, "demo", None, "auto", wait=True)
    assert json.loads(stage.text) == ended["migrations"][0] and stage.then == []


def test_move_gives_up_on_an_unlisted_migration(url: str, mell: FakeMell) -> None:
    mell.migrations = {"migrations": []}
    stage = Stage()
    stage.then = [lambda: None] * 100
    with MellEndpoint(url) as endpoint, pytest.raises(Failed, match="is no longer listed"):
        move(endpoint, stage.terminal, "demo", None, "auto", wait=True)
    assert PATIENCE_S < stage.now_s < PATIENCE_S + 2


def test_drain_waits_until_the_replica_is_gone(url: str, mell: FakeMell) -> None:
    def see(at_s: float, *left: object) -> None:
        mell.state = state(*left, as_of=NOW + at_s)  # type: ignore[arg-type]

    def on(*ids: str) -> dict[str, object]:
        return replica("a", *(request(id, 10) for id in ids))

    mell.state = state(on("x", "y"))
    stage = Stage()
    stage.then = [
        lambda: see(1, on("x", "y")),
        lambda: see(2),  # missing once, like a slow replica
        lambda: see(3, on("x")),
        lambda: see(4),
        lambda: None,  # an unchanged state does not count
        lambda: setattr(mell, "state", {"as_of": 0.0, "mode": "off", "replicas": []}),
        lambda: see(5),
    ]
    with MellEndpoint(url) as endpoint:
        drain(endpoint, stage.terminal, "a", wait=True)
    assert stage.then == []
    assert stage.text.splitlines()[1:] == [
        "2 requests left on a, which is RUNNING",
        "1 request left on a, which is RUNNING",
        "a is gone",
    ]


def on_node(id: str, node: str, *requests: str) -> dict[str, object]:
    return replica(id, *(request(each, 10) for each in requests)) | {"node": node}


def test_a_drain_of_a_node_waits_until_no_replica_is_there(url: str, mell: FakeMell) -> None:
    mell.draining, mell.on_nodes = ["n1", "n2"], ["a", "b"]
    mell.state = state(on_node("a", "n1", "x"), on_node("b", "n2"), on_node("c", "n3", "y"))
    stage = Stage()

    def see(at_s: float, *left: dict[str, object]) -> None:
        mell.state = state(*left, on_node("c", "n3"), as_of=NOW + at_s)

    stage.then = [lambda: see(1, on_node("b", "n2")), lambda: see(2), lambda: None, lambda: see(3)]
    with MellEndpoint(url) as endpoint:
        drain_node(endpoint, stage.terminal, "gpu-a", 60.0)
    assert stage.then == [] and mell.orders == [("gpu-a", {"within_s": 60.0})]
    assert stage.text.splitlines() == [
        "gpu-a drains: 2 replicas will be replaced elsewhere",
        "1 request left on a, which is RUNNING; 0 requests left on b, which is RUNNING",
        "0 requests left on b, which is RUNNING",
        "gpu-a is empty",
    ]


def test_a_drain_of_a_node_without_a_replica_returns_at_once(url: str, mell: FakeMell) -> None:
    stage = Stage()
    with MellEndpoint(url) as endpoint:
        drain_node(endpoint, stage.terminal, "gpu-a", 60.0)
    assert stage.now_s == 0 and stage.text == "no replica is on gpu-a\n"


def test_a_drain_of_a_node_waits_no_longer_than_asked(url: str, mell: FakeMell) -> None:
    mell.draining, mell.on_nodes = ["n1"], ["a"]
    mell.state = state(on_node("a", "n1", "x"))
    stage = Stage()
    stage.then = [lambda: None] * 100
    with MellEndpoint(url) as endpoint, pytest.raises(Failed, match="after 5 s: 1 request left on a"):
        drain_node(endpoint, stage.terminal, "gpu-a", 5.0)
    assert 5 < stage.now_s < 7


def test_a_hand_over_waits_until_no_request_is_here(url: str, mell: FakeMell) -> None:
    stage = Stage()
    stage.then = [
        lambda: None,
        lambda: mell.handing.update(here=1, there=1, staying={"LoRA adapter": 1}),
        lambda: mell.handing.update(here=0, staying={}),
    ]
    with MellEndpoint(url) as endpoint:
        hand_over(endpoint, stage.terminal, "http://new", None, undo=False, wait_s=60.0)
    assert stage.text.splitlines()[-2:] == [
        "to http://new: 1 request here, 1 there (1 to the end: LoRA adapter)",
        "to http://new: 0 requests here, 1 there",
    ]


def test_a_hand_over_waits_no_longer_than_asked(url: str, mell: FakeMell) -> None:
    stage = Stage()
    stage.then = [lambda: None] * 100
    with MellEndpoint(url) as endpoint, pytest.raises(Failed, match="after 5 s: to http://new: 2 requests here"):
        hand_over(endpoint, stage.terminal, "http://new", None, undo=False, wait_s=5.0)
    assert 5 < stage.now_s < 7


def test_follow_shows_the_last_ones_and_then_each_as_it_ends(url: str, mell: FakeMell) -> None:
    running, old, older = record("new", None), record("old"), record("older", Outcome.REFUSED)
    mell.migrations = {"migrations": [running, old, older]}
    ended = record("new")
    stage = Stage(as_json=True)
    stage.then = [lambda: None, lambda: setattr(mell, "migrations", {"migrations": [ended, old, older]})]
    with MellEndpoint(url) as endpoint, pytest.raises(KeyboardInterrupt):
        follow(endpoint, stage.terminal, last=1)
    assert [json.loads(line) for line in stage.text.splitlines()] == [old, ended]


def test_follow_in_text_has_one_heading(url: str, mell: FakeMell) -> None:
    mell.migrations = {"migrations": [record("m2"), record("m1")]}
    stage = Stage()
    with MellEndpoint(url) as endpoint, pytest.raises(KeyboardInterrupt):
        follow(endpoint, stage.terminal, last=20)
    assert [line.split()[0] for line in stage.text.splitlines()] == ["ID", "m1", "m2"]


def test_top_survives_an_outage_of_the_endpoint(mell: FakeMell) -> None:
    port, stage = free_port(), Stage()
    endpoint = MellEndpoint(f"http://127.0.0.1:{port}")
    with serving(mell, port):
        screen = TopScreen(endpoint, stage.terminal)
    stage.now_s = 4.0
    screen.refresh()
    shown = drawn(screen.render(), 120)
    assert "no answer for 4 s: nothing listens at" in shown and "aaaaaaaa" in shown
    mell.state = state(replica("dddddddd"))
    with serving(mell, port), endpoint:
        screen.refresh()
    shown = drawn(screen.render(), 120)
    assert "no answer" not in shown and "dddddddd" in shown


def test_top_shows_the_age_of_the_answer_during_a_slow_call(url: str) -> None:
    stage = Stage()
    with MellEndpoint(url) as endpoint:
        screen = TopScreen(endpoint, stage.terminal)
    stage.now_s = 7.0
    assert "no answer for 7 s" in drawn(screen.render())


def test_top_shows_changes_until_it_is_interrupted(url: str, mell: FakeMell) -> None:
    stage = Stage()
    grown = state(replica("aaaaaaaa", request("cmpl-1", 1660), request("cmpl-2", 640), used=72))
    stage.then = [lambda: setattr(mell, "state", grown)]
    with MellEndpoint(url) as endpoint, pytest.raises(KeyboardInterrupt):
        top(endpoint, stage.terminal)
    assert "last 1 s: 0.0 requests/s came, 2.0 left; 60 tokens/s" in stage.text


def test_top_as_json_is_one_document_per_second(url: str) -> None:
    stage = Stage(as_json=True)
    stage.then = [lambda: None]
    with MellEndpoint(url) as endpoint, pytest.raises(KeyboardInterrupt):
        top(endpoint, stage.terminal)
    assert [json.loads(line) for line in stage.text.splitlines()] == [BUSY, BUSY]


def test_follow_survives_an_outage_of_the_endpoint(mell: FakeMell) -> None:
    mell.migrations = {"migrations": []}
    port, stage = free_port(), Stage(as_json=True)
    ended = record("m")
    servers = ExitStack()

    def back() -> None:
        mell.migrations = {"migrations": [ended]}
        servers.enter_context(serving(mell, port))

    stage.then = [servers.close, *(30 * [lambda: None]), back, lambda: None]
    with servers, MellEndpoint(f"http://127.0.0.1:{port}") as endpoint:
        servers.enter_context(serving(mell, port))
        with pytest.raises(KeyboardInterrupt):
            follow(endpoint, stage.terminal, last=0)
    assert stage.now_s > PATIENCE_S and [json.loads(line) for line in stage.text.splitlines()] == [ended]


def test_a_wait_ends_after_a_long_silence(mell: FakeMell) -> None:
    stage = Stage()
    stage.then = [lambda: None] * 100
    with MellEndpoint(f"http://127.0.0.1:{free_port()}") as endpoint, pytest.raises(NotThere):
        next(stage.terminal.poll(endpoint.state, 0.5))
    assert PATIENCE_S < stage.now_s < PATIENCE_S + 2

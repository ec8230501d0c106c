"""Whole replays from the command line against a fake endpoint."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulator.replay.__main__ import main
from simulator.replay.client import ServedModel, completion
from simulator.replay.trace import TraceRequest
from tests.simulator.replay.fake_endpoint import NEW_MIGRATION, FakeEndpoint, serving
from tests.simulator.replay.make_small_trace import PATH

Replayed = Callable[..., dict[str, Any]]
MATPLOTLIB = ("matplotlib", "matplotlib.figure")

FAST = ("--minutes", "1", "--time-scale", "0.002", "--token-scale", "0.01")


def arguments(folder: Path, url: str, *more: str) -> list[str]:
    files = [word for kind in ("json", "png", "html") for word in (f"--{kind}", str(folder / f"replay.{kind}"))]
    return ["--trace", str(PATH), "--url", url, *FAST, *files, *more]


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replayed:
    """Replays against an endpoint, and returns the report. Draws nothing, as that takes longest: without Matplotlib."""
    for name in MATPLOTLIB:
        monkeypatch.setitem(sys.modules, name, None)

    def replay(endpoint: FakeEndpoint, *more: str, status: int = 0) -> dict[str, Any]:
        with serving(endpoint) as url:
            assert main(arguments(tmp_path, url, *more)) == status
        report: dict[str, Any] = json.loads((tmp_path / "replay.json").read_text())
        return report

    return replay


def test_every_request_of_the_window_is_answered_in_full(replayed: Replayed) -> None:
    report = replayed(FakeEndpoint())
    summary = report["summary"]
    assert (summary["requests"], summary["ok"], report["errors"]) == (40, 40, [])
    assert summary["output_tokens"] == report["trace"]["output_tokens"] > 40
    assert summary["tokens_per_chunk"] == 1.0


@pytest.mark.slow
def test_the_report_is_drawn(tmp_path: Path) -> None:
    with serving(FakeEndpoint()) as url:
        assert main(arguments(tmp_path, url)) == 0
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert "40 of 40" in (tmp_path / "replay.html").read_text()


def test_without_matplotlib_the_report_is_written_and_nothing_drawn(
    replayed: Replayed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replayed(FakeEndpoint())["summary"]["ok"] == 40
    assert "were not written: matplotlib is not installed" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png")) + list(tmp_path.glob("*.html"))


def test_requests_are_labelled_and_ask_for_their_length(replayed: Replayed) -> None:
    endpoint = FakeEndpoint()
    replayed(endpoint, "--seed", "5", "--max-output", "3")
    assert set(endpoint.bodies) == {f"replay-5-{row}" for row in range(40)}
    assert max(body["max_tokens"] for body in endpoint.bodies.values()) == 3
    assert all(body["ignore_eos"] and body["stream"] for body in endpoint.bodies.values())


def test_no_request_waits_for_an_earlier_one(replayed: Replayed) -> None:
    assert replayed(FakeEndpoint(hold_until=40))["summary"]["ok"] == 40


def test_no_request_is_sent_before_its_time(replayed: Replayed) -> None:
    summary = replayed(FakeEndpoint(), "--time-scale", "0.005")["summary"]
    # Without waiting, the requests of the last arrivals would go out some 0.2 s early.
    assert summary["send_lag_s"]["mean"] > -0.001
    assert summary["duration_s"] > 0.2


def test_requests_are_clipped_to_the_endpoints_context(replayed: Replayed) -> None:
    endpoint = FakeEndpoint(context=8)
    report = replayed(endpoint)
    longest = max(len(body["prompt"]) + body["max_tokens"] for body in endpoint.bodies.values())
    assert longest == report["options"]["context"] == 8
    assert 0 < report["trace"]["clipped"] < 40


@pytest.mark.parametrize(
    ("fault", "outcome", "kind"),
    [
        ("refuse", "failed", "HTTP 503"),
        ("break off", "broken", "RemoteProtocolError"),
        ("end early", "broken", "no [DONE]"),
        ("lose a token", "broken", "too few tokens"),
        ("report an error", "broken", "error event"),
        ("garble", "broken", "malformed event"),
    ],
)
def test_a_fault_is_counted_and_ends_no_other_request(replayed: Replayed, fault: str, outcome: str, kind: str) -> None:
    report = replayed(FakeEndpoint(faults={"replay-0-3": fault}))
    assert (report["summary"]["ok"], report["summary"][outcome]) == (39, 1)
    assert [(one["kind"], one["count"]) for one in report["errors"]] == [(kind, 1)]


def test_the_message_of_a_refusal_is_reported(replayed: Replayed, capsys: pytest.CaptureFixture[str]) -> None:
    replayed(FakeEndpoint(faults={"replay-0-3": "refuse"}))
    assert "1 x error: HTTP 503: saturated" in capsys.readouterr().out


def test_polls_use_the_admin_key(replayed: Replayed) -> None:
    endpoint = FakeEndpoint()
    report = replayed(endpoint, "--admin-key", "secret")
    assert endpoint.keys == {"Bearer secret"}
    assert [one["id"] for one in report["timeline"][-1]["replicas"]] == ["a", "b"]
    assert report["summary"]["kv_used_percent"]["p50"] == 25.0


def test_migrations_from_before_the_replay_are_left_out(replayed: Replayed) -> None:
    migrations = replayed(FakeEndpoint())["migrations"]
    assert migrations["items"] == [NEW_MIGRATION]
    assert migrations["pause_s"]["max"] == 0.25


def test_a_replay_against_another_server(replayed: Replayed) -> None:
    report = replayed(FakeEndpoint(mell=False))
    assert report["summary"]["ok"] == 40
    assert set(report["migrations"]["not_offered"]) == {"/mell/state", "/mell/migrations"}
    assert report["timeline"][-1]["replicas"] is None


def test_moves_are_ordered_during_the_replay(replayed: Replayed) -> None:
    endpoint = FakeEndpoint()
    moves = replayed(endpoint, "--move-every", "0.005")["migrations"]["moves"]
    assert endpoint.moves[0] == {"request_id": "r1", "path": "auto"}
    assert moves["rejected"] == [{"kind": "HTTP 409", "count": 1, "first_message": "busy"}]
    assert moves["accepted"] > 0
    # The replay may end while the last one is on its way or unanswered.
    assert moves["asked"] - len(endpoint.moves) in (0, 1)
    assert moves["asked"] - moves["accepted"] - 1 in (0, 1)


def test_an_interrupted_replay_has_a_report(replayed: Replayed) -> None:
    def interrupt(count: int) -> None:
        if count == 5:
            os.kill(os.getpid(), signal.SIGINT)

    report = replayed(FakeEndpoint(hold_until=99, on_request=interrupt), "--time-scale", "0.02", status=130)
    assert report["summary"]["interrupted"]
    assert 5 <= report["summary"]["cancelled"] == report["summary"]["requests"] < 40


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one-line error of a replay that cannot start."""
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_unreachable_endpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, *arguments(tmp_path, "http://127.0.0.1:9"))
    assert line.startswith("http://127.0.0.1:9 cannot be reached: ")


def test_the_message_of_a_starting_endpoint_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEndpoint(models_status=503)) as url:
        line = refused(capsys, *arguments(tmp_path, url))
    assert line == f"{url}/v1/models answered 503: still starting."


def test_moves_need_an_endpoint_with_a_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEndpoint(mell=False)) as url:
        line = refused(capsys, *arguments(tmp_path, url, "--move-every", "1"))
    assert "/mell/state is not offered: HTTP 404" in line


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--time-scale", "0", "time scale must be"),
        ("--token-scale", "-1", "token scale must be"),
        ("--minutes", "0", "number of minutes must be"),
        ("--start-minute", "9", "no request from second 540"),
        ("--move-every", "-1", "must not be negative"),
        ("--trace", "nowhere.gz", "cannot be read"),
        ("--json", "nowhere/replay.json", "cannot be written"),
        ("--url", "8000", "missing an 'http://' or 'https://' protocol"),
        ("--url", "http://host:port", "is not a URL"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, complaint: str
) -> None:
    assert complaint in refused(capsys, *arguments(tmp_path, "http://127.0.0.1:9", option, value))


def test_prompts_are_determined_by_the_seed_and_have_no_special_tokens() -> None:
    model, arrival = ServedModel("m", vocabulary=5), TraceRequest(3, 0.0, 50, 2)
    first, again, other = (completion(model, arrival, seed)["prompt"] for seed in (0, 0, 1))
    assert first == again != other
    assert set(first) == {3, 4}

"""Replays side by side, made from their reports alone."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from app.replay.measured import Measured
from app.replay.page import Run, main, render
from app.replay.report import Document, Setup, document
from app.replay.state import ReplicaSample, Sample
from app.replay.stream import Outcome, Record
from app.replay.trace import Arrival, Lengths, Window


def report(replicas: int, ttft_s: float) -> Document:
    """A second each of three samples; requests that take `ttft_s` until their first token, and 0.1 s for two more."""
    setup = Setup("trace.csv.gz", "http://127.0.0.1:8000", "tiny", Window(1.0), Lengths())
    cluster = tuple(ReplicaSample(f"r{n}", "RUNNING", 50, 100, 1) for n in range(replicas))
    samples = tuple(Sample(float(at_s), 2, at_s, 0, moved=1, replicas=cluster) for at_s in range(3))
    arrivals = [Arrival(row, float(row), 10, 3) for row in range(4)]
    records = tuple(
        Record(a, a.at_s, a.at_s + ttft_s + 0.2, tuple(a.at_s + ttft_s + n / 10 for n in range(3)), 3, Outcome.OK)
        for a in arrivals
    )
    return document(setup, arrivals, Measured(records=records, samples=samples))


class Seen(HTMLParser):
    """The cells of the table, row by row, the words of the plots, and what the page would fetch or run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.active: list[str] = []
        self._within: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("script", "link", "img", "iframe"):
            self.active.append(tag)
        self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._within and self._within[-1] in ("td", "th"):
            self.rows[-1].append(data)
        if self._within and self._within[-1] == "text":
            self.words.append(data)


def test_runs_stand_side_by_side() -> None:
    seen = Seen(render([Run("packed", report(1, 0.05)), Run("spread", report(3, 0.2))]))
    told = {row[0]: row[1:] for row in seen.rows[1:]}
    assert seen.rows[0] == ["packed", "spread"]
    assert told["seconds times running replicas"] == ["2", "6"]
    assert told["requests that came whole"] == ["4 of 4", "4 of 4"]
    assert told["time to first token, p50 / p99"] == ["50.0 / 50.0 ms", "200.0 / 200.0 ms"]
    assert told["between chunks, p50 / p99"] == ["100.0 / 100.0 ms"] * 2
    assert {"packed", "spread", "running replicas", "time to first token (% below)"} <= set(seen.words)


def test_the_page_needs_nothing_else_and_runs_nothing() -> None:
    page = render([Run("<script>alert(1)</script>", report(1, 0.05))])
    assert Seen(page).active == []
    assert "<script" not in page


def test_what_was_not_measured_is_left_out() -> None:
    empty = report(1, 0.05)
    empty["timeline"] = []
    empty["distributions"] = dict.fromkeys(empty["distributions"])
    assert ["seconds times running replicas", "-"] in Seen(render([Run("empty", empty)])).rows


def test_reports_are_read_from_files(tmp_path: Path) -> None:
    for name, replicas in ("a", 1), ("b", 2):
        (tmp_path / f"{name}.json").write_text(json.dumps(report(replicas, 0.1)))
    page = tmp_path / "both.html"
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--html", str(page)]) == 0
    assert Seen(page.read_text()).rows[0] == ["a", "b"]


@pytest.mark.parametrize("content", ["[]", "{}", "no", None], ids=["a list", "empty", "no JSON", "no file"])
def test_what_is_no_report_is_refused(content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    assert main([str(path), "--html", str(tmp_path / "page.html")]) == 2
    assert "other.json" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()

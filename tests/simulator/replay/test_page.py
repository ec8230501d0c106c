"""The HTML page, made from reports alone."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from simulator.replay.measurements import ReplayMeasurements, ReplaySample, ReplicaSample
from simulator.replay.page import NamedReport, main, render
from simulator.replay.report import Document, ReplaySetup, document
from simulator.replay.stream import Record, StreamOutcome
from simulator.replay.trace import LengthScaling, TraceRequest, TraceWindow


def report(replicas: int, ttft_s: float) -> Document:
    """A report of three samples, and of requests with a TTFT of `ttft_s` and two more tokens, 0.1 s apart."""
    setup = ReplaySetup("trace.csv.gz", "http://127.0.0.1:8000", "tiny", TraceWindow(1.0), LengthScaling())
    cluster = tuple(ReplicaSample(f"r{n}", "RUNNING", 50, 100, 1) for n in range(replicas))
    samples = tuple(ReplaySample(float(at_s), 2, at_s, 0, moved=1, replicas=cluster) for at_s in range(3))
    arrivals = [TraceRequest(row, float(row), 10, 3) for row in range(4)]
    records = tuple(
        Record(a, a.at_s, a.at_s + ttft_s + 0.2, tuple(a.at_s + ttft_s + n / 10 for n in range(3)), 3, StreamOutcome.OK)
        for a in arrivals
    )
    return document(setup, arrivals, ReplayMeasurements(records=records, samples=samples))


class ParsedPage(HTMLParser):
    """The rows of the table, the texts of the plots, and all elements that would load or run something."""

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


@pytest.mark.slow
def test_reports_are_compared_side_by_side() -> None:
    seen = ParsedPage(render([NamedReport("packed", report(1, 0.05)), NamedReport("spread", report(3, 0.2))]))
    rows = {row[0]: row[1:] for row in seen.rows[1:]}
    assert seen.rows[0] == ["packed", "spread"]
    assert rows["replica-seconds"] == ["2", "6"]
    assert rows["complete answers"] == ["4 of 4", "4 of 4"]
    assert rows["time to first token, p50 / p99"] == ["50.0 / 50.0 ms", "200.0 / 200.0 ms"]
    assert rows["between chunks, p50 / p99"] == ["100.0 / 100.0 ms"] * 2
    assert {"packed", "spread", "running replicas", "time to first token (% below)"} <= set(seen.words)


def test_the_page_is_self_contained_and_has_no_script() -> None:
    page = render([NamedReport("<script>alert(1)</script>", report(1, 0.05))])
    assert ParsedPage(page).active == []
    assert "<script" not in page


def test_missing_measurements_are_left_out() -> None:
    empty = report(1, 0.05)
    empty["timeline"] = []
    empty["distributions"] = dict.fromkeys(empty["distributions"])
    assert ["replica-seconds", "-"] in ParsedPage(render([NamedReport("empty", empty)])).rows


def test_reports_are_read_from_files(tmp_path: Path) -> None:
    for name, replicas in ("a", 1), ("b", 2):
        (tmp_path / f"{name}.json").write_text(json.dumps(report(replicas, 0.1)))
    page = tmp_path / "both.html"
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--html", str(page)]) == 0
    assert ParsedPage(page.read_text()).rows[0] == ["a", "b"]


@pytest.mark.parametrize("content", ["[]", "{}", "no", None], ids=["a list", "empty", "no JSON", "no file"])
def test_an_invalid_report_is_refused(content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    assert main([str(path), "--html", str(tmp_path / "page.html")]) == 2
    assert "other.json" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()

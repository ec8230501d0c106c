"""Requests that are dropped or changed, their account, and windows."""

from dataclasses import asdict
from pathlib import Path

import pytest

from app.simulator.errors import BadInput
from app.simulator.traces import rows
from app.simulator.traces.account import account_lines
from app.simulator.traces.rows import ReadWindow
from tests.app.simulator.traces.small import EXPECTED, OWN, REQUESTS, lines, read_text, requests_of, table

HEADER = "arrival_s,prompt_tokens,output_tokens"


def test_failed_calls_are_dropped_with_their_shares(tmp_path: Path) -> None:
    trace = read_text(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "1,GPT-4,100,0,100,API log\n3,GPT-4,200,100,300,API log\n5,GPT-4,90,10,100,API log\n",
    )
    assert requests_of(trace) == [(0.0, 200, 100), (2.0, 90, 10)]
    assert list(account_lines(asdict(trace.account))) == [
        "read as BurstGPT (Timestamp, Request tokens, Response tokens), times in seconds",
        "failed calls, with an error or without an answer: dropped: 1 of 3 requests (33.3 %), 20.0 % of the tokens",
    ]
    with pytest.raises(BadInput, match="has no requests: all of its 1 rows are failed calls"):
        read_text(tmp_path, f"{HEADER}\n1,2,0\n")


def test_calls_with_an_error_are_failed(tmp_path: Path) -> None:
    row = {"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5}
    given = [row | {"error": error} for error in ("", None, "Timeout", "none")]
    trace = read_text(tmp_path, lines(given))
    assert [change.requests for change in trace.account.changes if "failed" in change.what] == [1]


def test_a_request_recorded_twice_counts_once(tmp_path: Path) -> None:
    first, *others = OWN.splitlines()
    trace = read_text(tmp_path, "\n".join((first, *others, *others[:8])))
    assert requests_of(trace) == EXPECTED
    doubled, unsorted = trace.account.changes
    assert (doubled.what, doubled.requests) == (
        "duplicates, equal to another request and at the same time: dropped",
        8,
    )
    assert unsorted.what == "out of order: sorted by time"


@pytest.mark.parametrize(
    "requests",
    [["0,5,5", "0,6,6", "0,5,5", "1,7,7", "1,8,8"], ["0,5,5", "0,5,5", "1.5,5,5", "1.5,5,5"]],
    ids=["coarse times", "equal lengths"],
)
def test_requests_that_may_be_equal_by_chance_are_kept(tmp_path: Path, requests: list[str]) -> None:
    trace = read_text(tmp_path, "\n".join((HEADER, *requests)))
    assert len(trace.at_s) == len(requests)
    assert trace.account.changes[0].what == "duplicates, equal to another request and at the same time: kept"


def test_rows_are_sorted_and_keep_their_places_in_the_file(tmp_path: Path) -> None:
    trace = read_text(tmp_path, f"{HEADER}\n2.5,30,3\n0,0,1\n1,7.4,1\n")
    assert requests_of(trace) == [(0.0, 1, 1), (1.0, 7.4, 1), (2.5, 30, 3)]
    assert list(trace.numbers) == [1, 2, 0]
    assert [(change.what, change.requests) for change in trace.account.changes] == [
        ("out of order: sorted by time", 2),
        ("without prompt tokens: one is assumed", 1),
        ("with fractions of tokens: rounded", 1),
    ]


def test_a_window_counts_from_the_first_request(tmp_path: Path) -> None:
    window = ReadWindow(5.0, 10.0)
    expected = [(round(at_s - 5.0, 6), *lengths) for at_s, *lengths in EXPECTED if 5 <= at_s < 10]
    found = requests_of(read_text(tmp_path, OWN, window=window))
    assert [(round(at_s, 6), *lengths) for at_s, *lengths in found] == expected
    with pytest.raises(BadInput, match="No request arrives after 1e\\+06 s"):
        read_text(tmp_path, OWN, window=ReadWindow(1e6))


def test_no_more_is_read_than_the_window_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_BLOCK", 10)
    broken = OWN + "this,is,never read\n"
    trace = read_text(tmp_path, broken, window=ReadWindow(end_s=3.0))
    assert requests_of(trace) == [row for row in EXPECTED if row[0] < 3]
    assert trace.account.read_to_line == 21
    assert "; read to line 21, the rest is later" in next(account_lines(asdict(trace.account)))
    reverse = table(HEADER, lambda n, r: (REQUESTS[-1 - n][0] / 1000, *REQUESTS[-1 - n][1:]))
    assert requests_of(read_text(tmp_path, reverse, window=ReadWindow(end_s=3.0))) == requests_of(trace)


def test_times_are_not_needed_for_lengths(tmp_path: Path) -> None:
    trace = read_text(tmp_path, "input_length,output_length\n3,4\n5,6\n", needs_times=False)
    assert (list(trace.prompts), list(trace.outputs)) == ([3, 5], [4, 6])

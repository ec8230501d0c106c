"""Requests that are dropped or changed, their account, and windows."""

from dataclasses import asdict
from pathlib import Path

import pytest

from simulator.errors import BadInput
from simulator.traces import rows
from simulator.traces.account import account_lines
from simulator.traces.rows import ReadWindow
from tests.simulator.traces.small import EXPECTED, OWN, REQUESTS, lines, read_text, requests_of, table

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
    no_errors: list[object] = [
        "",
        None,
        "none",
        "No",
        "N/A",
        "-",
        "OK",
        "[]",
        [],
        "{}",
        {},
        "null",
        "false",
        "0",
        0,
        0.0,
    ]
    errors: list[object] = ["Timeout", "1", 429, {"message": "overloaded"}, ["reset"], True]
    trace = read_text(tmp_path, lines([row | {"error": error} for error in (*no_errors, *errors)]))
    assert [*trace.numbers] == [*range(len(no_errors))]
    assert [change.requests for change in trace.account.changes if "failed" in change.what] == [len(errors)]


@pytest.mark.parametrize(
    ("name", "good", "failed"),
    [
        ("success", [True, "true", "True", 1, None, "", "yes"], [False, "false", 0, "0", "No"]),
        ("status", [200, "200", "ok", None, "", 0, "finished", 1000], [400, 500.0, "404", "503 overloaded", "Failed"]),
        ("status_code", ["200", "302"], ["500", "429"]),
    ],
)
@pytest.mark.parametrize("is_csv", [False, True])
def test_calls_without_success_are_failed(
    tmp_path: Path, name: str, good: list[object], failed: list[object], is_csv: bool
) -> None:
    values = [*good, *failed]
    rows = [{"arrival_s": n, "prompt_tokens": 5, "output_tokens": 5, name: value} for n, value in enumerate(values)]
    table = "\n".join((f"{HEADER},{name}", *(",".join(map(str, row.values())) for row in rows)))
    trace = read_text(tmp_path, table if is_csv else lines(rows))
    assert [*trace.numbers] == [*range(len(good))]
    assert [(change.requests, change.what[:12]) for change in trace.account.changes] == [(len(failed), "failed calls")]


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


@pytest.mark.parametrize(
    "distinct",
    [
        {"request_id": ["a", "b"]},
        {"ID": [1, 2]},
        {"hash_ids": [[1, 2], [1, 3]]},
        {"hash_ids": ["a", "b"]},
        {"chat_id": [7, 8], "hash_ids": [[1], [1]]},
    ],
)
@pytest.mark.parametrize("with_names", [False, True])
def test_requests_with_ids_or_blocks_of_their_own_are_no_duplicates(
    tmp_path: Path, distinct: dict[str, list[object]], with_names: bool
) -> None:
    first, second = ({name: values[place] for name, values in distinct.items()} for place in range(2))
    at_once = {"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5}
    later = [at_once | {"arrival_s": n, "output_tokens": n} for n in range(1, 300)]
    trace = read_text(tmp_path, lines([at_once | first, at_once | second, *later]), with_names=with_names)
    assert len(trace.at_s) == 301
    trace = read_text(tmp_path, lines([at_once | first, at_once | first, *later]), with_names=with_names)
    assert len(trace.at_s) == 300


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([1, 2], [1, 2]),
        (["1", "2"], [1, 2]),
        *((text, [1, 2]) for text in ("[1, 2]", "[1,2]", "(1 2)", "1,2", "1 2", "1;2")),
        ([], []),
        ("[]", []),
        (None, None),
        ("", None),
        (" ", None),
    ],
)
def test_names_of_blocks_are_a_list_or_its_text(tmp_path: Path, names: object, expected: list[int] | None) -> None:
    row = {"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "hash_ids": names}
    trace = read_text(tmp_path, lines([row]))
    assert {number: [*read] for number, read in trace.names.items()} == ({} if expected is None else {0: expected})
    assert trace.account.changes == ()


def test_names_of_blocks_are_read_from_csv_with_decimal_commas(tmp_path: Path) -> None:
    trace = read_text(tmp_path, "arrival_s;prompt_tokens;output_tokens;hash_ids\n1,5;2;3;[1,2]\n")
    assert [*trace.names[0]] == [1, 2]


@pytest.mark.parametrize("names", [[-1], [1 << 64], ["a"], [1.0], {"a": [1]}, {"1": 2}, 7, "a,b", "[-1]"])
def test_unreadable_names_of_blocks_are_ignored_and_counted(tmp_path: Path, names: object) -> None:
    row = {"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "hash_ids": [1]}
    content = lines([row, row | {"arrival_s": 1, "hash_ids": names}])
    trace = read_text(tmp_path, content)
    assert (len(trace.at_s), [*trace.names]) == (2, [0])
    (change,) = trace.account.changes
    assert (change.what, change.requests) == ("hash_ids that are no list of whole numbers from 0 on: ignored", 1)
    assert read_text(tmp_path, content, with_names=False).account.changes == ()


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
    assert "; read to line 21, which is after the part" in next(account_lines(asdict(trace.account)))
    reverse = table(HEADER, lambda n, r: (REQUESTS[-1 - n][0] / 1000, *REQUESTS[-1 - n][1:]))
    assert requests_of(read_text(tmp_path, reverse, window=ReadWindow(end_s=3.0))) == requests_of(trace)


def test_times_are_not_needed_for_lengths(tmp_path: Path) -> None:
    trace = read_text(tmp_path, "input_length,output_length\n3,4\n5,6\n", needs_times=False)
    assert (list(trace.prompts), list(trace.outputs)) == ([3, 5], [4, 6])

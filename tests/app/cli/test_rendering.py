"""Rendered output at two terminal widths."""

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Group

from app.cli.cache import render_match
from app.cli.formatting import Bar, age, cells, count, duration
from app.cli.migrations import render_migrations
from app.cli.models import model_rows, render_models
from app.cli.status import header, memory_table, render_status
from app.cli.top import Rates, TopView, render_top
from app.client.documents import parse_match, parse_records, parse_state
from policies.decision.matching import Basis, Routed
from policies.decision.placement import Queue
from policies.model import Phase, ReplicaId, ReplicaState, Role
from policies.precedence import Precedence
from tests.app.cli.conftest import drawn
from tests.app.client.sample import (
    BUSY,
    MATCHED,
    MOVED,
    NOW,
    SHARING,
    elastic,
    match,
    node,
    record,
    replica,
    request,
    seat,
    state,
)

URL = "http://127.0.0.1:8000"
WIDTHS = pytest.mark.parametrize("width", [80, 120])


def status(document: object = BUSY, migrations: dict[str, Any] = MOVED, width: int = 80, now: float = NOW) -> str:
    return drawn(render_status(URL, parse_state(document), parse_records(migrations["migrations"]), now), width)


def test_status_at_80_columns() -> None:
    assert status().splitlines() == [
        "Mell at http://127.0.0.1:8000",
        "mode act, policy pack; 1 of 2 wanted replicas running",
        "",
        "REPLICA   STATE     NODE      KV CACHE                    USED/TOKENS  REQ  WAIT",
        "aaaaaaaa  RUNNING   4f0b45ba  ███████████████░░░░░░  72%    2.3k/3.2k    2     0",
        "bbbbbbbb  DRAINING  4f0b45ba  ██░░░░░░░░░░░░░░░░░░░  10%     320/3.2k    2     1",
        "cccccccc  STARTING  4f0b45ba  ░░░░░░░░░░░░░░░░░░░░░   0%          0/0    0     0",
        "",
        "total: 4 requests, 1 waiting; KV 2.6k of 6.4k tokens (41%); 0 preemptions so far",
        "migrations: 1 committed, 1 aborted, 1 under way",
        "newest, 12 s ago: demo aaaaaaaa → bbbbbbbb by kv, committed, paused 6.6 ms",
    ]


def test_status_shows_roles() -> None:
    document = state(
        replica("aaaaaaaa", role=Role.PREFILL, by_hand=Role.PREFILL),
        replica("bbbbbbbb", role=Role.DECODE),
        replica("cccccccc"),
        replica("dddddddd", by_hand=Role.DECODE),
    )
    rows = [line for line in status(document).splitlines() if " RUNNING" in line]
    assert [row.partition("4f0b")[0].split()[1:] for row in rows] == [
        ["RUNNING", "prefill", "[prefill]"],
        ["RUNNING", "decode"],
        ["RUNNING"],
        ["RUNNING", "[decode]"],
    ]


@WIDTHS
def test_every_row_of_status_ends_at_the_edge(width: int) -> None:
    rows = [line for line in status(width=width).splitlines() if line.startswith(("REPLICA", "aaaa", "bbbbbbbb  "))]
    assert {len(row) for row in rows} == {width}


def test_warnings_of_status() -> None:
    assert "as of 9 s ago: the scheduler is unavailable" in status(now=NOW + 9)
    assert "no report from the scheduler yet" in status(
        {"as_of": 0.0, "mode": "off", "replicas": []}, {"migrations": []}
    )
    resting = state(replica("a"), replica("b"), resting_pairs=[["a", "b"]])
    assert "no moves after failures: a → b" in status(resting)
    assert "migrations: none" in status(migrations={"migrations": []})
    said = "would run 2 replicas instead of 4, with 3 moves in 5 minutes"
    assert f"dry run: {said}" in status(state(replica("a"), mode="observe", dry_run={"said": said}))
    assert "dry run" not in status()


def test_classes_in_status() -> None:
    assert "classes:" not in status()
    batch, chat = Precedence("batch"), Precedence("chat")
    requests = (
        replace(request("1", 40, Phase.WAITING), precedence=batch),
        replace(request("2", 40), precedence=batch),
        replace(request("3", 40), precedence=chat),
    )
    assert "classes: batch 2 (1 waiting), chat 1" in status(state(replica("a", *requests)))


def test_the_service_level_in_status() -> None:
    held = {
        "state": "held",
        "target": {"ttft_p99_s": 2.0, "itl_p99_ms": None},
        "reached": {"ttft_p99_s": 2.4, "itl_p99_ms": 31.0},
        "predicted": {"ttft_p99_s": 1.2, "itl_p99_ms": 30.0},
        "why": [],
        "slowest_step_s": 0.0204,
        "step_limit_s": 0.05,
        "late_replicas": 0,
        "free_replicas": 1.25,
        "reserve_replicas": 0.5,
    }
    shown = status(state(replica("a"), service=held), width=100)
    assert "service level held; slowest step 20.4 of 50.0 ms\n" in shown
    assert "  first token, p99: 2.40 s, predicted 1.20 s, target 2.00 s\n" in shown
    assert "  between tokens, p99: 31.0 ms, predicted 30.0 ms, target -\n" in shown
    slow = held | {"state": "unreachable", "why": ["prefills are too long"], "late_replicas": 1, "step_limit_s": None}
    assert "unreachable; 1 replica with late first tokens\n" in status(state(replica("a"), service=slow), width=100)
    assert "  prefills are too long" in status(state(replica("a"), service=slow))
    measuring = state(replica("a"), service={"target": {}, "state": "measuring"})
    assert "service level measuring\n" in status(measuring)
    assert "service level" not in status()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "no replica closes: all are in use"),
        ({"up": "reserve", "opened": 2, "kept": "starting"}, "2 replicas will open: 0.5 replicas free, 1.3 kept in "),
        ({"up": "requests", "kept": "starting"}, "no further replica may open: 3 requests without room; no replica "),
        ({"kept": "reserve"}, "no replica closes: 0.5 replicas free, 1.3 kept in reserve"),
        ({"kept": "linger", "linger_left_s": 7.0}, "no replica closes: an empty one stays for 7.00 s"),
        ({"kept": "minimum"}, "no replica closes: the settings keep at least 2 replicas"),
        (
            {"up": "prefills", "opened": 1, "kept": "starting"},
            "1 replica will open: on fewer than 4, prefills lengthen too many steps; no replica ",
        ),
        ({"kept": "prefills"}, "no replica closes: on fewer than 4, prefills lengthen too many steps"),
        ({"kept": None, "closed": 1}, "1 replica will close"),
        ({"kept": "unknown to this version"}, "no replica closes: unknown to this version"),
    ],
)
def test_the_reasons_for_the_number_of_replicas(changed: dict[str, Any], line: str) -> None:
    scaling = {
        "up": None,
        "kept": "in_use",
        "opened": 0,
        "closed": 0,
        "min_replicas": 2,
        "level_replicas": 4,
        "waiting_requests": 3,
        "free_replicas": 0.52,
        "reserve_replicas": 1.3,
        "linger_left_s": None,
    }
    assert f"\n{line}" in status(state(replica("a"), scaling=scaling | changed), width=100)


@pytest.mark.parametrize(
    ("reason", "predicted", "why"),
    [
        ("measuring", {}, "too little is known yet"),
        ("room", {}, "with more of them the others would lack room"),
        ("overload", {}, "no number of them keeps up with the arrivals"),
        ("times", {"0": 2.5, "1": 1.25}, "predicted times of a job are 0: 2.50 s, 1: 1.25 s"),
        ("unknown to this version", {}, "unknown to this version"),
    ],
)
def test_the_reasons_for_the_number_of_replicas_for_prefills(
    reason: str, predicted: dict[str, float], why: str
) -> None:
    shown = {"prefill_replicas": 1, "at_most": 3, "reason": reason, "apart_share": 0.25, "predicted_s": predicted}
    line = f"1 of at most 3 replicas for prefills, 25% of the newest prompts there: {why}"
    assert f"\n{line}" in status(state(replica("a"), disaggregation=shown), width=120)


def test_migrations_at_80_columns() -> None:
    lines = render_migrations(parse_records(MOVED["migrations"]), 80)
    assert drawn(Group(*lines)).splitlines() == [
        "ID       REQUEST      FROM     TO       PATH      PRED    TOOK   PAUSE OUTCOME",
        "01234567 demo         aaaaaaaa bbbbbbbb kv     50.0 ms 56.4 ms  6.6 ms committed",
        "11234567 other        aaaaaaaa bbbbbbbb kv     50.0 ms       -  6.6 ms aborted",
        "  the request ended by itself",
        "21234567 demo         aaaaaaaa bbbbbbbb kv     50.0 ms       -  6.6 ms copy",
    ]


def test_a_wide_terminal_has_room_for_reasons() -> None:
    lines = render_migrations(parse_records([record("m", reason="drain " * 20)]), 120)
    heading, row = drawn(Group(*lines), 120).splitlines()
    assert heading.endswith("OUTCOME   REASON") and row.endswith("…")
    assert len(row) <= 120 and row.index("drain") == heading.index("REASON")


@WIDTHS
def test_rows_printed_one_by_one_are_aligned(width: int) -> None:
    records = parse_records([record("m", label="x" * 128), record("n", label="é")])
    rows = [drawn(Group(*render_migrations((r,), width, headed=False)), width) for r in records]
    assert len({row.index("aaaaaaaa") for row in rows}) == 1
    assert all(len(row.splitlines()) == 1 for row in rows)


def test_labels_are_text_and_not_markup() -> None:
    records = {"migrations": [record("m", label="[red]x[/red]")]}
    assert "[red]x[/red]" in status(migrations=records)


def view(seen_s: float = 100.0, error: str | None = None) -> TopView:
    rates = Rates(over_s=10.0, came=3.25, left=3.0, tokens=1234.0, moved=0.2)
    return TopView(parse_state(BUSY), parse_records(MOVED["migrations"]), rates, seen_s, error)


def test_top_at_80_columns() -> None:
    assert drawn(render_top(URL, view(), 100.5, NOW, 30)).splitlines() == [
        "Mell at http://127.0.0.1:8000",
        "mode act, policy pack; 1 of 2 wanted replicas running",
        "last 10 s: 3.2 requests/s came, 3.0 left; 1.2k tokens/s; 12 moves/min",
        "",
        "aaaaaaaa  RUNNING   █████████████████▓▓▓▓▓▓▓░░░░░░░░░░  72%  2.3k/3.2k     2 req",
        "bbbbbbbb  DRAINING  ███░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  10%   320/3.2k  1 +1 req",
        "cccccccc  STARTING  ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░   0%        0/0     0 req",
        "total: 4 requests, 1 waiting; KV 2.6k of 6.4k tokens (41%); 0 preemptions so far",
        "",
        "   12 s ago  demo aaaaaaaa → bbbbbbbb by kv, committed, paused 6.6 ms",
        "   12 s ago  other aaaaaaaa → bbbbbbbb by kv, aborted: the request ended by its…",
        "   40 s ago  demo aaaaaaaa → bbbbbbbb by kv, copy",
    ]


def test_top_shows_the_length_of_an_outage_and_the_last_state() -> None:
    shown = drawn(render_top(URL, view(error="nothing listens"), 104.0, NOW + 4, 30), 120)
    assert "no answer for 4 s: nothing listens" in shown and "2.3k/3.2k" in shown
    assert "the scheduler is unavailable" not in drawn(render_top(URL, view(), 160.0, NOW + 60, 30))


@WIDTHS
def test_top_fits_a_terminal(width: int) -> None:
    many = parse_records([record(f"m{i}", label="x" * 100) for i in range(100)])
    seen = TopView(parse_state(BUSY), many, None, 0.0)
    lines = drawn(render_top(URL, seen, 0.0, NOW, 30), width).splitlines()
    assert 25 <= len(lines) <= 30 and max(map(len, lines)) <= width


def test_a_bar_shows_its_parts() -> None:
    assert drawn(Bar((5, 2), 10), 10) == "█████▓▓░░░"
    assert drawn(Bar((5, 2), 10), 10, encoding="ascii") == "#####==..."


def test_parts_are_rounded_together_and_cut_at_the_end() -> None:
    assert sum(cells([1] * 7, 7, 10)) == 10
    assert cells([8, 8], 10, 10) == [8, 2]
    assert cells([3], 0, 10) == [0]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (999.7, "1.0k"), (20_123, "20.1k"), (123_456, "123k"), (1e6, "1.0M"), (2.5e9, "2.5G")],
)
def test_counts_have_about_three_digits(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0066, "6.6 ms"), (0.09999, "100 ms"), (0.9999, "1.00 s"), (9.999, "10 s"), (125, "2 min")],
)
def test_durations_have_about_three_digits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_ages_are_whole_seconds_and_never_negative() -> None:
    assert [age(s) for s in (-3.0, 2.4, 99.6, 36_000)] == ["0 s", "2 s", "2 min", "10 h"]


def test_a_match_at_80_columns() -> None:
    assert drawn(render_match(parse_match(MATCHED))).splitlines() == [
        "1,201 tokens, 75 full blocks of 16",
        "",
        "REPLICA     HBM  DRAM    WAIT  FIRST TOKEN   SCORE",
        "bbbbbbbb  1,184    16  200 ms       210 ms  250 ms  chosen, favoured",
        "aaaaaaaa      0     0  0.0 ms       600 ms  3.00 s  no room",
        "",
        "bbbbbbbb, by content: the policy chose among the favoured replicas",
    ]


@pytest.mark.parametrize(
    ("routed", "line"),
    [
        (None, "no replica accepts requests"),
        (Routed(Queue(ReplicaId("a"))), "a, by the policy alone; it fits nowhere, and would wait there"),
        (Routed(Queue(ReplicaId("a")), Basis.SESSION), "a, by session; it fits nowhere, and would wait there"),
    ],
)
def test_a_match_without_a_replica_or_without_room(routed: Routed | None, line: str) -> None:
    shown = drawn(render_match(parse_match(match(routed, off="no names")))).splitlines()
    assert shown[1] == "not routed by content: no names" and shown[-1] == line


def test_status_shows_several_models() -> None:
    scaling: dict[str, Any] = {
        "kept": "minimum",
        "up": None,
        "opened": 0,
        "closed": 0,
        "min_replicas": 1,
        "waiting_requests": 0,
    }
    scaling |= {"free_replicas": 0.0, "reserve_replicas": 0.0, "linger_left_s": None}
    document = state(
        replica("aaaaaaaa", request("r1", 32)) | {"model": "chat"},
        replica("bbbbbbbb", request("r2", 32), request("r3", 32)) | {"model": "code"},
        models=[{"model": "chat", "wanted_replicas": 1, "scaling": scaling}, {"model": "code", "wanted_replicas": 2}],
    )
    lines = status(document, width=120).splitlines()
    assert lines[2:5] == [
        "model chat: 1 of 1 wanted replicas running, 1 request",
        "  no replica closes: the settings keep at least 1 replica",
        "model code: 1 of 2 wanted replicas running, 2 requests",
    ]
    rows = [line.split()[1:3] for line in lines if " RUNNING" in line]
    assert rows == [["RUNNING", "chat"], ["RUNNING", "code"]]


def shown_models(document: dict[str, Any], now: float = NOW, width: int = 100) -> list[str]:
    found = parse_state(document)
    return drawn(render_models(found, model_rows(found), now), width).splitlines()


def test_a_sole_model_without_a_budget_is_one_row() -> None:
    assert shown_models(BUSY | {"names": ["tiny"]}) == [
        "MODEL  AWAKE  ASLEEP  STARTING  RUN  WAIT",
        "tiny       2       0         1    3     1",
    ]


def test_a_model_has_its_id_beside_its_names_if_that_is_none_of_them() -> None:
    models = [{"model": "org/chat", "names": ["chat", "gpt"]}, {"model": "code", "names": ["code"]}]
    rows = shown_models(state(replica("a") | {"model": "org/chat"}, models=models))[1:]
    assert [row.split("  ")[0] for row in rows] == ["chat, gpt (org/chat)", "code"]


@pytest.mark.parametrize(
    ("mode", "note"),
    [("act", "a request wakes it"), ("observe", "in the mode observe, only mell wake wakes it")],
)
def test_a_model_that_does_not_serve_has_the_reason(mode: str, note: str) -> None:
    asleep = replica("a", state=ReplicaState.ASLEEP, memory=elastic("a", None)) | {"model": "chat"}
    asleep["memory"]["cause"] = "its files are gone"
    starting = replica("b", state=ReplicaState.STARTING) | {"model": "code"}
    device = node(seat("a", "asleep", 310, "it sleeps", "chat"), seat("b", "waits", 0, "it needs 900 MiB", "code"))
    models = [{"model": "chat", "names": ["chat"]}, {"model": "code", "names": ["code"]}]
    assert shown_models(state(asleep, starting, mode=mode, models=models, devices=[device]))[3:] == [
        f"chat: asleep: {note}",
        "chat: a: its files are gone",
        "code: b waits for memory: it needs 900 MiB",
    ]


def test_how_long_a_replica_has_been_asleep_is_shown() -> None:
    longer, shorter, falling = (
        replica(id, state=ReplicaState.ASLEEP, memory=elastic(id, None, asleep_at=at))
        for id, at in (("a", NOW - 600), ("b", NOW - 90), ("c", None))
    )
    asleep = state(longer, shorter, falling, devices=[node()], names=["m"], mode="act")
    assert shown_models(asleep)[-1] == "m: asleep for 90 s: a request wakes it"
    rows = [line.split("4f0b45ba")[0].split() for line in status(asleep).splitlines() if line[:2] in ("a ", "b ", "c ")]
    assert [" ".join(row) for row in rows] == ["a ASLEEP 10 min", "b ASLEEP 90 s", "c ASLEEP"]


def test_models_of_an_old_state_come_with_its_age() -> None:
    assert shown_models(BUSY, NOW + 9)[0].startswith("as of 9 s ago")


def test_devices_in_status_and_top() -> None:
    assert "MEMORY" not in status(), "nothing without a budget"
    lines = status(SHARING).splitlines()
    assert lines[11:13] == [
        "4f0b45ba  ███████████████████████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓░  98%  8,046/8,192    8,046",
        "4f0b45ba: chat 5,178 (1 asleep), code 2,868",
    ]
    seen = TopView(parse_state(SHARING), (), None, 0.0)
    lines = drawn(render_top(URL, seen, 0.0, NOW, 30)).splitlines()
    assert lines[10] == "4f0b45ba: chat 5,178 (1 asleep), code 2,868" and "█▓" in lines[9]


@WIDTHS
def test_ten_replicas_of_one_model_on_a_device_are_one_line_of_top(width: int) -> None:
    ids = [f"replica{number}" for number in range(10)]
    seats = [seat(id, "demand", 900 - number, "") for number, id in enumerate(ids)]
    document = state(*map(replica, ids), devices=[node(*seats, budget_mib=9000)])
    seen = TopView(parse_state(document), parse_records([record(f"m{i}") for i in range(100)]), None, 0.0)
    lines = drawn(render_top(URL, seen, 0.0, NOW, 40), width).splitlines()
    (holders,) = [line for line in lines if line.startswith("4f0b45ba: ")]
    assert holders.startswith("4f0b45ba: replica0 900, replica1 899, ") and holders.endswith("…")
    assert 35 <= len(lines) <= 40 and max(map(len, lines)) <= width


def test_pairs_have_a_line_each_in_the_status() -> None:
    pair = {"lower": "a", "upper": "b", "boundary": 16, "state_s": 12.0, "by_hand": False, "cause": None}
    proposed = {"formed": 1, "undone": 0, "now": [{"lower": "e", "upper": "f", "forms": True}]}
    pairs = [
        pair | {"phase": "paired", "state": "paired"},
        pair | {"upper": "c", "phase": "undoing", "state": "loading", "by_hand": True, "cause": "the replica drains"},
    ]
    pairing = {"mode": "observe", "pairs": pairs, "proposed": proposed, "unpairable": {"d": "it keeps no layers"}}
    document = state(replica("a"), pairing=pairing)
    lines = [line.plain for line in header(URL, parse_state(document), NOW)]
    assert lines[-5:-1] == [
        "pair a + b, layers from 16 on at b, by the policy: paired for 12 s",
        "pair a + c, layers from 16 on at c, by hand: undoing (loading) for 12 s: the replica drains",
        "would pair e + f",
        "d cannot be in a pair: it keeps no layers",
    ]


def test_the_pair_of_a_replica_in_the_table_of_memory() -> None:
    paired = replica("a", memory=elastic("a", 100))
    over = replica("b", memory=elastic("b", 100))
    paired["memory"]["pair"] = {"state": "paired", "buddy": "c"}
    over["memory"]["pair"] = {"state": "over", "buddy": "c"}
    rows = drawn(memory_table(parse_state(state(paired, over)).replicas, {}), 100).splitlines()[1:]
    assert ["settled, paired with c" in row for row in rows] == [True, False]

"""The known formats and units of time: equal requests are read alike from all of them."""

import json
from pathlib import Path

import pytest

from app.simulator.errors import BadInput
from app.simulator.traces.times import date_time
from tests.app.simulator.traces.small import (
    BEGIN,
    EXPECTED,
    OWN,
    REQUESTS,
    lines,
    moment,
    objects,
    read_text,
    requests_of,
    table,
)

UNIX_S = int(BEGIN.timestamp())

FORMATS = {
    "Mell": (OWN, "seconds"),
    "Azure 2023/2024": (
        table(
            "TIMESTAMP,ContextTokens,GeneratedTokens", lambda n, r: (moment(r[0], "%Y-%m-%d %H:%M:%S.!0000"), *r[1:])
        ),
        "date-times",
    ),
    "Azure 2025 (multimodal)": (
        table(
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
            lambda n, r: (moment(r[0], "%Y-%m-%d %H:%M:%S.!000+00:00"), n % 3, *r[1:]),
        ),
        "date-times",
    ),
    "BurstGPT": (
        table(
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
            lambda n, r: (19440110 + r[0] / 1000, "", 1, "GPT-4", r[1], r[2], r[1] + r[2], "API log"),
        ),
        "seconds",
    ),
    "Qwen-Bailian": (
        lines(
            objects(
                lambda n, r: {
                    "chat_id": n,
                    "parent_chat_id": n - 1,
                    "timestamp": r[0] / 1000,
                    "input_length": r[1],
                    "output_length": r[2],
                    "type": "text",
                    "turn": 1 + n,
                    "hash_ids": [n],
                }
            )
        ),
        "seconds",
    ),
    "Mooncake": (
        lines(objects(lambda n, r: {"timestamp": r[0], "input_length": r[1], "output_length": r[2], "hash_ids": [n]})),
        "milliseconds",
    ),
    "aiperf": (
        lines(
            objects(
                lambda n, r: {"session_id": f"s{n}", "timestamp": r[0], "input_length": r[1], "output_length": r[2]}
            )
        ),
        "milliseconds",
    ),
    "ServeGen": (
        table("request_id,timestamp,input_tokens,output_tokens", lambda n, r: (n, r[0] / 1000, *r[1:])),
        "seconds",
    ),
    "vidur": (
        table("arrived_at,num_prefill_tokens,num_decode_tokens", lambda n, r: (r[0] / 1000, *r[1:])),
        "seconds",
    ),
    "splitwise-sim": (
        table(
            "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size",
            lambda n, r: (n, 2, 0, r[0] / 1000, 1, *r[1:]),
        ),
        "seconds",
    ),
    "vllm bench serve": (
        json.dumps(
            {
                "date": "20260101",
                "request_throughput": 1.0,
                "input_lens": [r[1] for r in REQUESTS],
                "output_lens": [r[2] for r in REQUESTS],
                "itls": [[0.1]] * 40,
                "start_times": [9876.5 + r[0] / 1000 for r in REQUESTS],
                "errors": [""] * 40,
            }
        ),
        "seconds",
    ),
    "columns of no known format": (
        table("when,time,isl,osl", lambda n, r: ("", r[0] / 1000, r[1], r[2])),
        "seconds",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_recognised_by_its_columns(tmp_path: Path, name: str) -> None:
    content, unit = FORMATS[name]
    trace = read_text(tmp_path, content)
    assert requests_of(trace) == EXPECTED
    assert (trace.account.format, trace.account.time_unit, trace.account.changes) == (name, unit, ())
    assert not trace.sessions


@pytest.mark.parametrize(
    ("header", "per_ms", "unit"),
    [
        ("arrived_at", 1, "milliseconds"),
        ("arrived_at", 1_000, "microseconds"),
        ("arrived_at", 1_000_000, "nanoseconds"),
        ("timestamp_ms", 1, "milliseconds"),
        ("Arrival (us)", 1_000, "microseconds"),
    ],
)
def test_the_unit_of_whole_numbers_follows_from_the_name_or_the_values(
    tmp_path: Path, header: str, per_ms: int, unit: str
) -> None:
    content = table(f"{header},num_prefill_tokens,num_decode_tokens", lambda n, r: (r[0] * per_ms, *r[1:]))
    trace = read_text(tmp_path, content)
    assert (requests_of(trace), trace.account.time_unit) == (EXPECTED, unit)


@pytest.mark.parametrize(
    ("per_ms", "unit"),
    [(0.001, "Unix seconds"), (1, "Unix milliseconds"), (1_000, "Unix microseconds"), (1_000_000, "Unix nanoseconds")],
)
@pytest.mark.parametrize("header", ["arrival_s", "timestamp"])
def test_unix_times_count_from_the_first(tmp_path: Path, per_ms: float, unit: str, header: str) -> None:
    trace = read_text(
        tmp_path,
        table(
            f"{header},prompt_tokens,output_tokens",
            lambda n, r: (
                f"{UNIX_S + r[0] / 1000:.3f}" if per_ms < 1 else (UNIX_S * 1000 + r[0]) * int(per_ms),
                *r[1:],
            ),
        ),
    )
    assert (requests_of(trace), trace.account.time_unit) == (EXPECTED, unit)
    assert trace.account.begins == "2024-03-01 12:00:00 UTC"


def test_mooncake_columns_in_seconds_are_recognised_by_their_pace(tmp_path: Path) -> None:
    rows = objects(lambda n, r: {"timestamp": r[0] / 1000, "input_length": r[1], "output_length": r[2]})
    trace = read_text(tmp_path, lines(rows))
    assert (requests_of(trace), trace.account.time_unit) == (EXPECTED, "seconds")


@pytest.mark.parametrize(
    "text",
    [
        "2024-03-01 12:00:00.391",
        "2024-03-01T12:00:00.3910000",
        "2024-03-01 12:00:00.391000+00:00",
        "2024-03-01T12:00:00.391Z",
        "2024-03-01 12:00:00,391",
        "2024-03-01 12:00:00.391 UTC",
        "2024-03-01 14:00:00.391 +0200",
        "2024-03-01T07:00:00.391-05:00",
    ],
)
def test_date_times_have_fractions_and_zones(text: str) -> None:
    assert date_time(text) == pytest.approx(UNIX_S + 0.391, abs=1e-6)


@pytest.mark.parametrize("text", ["yesterday", "12:00", "01/03/2024 12:00:00"])
def test_another_text_is_no_time(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match=f"line 2: arrival_s is neither a number nor a date-time: {text}"):
        read_text(tmp_path, f"arrival_s,prompt_tokens,output_tokens\n{text},1,1\n")


def test_turns_follow_the_answer_before_with_the_conversation(tmp_path: Path) -> None:
    turn = {"session_id": "a", "input_length": 10, "output_length": 5}
    rows = [turn | {"timestamp": 1000}, turn | {"session_id": "b", "timestamp": 1200}, turn | {"delay": 500}]
    trace = read_text(tmp_path, lines(rows))
    assert requests_of(trace) == [(0.0, 10, 5), (0.2, 10, 5), (0.5, 25, 5)]
    assert (trace.sessions, trace.think_s) == ({0: "a", 1: "b", 2: "a"}, {2: 0.5})
    assert [change.what for change in trace.account.changes] == [
        "turns after a delay: the conversation before is part of their prompts"
    ]
    with pytest.raises(BadInput, match="line 1: timestamp is missing"):
        read_text(tmp_path, lines([turn | {"timestamp": None}]))


def test_a_result_without_details_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--save-detailed"):
        read_text(tmp_path, json.dumps({"request_throughput": 3.0, "total_input_tokens": 7}))

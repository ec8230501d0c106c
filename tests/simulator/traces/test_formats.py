"""The known formats and units of time: equal requests are read alike from all of them."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from simulator.errors import BadInput
from simulator.traces.account import account_lines
from simulator.traces.times import date_time
from tests.simulator.traces.small import (
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
        ("time", 1, "milliseconds"),
        ("time", 1_000, "microseconds"),
        ("arrived_at", 1_000, "microseconds"),
        ("arrived_at", 1_000_000, "nanoseconds"),
    ],
)
def test_the_unit_of_whole_numbers_is_guessed_from_the_values(
    tmp_path: Path, header: str, per_ms: int, unit: str
) -> None:
    content = table(f"{header},num_prefill_tokens,num_decode_tokens", lambda n, r: (r[0] * per_ms, *r[1:]))
    trace = read_text(tmp_path, content)
    assert (requests_of(trace), trace.account.time_unit) == (EXPECTED, unit)
    assert list(account_lines(asdict(trace.account)))[1] == (
        f"unit of times guessed from the format and the values: {unit}; if it is wrong, name the unit in the column, "
        "as in timestamp_s or timestamp_ms, or correct the times with --time-scale"
    )


@pytest.mark.parametrize(
    ("header", "per_ms"),
    [
        *((name, 0.001) for name in ("arrival_time_s", "timestamp_sec", "Timestamp (seconds)", "arrival_seconds")),
        *((name, 0.001) for name in ("timestamp_seconds", "time in seconds", "requestArrivalTime", "submitted_at_s")),
        *((name, 1) for name in ("arrival_time_ms", "arrived_at_ms", "start_time_ms", "time_ms", "ts_ms", "arrivalms")),
        *(
            (name, 1)
            for name in ("request_time_ms", "ArrivalTime(ms)", "timestampMs", "TIMESTAMP_MS", "timestamp [ms]")
        ),
        *((name, 1_000) for name in ("Arrival (us)", "timestamp_µs", "arrival_timestamp_us", "created_at_micros")),
        *((name, 1_000_000) for name in ("timestamp_ns", "start_time_nanoseconds")),
    ],
)
@pytest.mark.parametrize("begin", [0, 2_000_000_000], ids=["from 0", "from 2e9"])
def test_the_name_of_a_column_of_times_may_end_with_its_unit(
    tmp_path: Path, header: str, per_ms: float, begin: int
) -> None:
    base = 0 if per_ms < 1 else begin
    trace = read_text(
        tmp_path,
        table(f"{header},prompt_tokens,output_tokens", lambda n, r: (base + r[0] * per_ms, *r[1:])),
    )
    assert requests_of(trace) == EXPECTED
    assert (trace.account.columns[0], trace.account.unit_is_guess) == (header, False)


LENGTHS = {
    "num_generated_tokens": "num_prompt_tokens",
    "completion_token_count": "prompt_token_count",
    "output_sequence_length": "input_sequence_length",
    "total_output_tokens": "total_input_tokens",
    "n_output_tokens": "n_prompt_tokens",
    "gen_num_tokens": "prompt_num_tokens",
    "num_generation_tokens": "context_tokens",
    "response_token_count": "request_token_count",
    "output_lens": "prompt_lens",
    "Output Seq Len": "Input Seq Len",
    "decode_tokens": "prefill_tokens",
}


@pytest.mark.parametrize("output", LENGTHS)
def test_lengths_have_many_names(tmp_path: Path, output: str) -> None:
    content = table(f"time,{LENGTHS[output]},{output}", lambda n, r: (r[0] / 1000, *r[1:]))
    assert requests_of(read_text(tmp_path, content)) == EXPECTED


def test_totals_count_only_without_other_lengths(tmp_path: Path) -> None:
    header = "total_input_tokens,total_output_tokens,arrival_s,input_tokens,output_tokens"
    content = table(header, lambda n, r: (r[1] + 1, r[2] + 1, r[0] / 1000, *r[1:]))
    assert requests_of(read_text(tmp_path, content)) == EXPECTED


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


@pytest.mark.parametrize(("header", "begin", "unit"), [("timestamp_ns", 2 * 10**15, 1e-9), ("timestamp_us", 2e9, 1e-6)])
def test_a_unit_in_the_name_is_not_overruled_by_unix_times(
    tmp_path: Path, header: str, begin: float, unit: float
) -> None:
    rows = "".join(f"{begin + second / unit:.0f},5,{3 + second}\n" for second in range(3))
    trace = read_text(tmp_path, f"{header},prompt_tokens,output_tokens\n{rows}")
    assert (list(trace.at_s), trace.account.begins) == ([0, 1, 2], None)


@pytest.mark.parametrize(
    ("header", "seconds", "unit", "is_guess"),
    [
        ("arrived_at,num_prefill_tokens,num_decode_tokens", 90, "seconds", False),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", 300, "seconds", True),
        ("Timestamp,ContextTokens,GeneratedTokens", 3600, "seconds", True),
        ("Timestamp,Request tokens,Response tokens", 7200, "seconds", False),
        ("arrival_s,prompt_tokens,output_tokens", 7200, "seconds", False),
        ("time,prompt_tokens,output_tokens", 300, "milliseconds", True),
        ("timestamp,input_length,output_length", 300_000, "milliseconds", True),
        ("timestamp,input_length,output_length", 300, "milliseconds", False),
        ("timestamp,input_length,output_length", 5, "milliseconds", True),
    ],
)
def test_the_unit_of_a_format_holds_at_low_rates(
    tmp_path: Path, header: str, seconds: int, unit: str, is_guess: bool
) -> None:
    trace = read_text(tmp_path, header + "\n" + "".join(f"{n * seconds},{5 + n},3\n" for n in range(20)))
    per_second = {"seconds": 1, "milliseconds": 1000}[unit]
    assert list(trace.at_s) == [n * seconds / per_second for n in range(20)]
    assert (trace.account.time_unit, trace.account.unit_is_guess) == (unit, is_guess)


@pytest.mark.parametrize(
    "dates", [(20240301, 20240302), (202403011200, 202403011201), (20240301120000, 20240301120001)]
)
def test_dates_written_as_numbers_are_refused(tmp_path: Path, dates: tuple[int, int]) -> None:
    rows = "".join(f"{date},5,3\n" for date in dates)
    with pytest.raises(
        BadInput, match=f"timestamp is a date as a number, such as {dates[0]}: write dates with the time"
    ):
        read_text(tmp_path, f"timestamp,prompt_tokens,output_tokens\n{rows}")
    assert len(read_text(tmp_path, f"arrival_s,prompt_tokens,output_tokens\n{rows}").at_s) == 2


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
    totals = {"request_throughput": 3.0, "total_input_tokens": 7, "total_output_tokens": 8}
    with pytest.raises(BadInput, match="--save-detailed"):
        read_text(tmp_path, json.dumps(totals), needs_times=False)


def test_a_result_without_times_is_refused_with_the_remedy(tmp_path: Path) -> None:
    lengths = json.dumps({"request_throughput": 3.0, "input_lens": [7, 8], "output_lens": [1, 2], "errors": ["", ""]})
    with pytest.raises(BadInput, match=r"has no start_times, .* vLLM 0\.32 writes them with --save-detailed"):
        read_text(tmp_path, lengths)
    assert list(read_text(tmp_path, lengths, needs_times=False).prompts) == [7, 8]


def test_models_are_read_on_demand(tmp_path: Path) -> None:
    text = table("arrival_s,prompt_tokens,output_tokens,Model", lambda n, r: (r[0] / 1000, r[1], r[2], f"m{n % 2}"))
    assert read_text(tmp_path, text).models == {}
    trace = read_text(tmp_path, text, with_models=True)
    assert [trace.models[number] for number in trace.numbers[:3]] == ["m0", "m1", "m0"]


def test_requests_for_two_models_are_no_duplicates(tmp_path: Path) -> None:
    rows = [(at_s, 100 + at_s, 10, "a") for at_s in range(300)]
    rows += [(300, 90, 10, "a"), (300, 90, 10, "b"), (301, 90, 10, "a"), (301, 90, 10, "a")]
    text = "arrival_s,prompt_tokens,output_tokens,model\n" + "".join(f"{a},{p},{o},{m}\n" for a, p, o, m in rows)
    assert len(read_text(tmp_path, text, with_models=True).at_s) == 303
    assert len(read_text(tmp_path, text).at_s) == 302

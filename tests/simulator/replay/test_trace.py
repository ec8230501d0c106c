"""Reading, cutting and scaling a trace; make_small_trace.py makes the one in tests/data."""

import gzip
from pathlib import Path

import pytest

from simulator.errors import BadInput
from simulator.replay.trace import LengthScaling, TraceRequest, TraceWindow, cut, fit, read_trace
from tests.simulator.replay.make_small_trace import PATH, rows

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_a_trace_is_read_in_order_of_arrival_with_its_row_numbers(tmp_path: Path) -> None:
    packed = write(tmp_path / "t.csv.gz", HEADER + "2.5,30,3\n0,10,1\n")
    plain = tmp_path / "t.csv"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    for path in (packed, plain):
        assert read_trace(path).requests == (TraceRequest(1, 0.0, 10, 1), TraceRequest(0, 2.5, 30, 3))


def test_the_small_trace_matches_its_script() -> None:
    assert gzip.decompress(PATH.read_bytes()).decode().split() == rows()
    assert len(read_trace(PATH).requests) == 40


def test_a_bad_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.gz cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.gz")


def test_a_trace_is_read_in_any_known_format_as_far_as_needed(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2024-03-01 12:0{minute}:00.5,{minute + 1},{minute + 1}\n" for minute in range(4)),
    )
    read = read_trace(path, minutes=2)
    assert read.requests == (TraceRequest(0, 0.0, 1, 1), TraceRequest(1, 60.0, 2, 2))
    assert read.account.format == "Azure 2023/2024"


def test_a_window_counts_time_from_its_start_and_leaves_out_its_end() -> None:
    arrivals = [TraceRequest(row, at_s, 1, 1) for row, at_s in enumerate((59.0, 60.0, 90.0, 120.0))]
    inside = cut(arrivals, TraceWindow(minutes=1, start_minute=1, time_scale=0.5))
    assert [(one.row, one.at_s) for one in inside] == [(1, 0.0), (2, 15.0)]


def test_a_window_without_requests_is_refused() -> None:
    with pytest.raises(BadInput, match="no request from second 60 to 120"):
        cut([TraceRequest(0, 59.0, 1, 1)], TraceWindow(minutes=1, start_minute=1))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["minutes", "time_scale"])
def test_a_window_needs_positive_numbers(name: str, value: float) -> None:
    with pytest.raises(BadInput, match="must be a number greater than 0"):
        TraceWindow(**{"minutes": 1.0, name: value})


@pytest.mark.parametrize(
    "lengths",
    [lambda: LengthScaling(token_scale=0), lambda: LengthScaling(context=1), lambda: LengthScaling(max_output=0)],
    ids=["token scale", "context", "maximum output"],
)
def test_impossible_lengths_are_refused(lengths: type[LengthScaling]) -> None:
    with pytest.raises(BadInput):
        lengths()


@pytest.mark.parametrize(
    ("prompt", "output", "fitted"),
    [
        (60, 40, (60, 40, 0)),
        (61, 40, (60, 40, 1)),
        (500, 40, (60, 40, 440)),
        (500, 500, (50, 50, 900)),
        (20, 500, (20, 80, 420)),
    ],
    ids=["fits", "just over", "long prompt", "both long", "long answer"],
)
def test_an_answer_is_clipped_last(prompt: int, output: int, fitted: tuple[int, int, int]) -> None:
    (one,) = fit([TraceRequest(0, 0.0, prompt, output)], LengthScaling(context=100))
    assert (one.prompt_tokens, one.output_tokens, one.cut_tokens) == fitted


def test_lengths_are_scaled_to_one_token_at_least_and_capped() -> None:
    scaled = fit([TraceRequest(0, 0.0, 10, 1), TraceRequest(1, 0.0, 300, 900)], LengthScaling(0.1, max_output=50))
    assert [(one.prompt_tokens, one.output_tokens) for one in scaled] == [(1, 1), (30, 50)]

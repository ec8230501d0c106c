"""Metrics and the log line of a request, for every kind of end."""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from app.ingress.errors import ApiError
from app.ingress.telemetry.requests import RequestTelemetry
from deployments.metrics.exposition import merge
from tests.deployments.metrics.test_exposition import parsed


@dataclass
class LoggedChoice:
    tokens: list[int] = field(default_factory=list)
    moves: int = 0
    resubmissions: int = 0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Lines(logging.Handler):
    """Keeps log lines as they look after a round trip through JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(json.dumps(record.__dict__["request"])))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def telemetry(clock: Clock) -> RequestTelemetry:
    return RequestTelemetry("tiny", clock=clock)


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The log lines of requests, collected by a handler of Ray Serve's logger."""
    serve, handler = logging.getLogger("ray.serve"), Lines()
    level = serve.level
    serve.addHandler(handler)
    serve.setLevel(logging.INFO)
    yield handler.lines
    serve.removeHandler(handler)
    serve.setLevel(level)


def values(telemetry: RequestTelemetry) -> dict[str, dict[tuple[str, ...], float]]:
    return parsed(merge([telemetry.expose("i")]))


def answer(telemetry: RequestTelemetry, clock: Clock, steps: int = 3, finish: str | None = "stop") -> None:
    """A request with one choice: the first tokens after 2 s, then one step every 0.25 s."""
    with telemetry.begin("completions") as observer:
        observer.key = "team"
        observer.accepted("cmpl-1", "mine", 4, lambda: [(1, 2, 3, 4)])
        observer.choice(LoggedChoice(moves=1, resubmissions=2))
        choice = observer.timer()
        clock.now += 1.75
        for _ in range(steps):
            clock.now += 0.25
            choice.step()
        clock.now += 0.5
        observer.answered(steps, [finish])


def test_the_log_line_of_a_request(telemetry: RequestTelemetry, clock: Clock, lines: list[dict[str, Any]]) -> None:
    answer(telemetry, clock)
    assert lines == [
        {
            "id": "cmpl-1",
            "label": "mine",
            "endpoint": "completions",
            "key": "team",
            "class": "default",
            "model": "tiny",
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "ttft_s": 2.0,
            "duration_s": 3.0,
            "moves": 1,
            "resubmissions": 2,
            "outcome": "stop",
            "status": 200,
        }
    ]


def test_metrics_of_two_requests(telemetry: RequestTelemetry, clock: Clock) -> None:
    answer(telemetry, clock)
    answer(telemetry, clock, steps=1, finish="length")
    seen = values(telemetry)
    assert seen["mell_requests_total"] == {
        ("default", "completions", "tiny", "stop", "i"): 1,
        ("default", "completions", "tiny", "length", "i"): 1,
    }
    assert seen["mell_request_prompt_tokens_total"] == {("tiny", "i"): 8}
    assert seen["mell_request_completion_tokens_total"] == {("tiny", "i"): 4}
    assert seen["mell_request_ttft_seconds_count"] == {("default", "tiny", "i"): 2}
    assert seen["mell_request_ttft_seconds_sum"] == {("default", "tiny", "i"): 4.0}
    assert seen["mell_request_itl_seconds_count"] == {("default", "tiny", "i"): 2}
    assert seen["mell_request_itl_seconds_sum"] == {("default", "tiny", "i"): 0.5}
    assert seen["mell_request_second_token_seconds_count"] == {("default", "tiny", "i"): 1}
    assert seen["mell_requests_running"] == {("i",): 0}


def test_the_counter_of_lost_requests_starts_at_zero(telemetry: RequestTelemetry) -> None:
    assert values(telemetry)["mell_requests_lost_total"] == {("tiny", "i"): 0}
    telemetry.lost.inc(1.0, "tiny")
    assert values(telemetry)["mell_requests_lost_total"] == {("tiny", "i"): 1}


def test_a_request_runs_until_its_with_block_ends(telemetry: RequestTelemetry) -> None:
    with telemetry.begin("completions"):
        assert values(telemetry)["mell_requests_running"] == {("i",): 1}
    assert values(telemetry)["mell_requests_running"] == {("i",): 0}


ENDS = {
    "refused": (ApiError(429, "slow down", code="rate_limit_exceeded"), "rate_limit_exceeded", 429),
    "an error without a code": (ApiError(409, "no"), "conflict_error", 409),
    "disconnected": (ClientDisconnect(), "client_closed", 499),
    "a broken pipe": (OSError("broken pipe"), "client_closed", 499),
    "cancelled": (asyncio.CancelledError(), "client_closed", 499),
    "an internal error": (KeyError("x"), "internal_error", 500),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_exception_sets_the_outcome(telemetry: RequestTelemetry, end: str, lines: list[dict[str, Any]]) -> None:
    error, outcome, status = ENDS[end]
    with pytest.raises(type(error)), telemetry.begin("chat"):
        raise error
    assert values(telemetry)["mell_requests_total"] == {("default", "chat", "tiny", outcome, "i"): 1}
    assert values(telemetry)["mell_requests_running"] == {("i",): 0}
    (line,) = lines
    assert (line["outcome"], line["status"]) == (outcome, status)
    assert (line["id"], line["key"], line["ttft_s"], line["prompt_tokens"]) == (None, None, None, 0)


def test_a_client_disconnects_during_the_answer(
    telemetry: RequestTelemetry, clock: Clock, lines: list[dict[str, Any]]
) -> None:
    # Tokens sent before the disconnect count.
    answer(telemetry, clock, steps=2, finish=None)
    assert (lines[0]["outcome"], lines[0]["status"], lines[0]["completion_tokens"]) == ("client_closed", 499, 2)
    assert values(telemetry)["mell_request_completion_tokens_total"] == {("tiny", "i"): 2}


def test_an_error_sent_as_an_event_sets_the_outcome(telemetry: RequestTelemetry, lines: list[dict[str, Any]]) -> None:
    with telemetry.begin("completions") as observer:
        observer.answered(5, [None])
        observer.failed(ApiError(503, "lost", code="unavailable"))
    assert (lines[0]["outcome"], lines[0]["status"], lines[0]["completion_tokens"]) == ("unavailable", 503, 5)


def test_a_prompt_counts_only_if_its_answer_has_begun(telemetry: RequestTelemetry) -> None:
    with telemetry.begin("completions") as observer:
        observer.accepted("id", "label", 3, tuple)
        observer.failed(ApiError(503, "full", code="unavailable"))
    assert values(telemetry)["mell_request_prompt_tokens_total"] == {("tiny", "i"): 0}


def test_several_choices_are_one_request(
    telemetry: RequestTelemetry, clock: Clock, lines: list[dict[str, Any]]
) -> None:
    with telemetry.begin("completions") as observer:
        observer.accepted("id", "label", 3, lambda: [(1, 2), (3,)])
        for _ in range(2):
            observer.choice(LoggedChoice(moves=1))
        first, second = observer.timer(), observer.timer()
        for choice, now in ((first, 101.0), (second, 102.0), (first, 103.0), (second, 104.5)):
            clock.now = now
            choice.step()
        observer.answered(4, ["stop", "length"])
    seen = values(telemetry)
    # TTFT is per request, inter-token latency per choice.
    assert seen["mell_request_ttft_seconds_sum"] == {("default", "tiny", "i"): 1.0}
    assert seen["mell_request_ttft_seconds_count"] == {("default", "tiny", "i"): 1}
    assert seen["mell_request_itl_seconds_sum"] == {("default", "tiny", "i"): 2.0 + 2.5}
    assert seen["mell_request_second_token_seconds_count"] == {("default", "tiny", "i"): 2}
    assert seen["mell_request_second_token_seconds_sum"] == {("default", "tiny", "i"): 2.0 + 2.5}
    assert seen["mell_request_itl_seconds_count"] == {("default", "tiny", "i"): 2}
    assert (lines[0]["outcome"], lines[0]["moves"], lines[0]["prompt_tokens"]) == ("length+stop", 2, 3)


def test_an_answer_is_complete_only_when_all_its_choices_are(
    telemetry: RequestTelemetry, lines: list[dict[str, Any]]
) -> None:
    with telemetry.begin("completions") as observer:
        observer.answered(4, ["stop", None])
    assert lines[0]["outcome"] == "client_closed"


@pytest.mark.parametrize("kept", [True, False])
def test_times_are_kept_for_a_comparison_with_a_level(clock: Clock, kept: bool) -> None:
    telemetry = RequestTelemetry("tiny", clock=clock, keeps_times=kept)
    with telemetry.begin("completions") as observer:
        timer = observer.timer()
        for _ in range(3):
            clock.now += 0.5
            timer.step()
    totals = {name: (sum(c.ttft.values()), sum(c.itl.values())) for name, c in telemetry.class_counts("tiny").items()}
    assert totals == ({"default": (1, 2)} if kept else {})


def test_text_is_not_logged_by_default(clock: Clock, lines: list[dict[str, Any]]) -> None:
    answer(RequestTelemetry("tiny", clock=clock), clock)
    assert "prompts" not in lines[0] and "texts" not in lines[0]


def test_text_is_logged_if_enabled(clock: Clock, lines: list[dict[str, Any]]) -> None:
    telemetry = RequestTelemetry("tiny", decode=lambda model, tokens: "".join(map(chr, tokens)), clock=clock)
    with telemetry.begin("completions") as observer:
        observer.accepted("id", "label", 2, lambda: [(72, 105)])
        observer.choice(LoggedChoice([111, 107]))
    assert (lines[0]["prompts"], lines[0]["texts"]) == (["Hi"], ["ok"])

"""What an ingress counts and logs of a request, however it ends."""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from app.ingress.errors import ApiError
from app.ingress.observed import Observed
from deployments.exposition import merge
from migration.cursor import Cursor
from tests.deployments.test_exposition import parsed


@dataclass
class Conversation:
    cursor: Cursor = field(default_factory=Cursor)
    moves: int = 0
    resubmissions: int = 0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Lines(logging.Handler):
    """Keeps what is logged, as JSON would carry it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(json.dumps(record.__dict__["request"])))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def observed(clock: Clock) -> Observed:
    return Observed("tiny", clock=clock)


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The log lines of requests, heard where Ray Serve's own handlers are."""
    serve, handler = logging.getLogger("ray.serve"), Lines()
    level = serve.level
    serve.addHandler(handler)
    serve.setLevel(logging.INFO)
    yield handler.lines
    serve.removeHandler(handler)
    serve.setLevel(level)


def values(observed: Observed) -> dict[str, dict[tuple[str, ...], float]]:
    return parsed(merge([observed.expose("i")]))


def answer(observed: Observed, clock: Clock, steps: int = 3, finish: str | None = "stop") -> None:
    """A request of one choice: the first tokens come after 2 s, then a step every 0.25 s."""
    with observed.begin("completions") as watch:
        watch.key = "team"
        watch.accepted("cmpl-1", "mine", [(1, 2, 3, 4)])
        choice = watch.choice(Conversation(moves=1, resubmissions=2))
        clock.now += 1.75
        for _ in range(steps):
            clock.now += 0.25
            choice.step()
        clock.now += 0.5
        watch.answered(steps, [finish])


def test_the_line_of_a_request(observed: Observed, clock: Clock, lines: list[dict[str, Any]]) -> None:
    answer(observed, clock)
    assert lines == [
        {
            "id": "cmpl-1",
            "label": "mine",
            "endpoint": "completions",
            "key": "team",
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


def test_what_is_counted_of_a_request(observed: Observed, clock: Clock) -> None:
    answer(observed, clock)
    answer(observed, clock, steps=1, finish="length")
    seen = values(observed)
    assert seen["mell_requests_total"] == {("completions", "stop", "i"): 1, ("completions", "length", "i"): 1}
    assert seen["mell_request_prompt_tokens_total"] == {("i",): 8}
    assert seen["mell_request_completion_tokens_total"] == {("i",): 4}
    assert seen["mell_request_ttft_seconds_count"] == {("i",): 2}
    assert seen["mell_request_ttft_seconds_sum"] == {("i",): 4.0}
    assert seen["mell_request_itl_seconds_count"] == {("i",): 2}
    assert seen["mell_request_itl_seconds_sum"] == {("i",): 0.5}
    assert seen["mell_requests_running"] == {("i",): 0}


def test_requests_that_are_lost_are_counted_from_zero_on(observed: Observed) -> None:
    assert values(observed)["mell_requests_lost_total"] == {("i",): 0}
    observed.lost.inc()
    assert values(observed)["mell_requests_lost_total"] == {("i",): 1}


def test_a_request_runs_until_its_block_ends(observed: Observed) -> None:
    with observed.begin("completions"):
        assert values(observed)["mell_requests_running"] == {("i",): 1}
    assert values(observed)["mell_requests_running"] == {("i",): 0}


ENDS = {
    "refused": (ApiError(429, "slow down", code="rate_limit_exceeded"), "rate_limit_exceeded", 429),
    "an error without a code": (ApiError(409, "no"), "conflict_error", 409),
    "disconnected": (ClientDisconnect(), "client_closed", 499),
    "nobody reads": (OSError("broken pipe"), "client_closed", 499),
    "cancelled": (asyncio.CancelledError(), "client_closed", 499),
    "a mistake of ours": (KeyError("x"), "internal_error", 500),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_raised_is_the_outcome(observed: Observed, end: str, lines: list[dict[str, Any]]) -> None:
    error, outcome, status = ENDS[end]
    with pytest.raises(type(error)), observed.begin("chat"):
        raise error
    assert values(observed)["mell_requests_total"] == {("chat", outcome, "i"): 1}
    assert values(observed)["mell_requests_running"] == {("i",): 0}
    (line,) = lines
    assert (line["outcome"], line["status"]) == (outcome, status)
    assert (line["id"], line["key"], line["ttft_s"], line["prompt_tokens"]) == (None, None, None, 0)


def test_a_client_that_leaves_in_the_middle(observed: Observed, clock: Clock, lines: list[dict[str, Any]]) -> None:
    # The tokens that it got count.
    answer(observed, clock, steps=2, finish=None)
    assert (lines[0]["outcome"], lines[0]["status"], lines[0]["completion_tokens"]) == ("client_closed", 499, 2)
    assert values(observed)["mell_request_completion_tokens_total"] == {("i",): 2}


def test_an_error_that_is_told_as_an_event(observed: Observed, lines: list[dict[str, Any]]) -> None:
    with observed.begin("completions") as watch:
        watch.answered(5, [None])
        watch.failed(ApiError(503, "lost", code="unavailable"))
    assert (lines[0]["outcome"], lines[0]["status"], lines[0]["completion_tokens"]) == ("unavailable", 503, 5)


def test_a_prompt_counts_only_if_somebody_began_to_answer_it(observed: Observed) -> None:
    with observed.begin("completions") as watch:
        watch.accepted("id", "label", [(1, 2, 3)])
        watch.failed(ApiError(503, "full", code="unavailable"))
    assert values(observed)["mell_request_prompt_tokens_total"] == {("i",): 0}


def test_several_choices_are_one_request(observed: Observed, clock: Clock, lines: list[dict[str, Any]]) -> None:
    with observed.begin("completions") as watch:
        watch.accepted("id", "label", [(1, 2), (3,)])
        first, second = (watch.choice(Conversation(moves=1)) for _ in range(2))
        for choice, now in ((first, 101.0), (second, 102.0), (first, 103.0), (second, 104.5)):
            clock.now = now
            choice.step()
        watch.answered(4, ["stop", "length"])
    seen = values(observed)
    # The first tokens of all are those of the request; steps follow on steps of the same choice.
    assert seen["mell_request_ttft_seconds_sum"] == {("i",): 1.0}
    assert seen["mell_request_ttft_seconds_count"] == {("i",): 1}
    assert seen["mell_request_itl_seconds_sum"] == {("i",): 2.0 + 2.5}
    assert seen["mell_request_itl_seconds_count"] == {("i",): 2}
    assert (lines[0]["outcome"], lines[0]["moves"], lines[0]["prompt_tokens"]) == ("length+stop", 2, 3)


def test_an_answer_is_complete_when_all_its_choices_are(observed: Observed, lines: list[dict[str, Any]]) -> None:
    with observed.begin("completions") as watch:
        watch.answered(4, ["stop", None])
    assert lines[0]["outcome"] == "client_closed"


def test_no_text_is_logged_unless_it_is_asked_for(clock: Clock, lines: list[dict[str, Any]]) -> None:
    answer(Observed("tiny", clock=clock), clock)
    assert "prompts" not in lines[0] and "texts" not in lines[0]


def test_text_is_logged_where_it_is_asked_for(clock: Clock, lines: list[dict[str, Any]]) -> None:
    observed = Observed("tiny", decode=lambda tokens: "".join(map(chr, tokens)), clock=clock)
    with observed.begin("completions") as watch:
        watch.accepted("id", "label", [(72, 105)])
        watch.choice(Conversation(Cursor(tokens=[111, 107])))
    assert (lines[0]["prompts"], lines[0]["texts"]) == (["Hi"], ["ok"])

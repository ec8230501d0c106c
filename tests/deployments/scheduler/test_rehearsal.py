"""What is logged and shown of a dry run."""

import logging
from dataclasses import replace

import pytest

from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.rehearsal import LOG_EVERY_S, Rehearsal, in_hindsight, summary
from policies.cost.lines import Line
from policies.decision.level.hindsight import Hindsight
from policies.decision.limits import LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.shadow import DryRun, Shadow
from policies.model import Bytes, ReplicaId, Tokens
from policies.paths.beliefs import Profile
from tests.policies.decision.observed import Watcher, observed

PROFILES = {ReplicaId("a"): Profile("n", "c", 16.0, Line.of(1e3), 1e6)}
TERMS = Terms("pack:headroom_s=0,comfort=0,rest=0", LiveLimits(linger_s=0.0, foresight_s=0.0), 0.0, Mode.OBSERVE)


class Rehearsing:
    """A rehearsal that is shown drawn clusters."""

    def __init__(self) -> None:
        self.watcher = Watcher(PoolMemory(TERMS))
        self.rehearsal = Rehearsal(Shadow(TERMS, self.watcher.memory.experience), Telemetry())

    def epoch(self, at: float, profiled: bool = False) -> None:
        drawn = observed("a: p40 | b: q15", at)
        report = self.watcher.report(drawn)
        self.rehearsal.epoch(replace(report, profiles=PROFILES if profiled else {}), at)


def test_it_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    made = Rehearsing()
    caplog.set_level(logging.INFO, "ray.serve")
    logging.getLogger("ray.serve").addHandler(caplog.handler)
    for at in (0.0, 1.0, LOG_EVERY_S - 1, LOG_EVERY_S, LOG_EVERY_S + 1, 2 * LOG_EVERY_S):
        made.epoch(at, profiled=at == 1.0)
    logged = [record.getMessage() for record in caplog.records]
    logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert list(dict.fromkeys(logged)) == [
        "dry run: would have freed 1 GPU for 5 minutes: 1 move, 240 B",
        "dry run: would have freed 1 GPU for 10 minutes: 1 move, 240 B",
    ]


def test_what_a_token_takes_is_remembered() -> None:
    made = Rehearsing()
    made.epoch(0.0, profiled=True)
    made.epoch(1.0)
    assert made.rehearsal.so_far is not None and made.rehearsal.so_far.moved_bytes == 15 * 16


def test_the_state_shows_figures_and_a_sentence() -> None:
    made = Rehearsing()
    assert made.rehearsal.to_json() is None
    made.epoch(0.0)
    shown = made.rehearsal.to_json()
    assert shown is not None and (shown["moves"], shown["said"]) == (1, "has just begun")


# --- the sentence -----------------------------------------------------------------------------------------


RUN = DryRun(
    since_s=2460.0,
    replicas_now=8,
    replicas_needed=5,
    requests_waiting=0,
    gpu_seconds_real=8 * 2460.0,
    gpu_seconds_needed=5 * 2460.0,
    moves=212,
    moved_tokens=Tokens(300_000),
    moved_bytes=Bytes(round(1.4 * (1 << 30))),
)


def test_it_says_how_many_gpus_for_how_long_and_at_what_price() -> None:
    assert summary(RUN) == "would have freed 3 GPUs for 41 minutes: 212 moves, 1.4 GiB"


@pytest.mark.parametrize(
    ("needed", "text"),
    [
        (7.0, "freed 1 GPU for"),
        (5.54, "freed 2.5 GPUs for"),
        (7.96, "freed no GPU in"),
        (8.04, "freed no GPU in"),
        (8.5, "taken 0.5 GPUs more for"),
        (9.0, "taken 1 GPU more for"),
    ],
)
def test_gpus_are_a_mean_over_the_time_and_may_be_more(needed: float, text: str) -> None:
    assert f"would have {text} 41 minutes" in summary(replace(RUN, gpu_seconds_needed=needed * RUN.since_s))


@pytest.mark.parametrize(
    ("since_s", "text"),
    [
        (1.0, "1 second"),
        (119.0, "119 seconds"),
        (120.0, "2 minutes"),
        (7199.0, "120 minutes"),
        (7200.0, "2 hours"),
        (86400.0 * 3, "3 days"),
    ],
)
def test_time_is_told_in_a_unit_of_which_there_are_two(since_s: float, text: str) -> None:
    assert f" {text}: " in summary(replace(RUN, since_s=since_s))


@pytest.mark.parametrize(
    ("moves", "size", "text"),
    [
        (1, 1, "1 move, 1 B"),
        (0, 0, "0 moves, 0 B"),
        (2, 1536, "2 moves, 1.5 KiB"),
        (2, 1 << 41, "2 moves, 2.0 TiB"),
        (2, None, "2 moves"),
    ],
)
def test_what_is_not_known_of_the_price_is_left_out(moves: int, size: int | None, text: str) -> None:
    told = summary(replace(RUN, moves=moves, moved_bytes=None if size is None else Bytes(size)))
    assert told.endswith(f": {text}")


HOUR = Hindsight(seconds=3600.0, gpus_real=7.0, gpus_needed=5.04, gpus_peak=6, kept=0.995)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (HOUR, "the last hour would have met the service level with 5 GPUs instead of 7"),
        (
            replace(HOUR, seconds=1200.0),
            "the last 20 minutes would have met the service level with 5 GPUs instead of 7",
        ),
        (
            replace(HOUR, kept=0.9, gpus_needed=1.0),
            "the last hour would have missed the service level for 10% of the time with 1 GPU instead of 7",
        ),
    ],
)
def test_with_a_level_the_last_hour_is_judged(found: Hindsight, text: str) -> None:
    assert in_hindsight(found) == text
    assert summary(replace(RUN, hindsight=found)) == f"{summary(RUN)}; {text}"
    assert replace(RUN, hindsight=found).to_json()["hindsight"]["meets_level"] is (found.kept > 0.99)


def test_at_first_there_is_nothing_to_say() -> None:
    assert summary(replace(RUN, since_s=0.0)) == "has just begun"


def test_the_state_shows_what_is_saved() -> None:
    shown = RUN.to_json()
    assert shown["gpu_seconds_saved"] == 3 * 2460.0
    assert (shown["since_s"], shown["replicas_needed"], shown["moved_bytes"]) == (2460.0, 5, RUN.moved_bytes)

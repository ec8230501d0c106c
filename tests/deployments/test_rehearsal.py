"""What is logged of a dry run."""

import logging

import pytest

from deployments.rehearsal import LOG_EVERY_S, Rehearsal
from deployments.telemetry import Telemetry
from migration.beliefs import Profile
from migration.lines import Line
from migration.protocol.messages import Fingerprint
from policies.decision.planner import LiveLimits
from policies.decision.shadow import Shadow
from policies.rules.registry import policy
from tests.policies.observed import observed

PROFILE = Profile("n", Fingerprint("m", "c", 4, 64, 256), Line.of(1e3), 1e6)


@pytest.fixture
def rehearsal() -> Rehearsal:
    chosen = policy("pack:headroom_s=0,comfort=0,rest=0")
    return Rehearsal(Shadow(chosen, LiveLimits(linger_s=0.0, foresight_s=0.0), 0.0), Telemetry())


def test_it_is_logged_now_and_then(rehearsal: Rehearsal, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    logging.getLogger("ray.serve").addHandler(caplog.handler)
    for at in (0.0, 1.0, LOG_EVERY_S - 1, LOG_EVERY_S, LOG_EVERY_S + 1, 2 * LOG_EVERY_S):
        rehearsal.epoch(observed("a: p40 | b: q15", at), [None, PROFILE])
    said = [record.getMessage() for record in caplog.records]
    logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert list(dict.fromkeys(said)) == [
        "dry run: would have freed 1 GPU for 5 minutes: 1 move, 240 B",
        "dry run: would have freed 1 GPU for 10 minutes: 1 move, 240 B",
    ]


def test_what_a_token_takes_is_remembered(rehearsal: Rehearsal) -> None:
    rehearsal.epoch(observed("a: p40 | b: q15"), [PROFILE])
    rehearsal.epoch(observed("a: p40 | b: q15", 1.0), [None])
    assert rehearsal.so_far is not None and rehearsal.so_far.moved_bytes == 15 * 16

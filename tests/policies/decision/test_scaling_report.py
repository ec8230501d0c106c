"""The reasons for opening replicas, and for closing none, as values."""

import json

import pytest

from policies.decision.level.scaling import ScaleDownBlock, ScaleUp, ScalingReport, scaling_report
from policies.decision.limits import LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from tests.policies.decision.observed import Watcher, observed


def reported(
    drawing: str, least: int = 0, most: int = 9, slack: float = 0.0, linger_s: float = 1e9, epochs: int = 1
) -> ScalingReport:
    """The reasons after epochs with that cluster."""
    limits = LiveLimits(linger_s=linger_s, foresight_s=0.0, lead_s=0.0, slack=slack)
    made = Watcher(PoolMemory(Terms("pack:headroom_s=0", limits)), least)
    for now in range(epochs):
        made.decide(observed(drawing, float(now), most=most))
    assert made.memory.scaled is not None
    return scaling_report(made.memory.cluster, made.memory.scaled)


@pytest.mark.parametrize(
    ("drawing", "least", "most", "slack", "up", "opened"),
    [
        ("a: p10", 2, 9, 0.0, ScaleUp.MINIMUM, 1),
        ("a: p90 q60?", 0, 9, 0.0, ScaleUp.REQUESTS, 1),
        ("a: p90 q60?", 0, 1, 0.0, ScaleUp.REQUESTS, 0),
        ("a: p50", 0, 9, 1.0, ScaleUp.RESERVE, 1),
        ("a: p50", 0, 1, 1.0, ScaleUp.RESERVE, 0),
        ("a: p50 | b*:", 0, 9, 1.0, None, 0),
        ("a: p90 q60? | b*:", 0, 9, 0.0, None, 0),
        ("a: p50", 0, 9, 0.2, None, 0),
    ],
    ids=["minimum", "requests", "requests, no more", "reserve", "reserve, no more", "starting", "reserved", "calm"],
)
def test_the_reason_for_opening(
    drawing: str, least: int, most: int, slack: float, up: ScaleUp | None, opened: int
) -> None:
    found = reported(drawing, least, most, slack)
    assert (found.up, found.opened) == (up, opened)


@pytest.mark.parametrize(
    ("drawing", "least", "slack", "linger_s", "kept"),
    [
        ("a: p10", 1, 0.0, 0.0, ScaleDownBlock.MINIMUM),
        ("a: p10 | b: | c*:", 0, 0.0, 0.0, ScaleDownBlock.STARTING),
        ("a: p80 | b: q10", 0, 0.5, 0.0, ScaleDownBlock.RESERVE),
        ("a: p10 | b:", 0, 0.0, 9.0, ScaleDownBlock.LINGER),
        ("a: p80! | b: q60!", 0, 0.0, 0.0, ScaleDownBlock.IN_USE),
        ("a: p10 | b:", 0, 0.0, 0.0, None),
    ],
    ids=lambda value: getattr(value, "value", None),
)
def test_the_reason_for_closing_none(
    drawing: str, least: int, slack: float, linger_s: float, kept: ScaleDownBlock | None
) -> None:
    found = reported(drawing, least, slack=slack, linger_s=linger_s)
    assert (found.kept, found.closed) == (kept, kept is None)


def test_the_numbers_that_decide() -> None:
    found = reported("a: p90 q60? | b: r20", slack=0.25, most=2)
    assert (found.replicas, found.min_replicas, found.waiting_requests) == (2, 0, 0)
    assert [found.free_replicas, found.reserve_replicas] == pytest.approx([0.2, 0.25])
    waits = reported("a: p10 | b:", linger_s=9.0, epochs=4)
    assert waits.linger_left_s == 6.0
    assert json.loads(json.dumps(found.to_json()))["up"] == found.up


def test_without_decisions_there_are_no_reasons() -> None:
    made = Watcher(PoolMemory(Terms(mode=Mode.OFF)))
    made.decide(observed("a: p10"))
    assert made.memory.scaled is None

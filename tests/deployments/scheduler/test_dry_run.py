"""What is counted, logged and shown of a dry run."""

import logging

import pytest

from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.dry_run import LOG_EVERY_S, DryRun
from policies.decision.limits import LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import PoolReport
from policies.model import SOLE_POOL, ReplicaId, RequestId, Tokens
from policies.plan import Move, Plan, Proposal, Reason
from tests.policies.decision.observed import Watcher, observed

TERMS = Terms("pack:headroom_s=0,comfort=0,rest=0", LiveLimits(linger_s=0.0, foresight_s=0.0), 0.0, Mode.OBSERVE)


class Observing:
    """A dry run that is shown drawn clusters, with given moves."""

    def __init__(self) -> None:
        self.watcher = Watcher(PoolMemory(TERMS))
        self.dry_run = DryRun(Telemetry(SOLE_POOL))

    def epoch(self, drawing: str, moves: str, at: float, whole: bool = False, reason: Reason = Reason.DRAIN) -> int:
        """The number of moves so far."""
        if whole:
            self.watcher.roster.restart()
        seen: PoolReport = self.watcher.report(observed(drawing, at))
        assert seen.whole is whole
        ends = (move.replace(":", ">").split(">") for move in moves.split())
        made = (Move(RequestId(q), ReplicaId(a), ReplicaId(b), Tokens(1), reason, 0) for q, a, b in ends)
        self.dry_run.add_epoch(seen, Proposal(Plan(), tuple(made), 1), 2, at)
        shown = self.dry_run.to_json()
        assert shown is not None
        return int(shown["moves"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_request_counts_once_for_each_stay_on_a_replica(whole: bool) -> None:
    made, here, there = Observing(), "a: p40 | b: q15", "a: p40 q15 | b:"
    assert made.epoch(here, "q:b>a", 0.0) == 1
    assert made.epoch(here, "", 1.0) == 1
    assert made.epoch(here, "q:b>a p:a>b", 2.0, whole) == 2
    assert made.epoch(there, "", 3.0, whole) == 2, "q is on a, by an operator"
    assert made.epoch(here, "q:b>a", 4.0, whole) == 3
    assert made.epoch("a: p40 | b:", "", 5.0, whole) == 3
    assert made.epoch(here, "q:b>a p:a>b", 6.0) == 4, "another q"


def test_evacuations_do_not_count() -> None:
    assert Observing().epoch("a: p40 | b: q15", "q:b>a", 0.0, reason=Reason.EVACUATE) == 0


def test_the_figures_are_those_of_the_last_proposal() -> None:
    made = DryRun(Telemetry(SOLE_POOL))
    assert made.to_json() is None
    seen = Watcher(PoolMemory(TERMS)).report(observed("a: p40"))
    for now, needed, replicas in (10.0, 3, 5), (70.0, 4, 4):
        made.add_epoch(seen, Proposal(Plan(), (), needed), replicas, now)
    assert made.to_json() == {
        "since_s": 60.0,
        "replicas_now": 4,
        "replicas_needed": 4,
        "moves": 0,
        "said": "would run 4 replicas, with 0 moves in 60 seconds",
    }


def test_it_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    made = Observing()
    caplog.set_level(logging.INFO, "ray.serve")
    logging.getLogger("ray.serve").addHandler(caplog.handler)
    for at in (0.0, 1.0, LOG_EVERY_S - 1, LOG_EVERY_S, LOG_EVERY_S + 1, 2 * LOG_EVERY_S):
        made.epoch("a: p40 | b: q15", "q:b>a", at)
    logged = [record.getMessage() for record in caplog.records]
    logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert list(dict.fromkeys(logged)) == [
        "dry run: would run 1 replica instead of 2, with 1 move in 5 minutes",
        "dry run: would run 1 replica instead of 2, with 1 move in 10 minutes",
    ]

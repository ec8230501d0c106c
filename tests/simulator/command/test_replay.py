"""Recorded epochs, decided again."""

from dataclasses import replace
from pathlib import Path

import pytest

from deployments.scheduler.recorder import FileRecorder
from policies.cluster.changes import Arrival
from policies.decision.deciding import SchedulerMemory, decide, place
from policies.decision.disaggregation.roles import set_role
from policies.decision.limits import Limits, LiveLimits, Mode, Terms
from policies.decision.observation import Observation, Pool, PoolReport
from policies.decision.recording import Epoch, ModeOrdered, PlacedCall, RoleOrdered
from policies.model import SOLE_POOL, ReplicaId, RequestId, Role, Tokens
from policies.paths.prices import Profile
from policies.plan import Plan
from policies.prefix.change import CacheChange, Tier
from simulator.__main__ import DIFFERENT, main
from simulator.command.replay import replay
from simulator.errors import BAD_INPUT
from simulator.workload.recording import read_recording
from tests.policies.decision.observed import Watcher, observed

TERMS = Terms("pack:headroom_s=0,comfort=0,rest=0", LiveLimits(Limits(cooldown_s=100)), 0.0)


def recording(path: Path, tampered: bool = False) -> Path:
    """Two epochs of one cluster, and an arrival between them."""
    memory = SchedulerMemory(TERMS)
    watcher = Watcher(memory.pool(SOLE_POOL))
    recorder = FileRecorder(path, TERMS)
    entries: tuple[PlacedCall, ...] = ()
    for now in range(2):
        seen = Observation(float(now), (watcher.report(observed("a: p40! | b: r15", float(now))),))
        plans = decide(memory, seen)
        assert bool(plans[SOLE_POOL][0].moves) is (now == 0)
        recorder.record(
            Epoch(
                entries,
                seen,
                {SOLE_POOL: (Plan.of(closed=plans[SOLE_POOL][0].closed, queued=(RequestId("?"),)),)}
                if tampered
                else plans,
            )
        )
        entries = (PlacedCall(now + 0.5, Arrival(RequestId("x"), Tokens(50)), ()),)
        place(memory.pool(SOLE_POOL), entries[0].arrival, entries[0].at)
    recorder.close()
    return path


def test_an_operators_role_is_recorded_and_decided_again(tmp_path: Path) -> None:
    terms = Terms("best_fit", LiveLimits(Limits(), 0.0, 0.0, 60.0, 0.0))
    memory, recorder = SchedulerMemory(terms), FileRecorder(tmp_path / "epochs.jsonl", terms)
    watcher = Watcher(memory.pool(SOLE_POOL), least=2)
    profile = Profile("n", "cache", 1.0)
    orders: tuple[RoleOrdered, ...] = ()
    for now, moves in enumerate((0, 1, 0)):
        seen = watcher.report(observed("a: p40~ | b:", float(now)))
        seen = replace(seen, profiles={ReplicaId(name): profile for name in "ab"} if now == 0 else {})
        plans = decide(memory, Observation(float(now), (seen,)))
        assert len(plans[SOLE_POOL][0].moves) == moves
        recorder.record(Epoch(orders, Observation(float(now), (seen,)), plans))
        orders = (RoleOrdered(now + 0.5, ReplicaId("a"), Role.PREFILL if now == 0 else None),)
        set_role(memory.pool(SOLE_POOL), orders[0].replica, orders[0].role)
    recorder.close()
    recorded = [entry for epoch in read_recording(tmp_path / "epochs.jsonl")[1] for entry in epoch.entries]
    assert recorded == [RoleOrdered(0.5, ReplicaId("a"), Role.PREFILL), RoleOrdered(1.5, ReplicaId("a"), None)]
    assert replay(tmp_path / "epochs.jsonl").different == ()


def test_an_ordered_mode_is_recorded_and_decided_in_again(tmp_path: Path) -> None:
    terms = replace(TERMS, mode=Mode.OFF)
    memory, recorder = SchedulerMemory(terms), FileRecorder(tmp_path / "epochs.jsonl", terms)
    watcher = Watcher(memory.pool(SOLE_POOL))
    orders: tuple[ModeOrdered, ...] = ()
    for now, moves in enumerate((0, 1)):
        seen = Observation(float(now), (watcher.report(observed("a: p40! | b: r15", float(now))),))
        plans = decide(memory, seen)
        assert len(plans[SOLE_POOL][0].moves) == moves
        recorder.record(Epoch(orders, seen, plans))
        orders = (ModeOrdered(now + 0.5, Mode.ACT),)
        memory.set_mode(Mode.ACT)
    recorder.close()
    assert replay(tmp_path / "epochs.jsonl").different == ()


def test_the_proposals_of_mode_observe_are_recorded_and_decided_again(tmp_path: Path) -> None:
    terms = replace(TERMS, mode=Mode.OBSERVE)
    memory, recorder = SchedulerMemory(terms), FileRecorder(tmp_path / "epochs.jsonl", terms)
    seen = Observation(0.0, (Watcher(memory.pool(SOLE_POOL)).report(observed("a: p40! | b: r15")),))
    plans = decide(memory, seen)
    proposal = plans[SOLE_POOL][0].proposed
    assert proposal is not None and proposal.plan.moves
    recorder.record(Epoch((), seen, plans))
    recorder.close()
    (epoch,) = read_recording(tmp_path / "epochs.jsonl")[1]
    assert epoch.plans[SOLE_POOL][0].proposed == proposal
    assert replay(tmp_path / "epochs.jsonl").different == ()


def test_the_same_observations_give_the_same_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recording(tmp_path / "epochs.jsonl")
    assert main(["--recording", str(path)]) == 0
    assert "2 of 2 plans are the recorded ones" in capsys.readouterr().out


def test_a_different_plan_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recording(tmp_path / "epochs.jsonl", tampered=True)
    assert replay(path).different == (1, 2)
    assert main(["--recording", str(path)]) == DIFFERENT
    assert "different: epochs 1, 2" in capsys.readouterr().out


def test_changes_of_caches_are_recorded(tmp_path: Path) -> None:
    change = CacheChange({Tier.HBM: (1, (1 << 64) - 1)}, {Tier.DRAM: (2,)}, False)
    report = PoolReport(Pool(SOLE_POOL), caches={ReplicaId("a"): change})
    recorder = FileRecorder(tmp_path / "epochs.jsonl", TERMS)
    recorder.record(Epoch((), Observation(0.0, (report,)), {}))
    recorder.close()
    _, (epoch,) = read_recording(tmp_path / "epochs.jsonl")
    assert epoch.seen.pools == (report,)


@pytest.mark.parametrize("damage", ["gone", "empty", "cut"])
def test_a_damaged_recording_is_an_error(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = recording(tmp_path / "epochs.jsonl")
    whole = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(b"" if damage == "empty" else whole[:-20])
    assert main(["--recording", str(path)]) == BAD_INPUT
    assert "--recording: " in capsys.readouterr().err

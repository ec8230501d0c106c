"""Recorded epochs, decided again."""

from pathlib import Path

import pytest

from app.simulator.__main__ import DIFFERENT, main
from app.simulator.command.replay import replay
from app.simulator.errors import BAD_INPUT
from deployments.scheduler.recording import Epoch, FileRecorder, PlacedCall, read_recording
from policies.cluster.changes import Arrival
from policies.decision.deciding import SchedulerMemory, decide, place
from policies.decision.limits import Limits, LiveLimits, Terms
from policies.decision.observation import ENGINE, Observation, Pool, PoolReport
from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import Plan
from policies.prefix.change import CacheChange, Tier
from tests.policies.decision.observed import Watcher, observed

TERMS = Terms("pack:headroom_s=0,comfort=0,rest=0", LiveLimits(Limits(cooldown_s=100)), 0.0)


def recording(path: Path, tampered: bool = False) -> Path:
    """Two epochs of one cluster, and an arrival between them."""
    memory = SchedulerMemory(TERMS)
    watcher = Watcher(memory.pool())
    recorder = FileRecorder(path, TERMS)
    entries: tuple[PlacedCall, ...] = ()
    for now in range(2):
        seen = Observation(float(now), (watcher.report(observed("a: p40! | b: r15", float(now))),))
        plans = decide(memory, seen)
        assert bool(plans[ENGINE][0].moves) is (now == 0)
        recorder.record(
            Epoch(
                entries,
                seen,
                {ENGINE: (Plan(closed=plans[ENGINE][0].closed, queued=(RequestId("?"),)),)} if tampered else plans,
            )
        )
        entries = (PlacedCall(now + 0.5, Arrival(RequestId("x"), Tokens(50)), ()),)
        place(memory.pool(), entries[0].arrival, entries[0].at)
    recorder.close()
    return path


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
    report = PoolReport(Pool(), caches={ReplicaId("a"): change})
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

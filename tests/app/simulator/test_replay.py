"""Recorded epochs, decided again."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.simulator.__main__ import BAD_INPUT, DIFFERENT, main
from app.simulator.replay import replay
from deployments.recording import Epoch, Recorder, Setting
from policies.decision.limits import Limits
from policies.decision.planner import LiveLimits, Mode, Planner
from policies.rules.registry import policy
from tests.policies.observed import observed

SETTING = Setting("pack:headroom_s=0,comfort=0,rest=0", LiveLimits(Limits(cooldown_s=100)), 0.0)


def recording(path: Path, tampered: bool = False) -> Path:
    """Two epochs of one cluster: the first one's order has to wait, so the second one gives it again."""
    planner = Planner(policy(SETTING.policy), SETTING.limits, SETTING.epoch_s)
    recorder = Recorder(path, SETTING)
    for now in range(2):
        seen = observed("a: p40! | b: r15", float(now))
        planner.observe(seen)
        decided = planner.decide(Mode.ACT)
        put_off = tuple(order.request for order in decided.orders)
        assert put_off == ("r",)
        planner.put_off(put_off)
        moves = tuple(replace(move, unit=99) for move in decided.plan.moves) if tampered else decided.plan.moves
        recorder.record(Epoch(seen, Mode.ACT, replace(decided.plan, moves=moves), decided.orders, put_off))
    recorder.close()
    return path


def test_the_same_observations_give_the_same_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recording(tmp_path / "epochs.jsonl")
    assert main(["--recording", str(path)]) == 0
    assert "2 of 2 plans are the recorded ones" in capsys.readouterr().out


def test_a_plan_that_is_not_found_again_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recording(tmp_path / "epochs.jsonl", tampered=True)
    assert replay(path).different == (1, 2)
    assert main(["--recording", str(path)]) == DIFFERENT
    assert "different: epochs 1, 2" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["gone", "empty", "cut"])
def test_a_damaged_recording_is_told(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = recording(tmp_path / "epochs.jsonl")
    whole = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(b"" if damage == "empty" else whole[:-20])
    assert main(["--recording", str(path)]) == BAD_INPUT
    assert "--recording: " in capsys.readouterr().err

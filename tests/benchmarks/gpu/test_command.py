"""The command: its exit status, its list, and the files that it brings out."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.__main__ import bring_out, gpus, main, software
from benchmarks.gpu.plan import RunPart
from benchmarks.gpu.record import PartRow, RunRecord
from tests.benchmarks.gpu.rows import ORIGIN, ROWS


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU."""
    monkeypatch.setattr(command, "gpus", lambda: ["H100, 80 GiB, driver 1"])


def test_gpus_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nprint('NVIDIA H100, 81559 MiB, 580.1\\nNVIDIA H100, 81559 MiB, 580.1')")
    program.chmod(0o755)
    assert gpus() == ["NVIDIA H100, 81559 MiB, driver 580.1"] * 2


def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpus", list)
    assert main(["--state", str(tmp_path / "state")]) == 2
    assert "nothing was measured" in capsys.readouterr().err and not (tmp_path / "state").exists()


def test_parts_are_listed(one_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = "serving moves texts-invariant checks texts shared moves-256 stop-and-copy"
    assert [line.split()[0] for line in lines] == names.split()


def test_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["everything"])
    assert "no such part: everything" in capsys.readouterr().err


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces parts by rows of their end; has their names and limits. The part `moves` fails, and takes 200 s."""
    names: list[str] = []
    passed = [0.0]
    monkeypatch.setattr("benchmarks.gpu.__main__.time", SimpleNamespace(monotonic=lambda: passed[0]))

    def play(part: RunPart, record: RunRecord, folder: Path, after_step: Callable[[], None]) -> PartRow:
        names.append(f"{part.name} {part.limit_s:.0f}")
        passed[0] += 200 if part.name == "moves" else 100
        row = PartRow(part.name, "failed" if part.name == "moves" else "whole", 1.0)
        record.add(row)
        return row

    monkeypatch.setattr(command, "play", play)
    monkeypatch.setattr("benchmarks.instruments.models.tinymodel.ensure_generated", lambda name, make: Path(name))
    return names


def test_calls_go_on_where_the_last_one_ended(one_gpu: None, played: list[str], tmp_path: Path) -> None:
    state = ["--state", str(tmp_path / "state"), "--commit", "abc1234"]
    assert main(["--budget", "300", *state]) == 1, "a part failed"
    assert played == ["serving 230", "moves 200"]
    assert main(["--budget", "540", *state]) == 1 and played[2:] == ["moves 300", "texts-invariant 310", "checks 160"]
    assert main(["--budget", "140", *state]) == 0 and len(played) == 5, "too little for servers"
    assert main(["checks", "texts", "--limit", "texts=99", *state]) == 0 and played[5:] == ["checks 160", "texts 99"]
    assert main([*state[:2], "--commit", "another"]) == 2 and len(played) == 7


def test_limit_of_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--limit", "everything=9"])
    assert "no such part: everything" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_part_with_what_it_has(
    one_gpu: None, played: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def play(part: RunPart, record: RunRecord, folder: Path, after_step: Callable[[], None]) -> PartRow:
        record.add(ROWS[1])
        after_step()
        assert len((out / "results.jsonl").read_text().splitlines()) == 2, "rows come out after each step"
        record.add(ROWS[2])
        signal.raise_signal(number)
        raise AssertionError("the signal interrupts")

    monkeypatch.setattr(command, "play", play)
    former, out = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)], tmp_path / "out"
    try:
        assert main(["--state", str(tmp_path / "state"), "--out", str(out)]) == 130
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGTERM), former, strict=True):
            signal.signal(each, handler)
    assert len((out / "results.jsonl").read_text().splitlines()) == 3
    assert {"page.md", "logs.tgz"} < {path.name for path in out.iterdir()}


def test_results_are_at_most_8_files(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    state.mkdir()
    record = RunRecord.resume(state / "results.jsonl", ORIGIN)
    for row in ROWS[1:]:
        record.add(row)
    for name in ("samples.jsonl", "a.log", "b.log", "stages.json"):
        (state / name).write_text("{}")
    bring_out(state, out)
    names = sorted(path.name for path in out.iterdir())
    assert {"results.jsonl", "samples.jsonl", "page.md", "logs.tgz"} < set(names) and len(names) <= 8
    assert main(["--page", str(out / "results.jsonl"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "page.md").read_text() == (out / "page.md").read_text()


def test_results_come_out_without_matplotlib_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunRecord.resume(tmp_path / "results.jsonl", ORIGIN)
    monkeypatch.delitem(sys.modules, "benchmarks.gpu.page", raising=False)
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.sections", None)
    bring_out(tmp_path, tmp_path / "out")
    assert "write it on another machine" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logs.tgz", "results.jsonl"]
    assert main(["--page", str(tmp_path / "results.jsonl"), "--out", str(tmp_path)]) == 1


def test_software_lists_what_is_installed() -> None:
    assert software(["ray", "made-up-package"]).count(",") == 1

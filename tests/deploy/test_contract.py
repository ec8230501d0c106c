"""`python -m deploy.contract`, over wheels of made-up versions in the place of those on an index."""

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from app.compatibility.contract import LostPart, parts
from app.compatibility.supported import pairs
from deploy import contract
from deploy.contract import expected_losses, main

UNREACHABLE = "ERROR: Could not find a version (from versions: none)\nERROR: No matching distribution found for vllm"
OTHERS = "ERROR: Could not find a version (from versions: 0.1)\nERROR: No matching distribution found for vllm"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MELL_CACHE", str(tmp_path))
    return tmp_path / "contract"


def offer(monkeypatch: pytest.MonkeyPatch, error: str = "") -> list[str]:
    """Have pip write a wheel, or end with an error. Returns the requirements that it has been given."""
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        folder = Path(command[command.index("--dest") + 1])
        if not error:
            with zipfile.ZipFile(folder / "a.whl", "w") as archive:
                archive.writestr("vllm/__init__.py", "")
                archive.writestr("vllm/_C.so", "machine code")
        return subprocess.CompletedProcess(command, 1 if error else 0, "", error)

    monkeypatch.setattr("deploy.contract.subprocess.run", run)
    return asked


def test_an_index_that_is_not_reached_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    offer(monkeypatch, UNREACHABLE)
    assert main(["vllm==9.9"]) == 0
    assert capsys.readouterr().out.startswith("not compared: pip reaches no index of packages")
    assert list(cache.iterdir()) == []


def test_a_version_that_does_not_exist_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, OTHERS)
    assert main(["vllm==9.9"]) == 1
    assert capsys.readouterr().err == "the index has no wheel of vllm 9.9\n"


def test_a_version_without_what_mell_needs_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    asked = offer(monkeypatch)
    assert main(["vllm==9.9"]) == main(["vllm==9.9"]) == 1
    assert asked == ["vllm==9.9"], "the files are kept"
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["__init__.py"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vllm 9.9: 0 of ") and "Engine: Mell does not start" in lines
    assert "  used by deployments/engine" in lines


def test_just_the_parts_that_a_supported_pair_lacks_may_be_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch)
    pair = next(pair for pair in pairs() if pair.lost)
    given = [f"vllm=={pair.contract[0]}", f"ray=={pair.contract[1]}"]
    by_title = {part.title: part for part in parts()}
    lost = [LostPart(by_title[title], by_title[title].facts[:1]) for title in pair.lost]
    monkeypatch.setattr(contract, "lost_parts", lambda trees: lost)
    assert main(given) == 0
    assert main(["vllm==9.9"]) == 1
    lost.pop()
    assert main(given) == 1, "the file says more than is lost"
    assert expected_losses({"vllm": "9.9"}) == [set()]


@pytest.mark.parametrize("word", ["vllm", "torch==2.13", "vllm=="])
def test_other_arguments_are_refused(word: str) -> None:
    with pytest.raises(SystemExit):
        main([word])

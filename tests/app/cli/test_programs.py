"""`mell` as a process, and the programs that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.processes.importing import ROOT

HEAVY = "{'ray', 'torch', 'vllm', 'cupy', 'starlette', 'fastapi', 'numpy', 'pydantic', 'yaml'}"


def python(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def test_it_starts_without_heavy_packages() -> None:
    code = f"import json, sys, app.cli.__main__; print(json.dumps(sorted({HEAVY} & sys.modules.keys())))"
    assert json.loads(python("-c", code).stdout) == []


def test_it_runs_as_a_module() -> None:
    ended = python("-m", "app.cli", "--version")
    assert (ended.returncode, ended.stdout[:5]) == (0, "mell ")


@pytest.mark.slow
def test_programs_have_their_own_output_and_status() -> None:
    ended = python("-m", "app.cli", "simulate", "--list-policies")
    assert ended.returncode == 0 and "pack" in ended.stdout
    ended = python("-m", "app.cli", "keys", "a b")
    assert ended.returncode == 1 and "is not a valid name" in ended.stderr


@pytest.mark.slow
def test_the_working_directory_is_not_on_the_import_path(tmp_path: Path) -> None:
    (tmp_path / "simulator").mkdir()
    (tmp_path / "simulator" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from app.cli.__main__ import main; main()"
    ended = python("-P", "-c", code, "simulate", "--list-policies", folder=tmp_path)
    assert ended.returncode == 0 and "pack" in ended.stdout

"""`make serve` starts the launcher, and the launcher `serve run`."""

import subprocess
from pathlib import Path

import pytest

from app import serve

ROOT = Path(__file__).parents[2]


def test_make_hands_configuration_and_arguments_on() -> None:
    made = subprocess.run(
        ["make", "--no-print-directory", "-n", "serve", "CONFIG=other.yaml", "ARGS=--address=auto"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert made.stdout.splitlines()[-1] == 'exec python -m app.serve --with-parent --address=auto "other.yaml"'


@pytest.mark.parametrize("with_parent", [True, False])
def test_arguments_are_those_of_serve_run(monkeypatch: pytest.MonkeyPatch, with_parent: bool, tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("applications: []")
    ended: list[bool] = []
    started: list[list[str]] = []

    def run_kept(command: list[str]) -> int:
        started.append(command)
        return 3

    monkeypatch.setattr(serve, "end_with_parent", lambda: ended.append(True))
    monkeypatch.setattr(serve, "run_kept", run_kept)
    options = ["--with-parent"] if with_parent else []
    monkeypatch.setattr("sys.argv", ["serve.py", *options, "--address", "auto", str(file)])
    with pytest.raises(SystemExit) as exited:
        serve.main()
    assert exited.value.code == 3
    assert started == [["serve", "run", "--address", "auto", str(file)]]
    assert ended == [True] * with_parent


def test_without_a_configuration_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["serve.py", "none.yaml"])
    with pytest.raises(SystemExit, match=r"^none.yaml: there is no such file$"):
        serve.main()

"""`make serve` starts the launcher, and the launcher `serve run`."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

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


@pytest.mark.parametrize("name", serve.IDLE)
def test_ray_reads_the_intervals(name: str) -> None:
    """Those of its C++ parts have the prefix RAY_ and are in the raylet; the others are in Python's files."""
    folder = Path(ray.__file__).parent
    files = ["serve/_private/constants.py", "dashboard/modules/reporter/reporter_consts.py", "dashboard/consts.py"]
    sources = "".join((folder / file).read_text() for file in [*files, "_private/log_monitor.py"])
    raylet = (folder / "core/src/ray/raylet/raylet").read_bytes()
    assert f'"{name}"' in sources or name.removeprefix("RAY_").encode() in raylet


def test_intervals_that_are_set_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command writes its environment to a file."""
    monkeypatch.setenv("MELL_CACHE", str(tmp_path))
    monkeypatch.setenv("REPORTER_UPDATE_INTERVAL_MS", "1")
    written = tmp_path / "environment"
    write = f"import json, os; open({str(written)!r}, 'w').write(json.dumps(dict(os.environ)))"
    subprocess.run(
        [sys.executable, "-c", f"from app.serve import run_kept; run_kept([{sys.executable!r}, '-c', {write!r}])"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seen = json.loads(written.read_text())
    assert {name: seen[name] for name in serve.IDLE} == serve.IDLE | {"REPORTER_UPDATE_INTERVAL_MS": "1"}


FAILURES = ["Failed to update the deployments ['Ingress'].", "Deploying app 'mell' failed with exception:"]
"""What Serve's controller logs of an application that cannot start."""


@pytest.mark.parametrize("line", FAILURES)
def test_an_application_that_cannot_start_ends_the_command(line: str, tmp_path: Path) -> None:
    """`serve run` goes on."""
    sender = "(ServeController pid=4)"
    lines = [f"{sender} ERROR 2026-11-27 12:38:38,575 controller 4 -- {line}", f"{sender}   the cause"]
    goes_on = f"import time; print(*{lines!r}, sep=chr(10), flush=True); time.sleep(600)"
    started = subprocess.run(
        [
            *[sys.executable, "-c"],
            f"import sys; from app.serve import run_kept; sys.exit(run_kept([{sys.executable!r}, '-c', {goes_on!r}]))",
        ],
        cwd=ROOT,
        env={**os.environ, "MELL_CACHE": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert started.returncode == 1
    shown = started.stdout.splitlines()
    assert shown[1].endswith(line) and shown[2:] == [
        "  the cause",
        "mell: the application could not start; the first error above is the reason",
        "mell: stopped",
    ]


def test_ray_serve_writes_these_lines() -> None:
    source = (Path(ray.__file__).parent / "serve/_private/application_state.py").read_text()
    assert all(
        line.replace("['Ingress'].", "").replace("'mell'", "'{self._name}'").rstrip() in source for line in FAILURES
    )


@pytest.fixture
def output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> serve.CommandOutput:
    return serve.CommandOutput(tmp_path, lambda: None)


def read(output: serve.CommandOutput, *lines: str) -> None:
    output.read(io.StringIO("".join(f"{line}\n" for line in lines)))


HIDDEN = "(Engine pid=1) libtcmalloc is not found"


def test_all_lines_are_in_the_file_that_the_first_line_names(
    output: serve.CommandOutput, capsys: pytest.CaptureFixture[str]
) -> None:
    read(output, HIDDEN, "shown")
    output.close(0)
    first, *rest = capsys.readouterr().out.splitlines()
    assert Path(first.split()[-1]).read_text() == f"{HIDDEN}\nshown\n"
    assert rest == ["mell: shown"]


def test_the_hidden_lines_are_shown_if_it_ends_by_itself(
    output: serve.CommandOutput, capsys: pytest.CaptureFixture[str]
) -> None:
    read(output, HIDDEN, "shown")
    output.close(3)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "mell: shown",
        f"mell: ended with status 3; the last other lines in {output.path}:",
        f"  {HIDDEN}",
    ]


def test_a_requested_end_shows_its_beginning_once_and_its_end(
    output: serve.CommandOutput, capsys: pytest.CaptureFixture[str]
) -> None:
    output.end()
    output.end()
    read(output, "Traceback (most recent call last):", "Error")
    output.close(137)
    begun, ended = capsys.readouterr().out.splitlines()[1:]
    assert begun.startswith("mell: stopping") and ended == "mell: stopped"


def test_without_a_terminal_the_file_is_written_all_the_same(
    output: serve.CommandOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*values: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", broken)
    read(output, "a", "b")
    output.close(0)
    assert output.path.read_text() == "a\nb\n"


def test_the_files_of_the_last_starts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        (tmp_path / f"serve-{number}.log").touch()
        os.utime(tmp_path / f"serve-{number}.log", (number, number))
    kept = serve.CommandOutput(tmp_path, lambda: None)
    kept.close(0)
    assert {path.name for path in tmp_path.iterdir()} == {kept.path.name, *(f"serve-{n}.log" for n in range(3, 12))}


def test_without_a_cache_that_can_be_written_there_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MELL_CACHE", str(tmp_path / "file"))
    assert serve._folder().is_dir()

"""The probes, on the machine that runs the tests."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.doctor.machine import Machine
from tests.app.cli.fake_mell import free_port


def test_probes_of_any_machine() -> None:
    machine = Machine()
    assert machine.python() >= (3, 11, 0)
    assert machine.version("no-such-package") == "none" != machine.version("ray")
    assert machine.pinned("cpu")["ray"] == machine.pinned("cuda")["ray"]
    assert machine.pinned("abacus") == {}
    assert (machine.shared_memory() or 0) > 0
    soft, hard = machine.open_files()
    assert hard == -1 or soft <= hard


def test_a_port_is_taken_while_a_process_listens() -> None:
    machine, port = Machine(), free_port()
    assert not machine.taken(port) and not machine.listens(f"127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", port)):
        assert machine.taken(port) and machine.listens(f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:0", "127.0.0.1:99999"])
def test_an_invalid_address_has_no_listener(address: str) -> None:
    assert not Machine().listens(address)


def test_code_runs_in_a_separate_process() -> None:
    machine = Machine()
    assert machine.error_of("import app.cli") is None
    assert machine.error_of("import no_such_module") == "ModuleNotFoundError: No module named 'no_such_module'"
    assert machine.error_of("import os; os.abort()") == "ended with status -6"


def test_the_session_file_is_in_rays_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    file = tmp_path / "ray" / "ray_current_cluster"
    assert Machine().ray_session() == (str(file), None)
    file.parent.mkdir()
    file.write_text("10.0.0.1:6379\n")
    assert Machine().ray_session() == (str(file), "10.0.0.1:6379")


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("echo 'NVIDIA H200, 143771 MiB'; echo 'NVIDIA H200, 143771 MiB'", 2 * ("NVIDIA H200, 143771 MiB",)),
        ("echo 'NVIDIA-SMI has failed'; exit 9", ()),
        (None, None),
    ],
    ids=["two", "no driver", "no program"],
)
def test_gpus_are_listed_by_nvidia_smi(
    script: str | None, gpus: tuple[str, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Machine().gpus() == gpus


def test_ray_runs_if_its_processes_do(tmp_path: Path) -> None:
    program = tmp_path / "raylet"
    os.symlink(sys.executable, program)
    command = [str(program), "-c", "print(flush=True); import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert Machine().ray_runs()
        process.communicate()

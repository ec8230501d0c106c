"""What is seen of this machine. Heavy packages are imported by processes of their own, which may crash."""

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from app.cli import passing
from app.cli.doctor.pins import pins
from app.versions import installed_version

TIMEOUT_S = 60.0
"""For a process that imports torch or CuPy on a cold disk."""
_CONNECT_S = 1.0


class Probes(Protocol):
    """What the checks want to know."""

    def python(self) -> tuple[int, int, int]:
        """This Python's version."""
        ...

    def version(self, package: str) -> str:
        """The version of a package that is installed, "none" if none is."""
        ...

    def pinned(self, device: str) -> dict[str, str]:
        """The versions of the lock file for `cpu` or `cuda`, by package; empty if there is no lock file."""
        ...

    def gpus(self) -> tuple[str, ...] | None:
        """The GPUs by nvidia-smi, None if there is no nvidia-smi."""
        ...

    def error_of(self, code: str) -> str | None:
        """The last line that this Python code says when it fails in a process of its own, None if it does not."""
        ...

    def shared_memory(self) -> int | None:
        """The size of /dev/shm in bytes, None if there is none."""
        ...

    def open_files(self) -> tuple[int, int]:
        """The soft and the hard limit on open files, -1 for none."""
        ...

    def taken(self, port: int) -> bool:
        """Whether somebody listens at this port of 127.0.0.1."""
        ...

    def ray_runs(self) -> bool:
        """Whether there are Ray processes on this machine."""
        ...

    def ray_session(self) -> tuple[str, str | None]:
        """The file that says which cluster to join, and the address in it, None if there is no such file."""
        ...

    def listens(self, address: str) -> bool:
        """Whether a connection to `host:port` can be opened."""
        ...


class Machine:
    """The machine that this runs on."""

    def python(self) -> tuple[int, int, int]:
        """See `Probes.python`."""
        return sys.version_info[:3]

    def version(self, package: str) -> str:
        """See `Probes.version`."""
        return installed_version(package)

    def pinned(self, device: str) -> dict[str, str]:
        """See `Probes.pinned`."""
        try:
            return pins((passing.ROOT / "requirements" / f"{device}.lock").read_text("utf-8").splitlines())
        except OSError:
            return {}

    def gpus(self) -> tuple[str, ...] | None:
        """See `Probes.gpus`."""
        if (program := shutil.which("nvidia-smi")) is None:
            return None
        command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return ()
        return tuple(line for line in ended.stdout.splitlines() if line.strip()) if ended.returncode == 0 else ()

    def error_of(self, code: str) -> str | None:
        """See `Probes.error_of`."""
        command = passing.python("-c", code)
        environment = passing.environment()
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
        except subprocess.TimeoutExpired:
            return f"took more than {TIMEOUT_S:.0f} s"
        said = ended.stderr.strip().splitlines()
        return None if ended.returncode == 0 else said[-1] if said else f"ended with status {ended.returncode}"

    def shared_memory(self) -> int | None:
        """See `Probes.shared_memory`."""
        try:
            found = os.statvfs("/dev/shm")
        except OSError:
            return None
        return found.f_frsize * found.f_blocks

    def open_files(self) -> tuple[int, int]:
        """See `Probes.open_files`."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def taken(self, port: int) -> bool:
        """See `Probes.taken`."""
        with socket.socket() as probe:
            # Connections that have just ended do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                return error.errno == errno.EADDRINUSE
        return False

    def ray_runs(self) -> bool:
        """See `Probes.ray_runs`."""
        return any(_name_of(process) in ("raylet", "gcs_server") for process in Path("/proc").glob("[0-9]*"))

    def ray_session(self) -> tuple[str, str | None]:
        """See `Probes.ray_session`."""
        file = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
        try:
            return str(file), file.read_text("utf-8").strip()
        except OSError:
            return str(file), None

    def listens(self, address: str) -> bool:
        """See `Probes.listens`."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except (OSError, ValueError, OverflowError):
            return False
        return True


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text("utf-8").strip()
    except OSError:  # it has ended meanwhile
        return ""

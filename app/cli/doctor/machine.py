"""Probes of this machine. Separate processes import heavy packages, since an import may crash."""

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from app.cli import programs
from app.compatibility.contract import LostPart, lost_here
from app.installation import REQUIREMENTS
from app.versions import installed_version
from deployments.processes.importing import importing
from deployments.replica.compiling import lacks_for_compiling

TIMEOUT_S = 60.0
"""Time limit of a process that imports torch or CuPy from a cold disk."""
_CONNECT_S = 1.0


class Probes(Protocol):
    """The inputs of the checks."""

    def python(self) -> tuple[int, int, int]:
        """The version of this Python."""
        ...

    def version(self, package: str) -> str:
        """The installed version of a package, "none" without one."""
        ...

    def pinned(self, device: str) -> dict[str, str]:
        """The versions in the lock file for `cpu` or `cuda`, by package; empty without a lock file."""
        ...

    def lost(self) -> Sequence[LostPart]:
        """The parts of Mell that are lost with the installed versions of vLLM and Ray."""
        ...

    def gpus(self) -> tuple[str, ...] | None:
        """The GPUs listed by nvidia-smi, None without nvidia-smi."""
        ...

    def error_of(self, code: str) -> str | None:
        """The last error line of Python code run in a separate process, None if it succeeds."""
        ...

    def lacks_for_compiling(self) -> str | None:
        """The thing without which torch can compile nothing, None if there are all."""
        ...

    def shared_memory(self) -> int | None:
        """The size of /dev/shm in bytes, None without one."""
        ...

    def open_files(self) -> tuple[int, int]:
        """The soft and the hard limit on open files, -1 for no limit."""
        ...

    def taken(self, port: int) -> bool:
        """True if a process listens at this port of 127.0.0.1."""
        ...

    def ray_runs(self) -> bool:
        """True if Ray processes run on this machine."""
        ...

    def ray_session(self) -> tuple[str, str | None]:
        """Ray's session file, and the address of the cluster in it, None without the file."""
        ...

    def listens(self, address: str) -> bool:
        """True if a connection to `host:port` can be opened."""
        ...


class Machine:
    """Implements `Probes` for this machine."""

    def python(self) -> tuple[int, int, int]:
        """See `Probes.python`."""
        return sys.version_info[:3]

    def version(self, package: str) -> str:
        """See `Probes.version`."""
        return installed_version(package)

    def pinned(self, device: str) -> dict[str, str]:
        """See `Probes.pinned`."""
        try:
            return pins((REQUIREMENTS / f"{device}.lock").read_text("utf-8").splitlines())
        except OSError:
            return {}

    def lost(self) -> Sequence[LostPart]:
        """See `Probes.lost`."""
        return lost_here()

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
        command = programs.python("-c", code)
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, env=importing(os.environ)
            )
        except subprocess.TimeoutExpired:
            return f"took more than {TIMEOUT_S:.0f} s"
        lines = ended.stderr.strip().splitlines()
        return None if ended.returncode == 0 else lines[-1] if lines else f"ended with status {ended.returncode}"

    def lacks_for_compiling(self) -> str | None:
        """See `Probes.lacks_for_compiling`."""
        return lacks_for_compiling(os.environ)

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
            # Connections in TIME_WAIT do not count.
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
    except OSError:  # the process has ended
        return ""


def pins(lines: Iterable[str]) -> dict[str, str]:
    """Versions by package name, from the lines of a lock file; pure."""
    pairs = (line.split("#")[0].strip().partition("==") for line in lines)
    return {name.lower(): version for name, equals, version in pairs if equals}

"""The checks: from a probed value to a finding; pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from app.compatibility.contract import LostPart
from app.installation import INSTALL, INSTALL_CPU, INSTALL_CUDA, START

OLDEST, NEWEST, NEWEST_CUDA = (3, 11), (3, 13), (3, 12)
"""Python versions for which all pinned packages have builds, see requirements/setup.sh."""
SHARED_MEMORY = 1 << 30
"""Bytes. Containers have 64 MiB by default, less than Ray's object store needs on any machine."""
OPEN_FILES = 4096
"""Every connection to the ingress needs one, and Ray's processes have hundreds."""


class Level(StrEnum):
    """Severity. With a PROBLEM Mell does not serve, or not as configured; a WARNING may be intended."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The result of one check; `remedy` is empty for OK."""

    name: str
    level: Level
    message: str
    remedy: str = ""


def ok(name: str, message: str) -> DoctorFinding:
    """A finding without a remedy."""
    return DoctorFinding(name, Level.OK, message)


def warning(name: str, message: str, remedy: str) -> DoctorFinding:
    """A finding that may be intended."""
    return DoctorFinding(name, Level.WARNING, message, remedy)


def problem(name: str, message: str, remedy: str) -> DoctorFinding:
    """A finding that needs its remedy."""
    return DoctorFinding(name, Level.PROBLEM, message, remedy)


def check_python(version: tuple[int, int, int], cuda: bool) -> DoctorFinding:
    """The pinned packages have builds for this version of Python."""
    text = ".".join(map(str, version))
    newest = NEWEST_CUDA if cuda else NEWEST
    if OLDEST <= version[:2] <= newest:
        return ok("Python", text)
    return problem("Python", text, f"install with another Python: 3.11 to 3.{newest[1]} is needed")


def check_package(name: str, installed: str, pinned: str | None = None) -> DoctorFinding:
    """A package is installed, in the version of the lock file if that is given."""
    if installed == "none":
        return problem(name, "not installed", INSTALL)
    if pinned is not None and installed != pinned:
        return warning(name, f"{installed}; tested with {pinned}", INSTALL)
    return ok(name, installed)


def check_versions(is_tested: bool, state: str, lost: Sequence[LostPart]) -> DoctorFinding:
    """The versions of vLLM and Ray work together and with Mell. `state` describes them; `lost` are parts of Mell."""
    lines = [f"\n  {each.part.title}: {each.effect}\n    differs: {each.difference}" for each in lost]
    message = f"{state}{''.join(lines)}"
    if any(each.part.lost is None for each in lost):
        return problem("versions", message, INSTALL)
    return ok("versions", message) if is_tested and not lost else warning("versions", message, INSTALL)


def check_gpus(found: Sequence[str] | None, cuda: bool) -> DoctorFinding:
    """The build of vLLM fits the GPUs. `found` is None without nvidia-smi."""
    if found:
        message = ", ".join(found)
        return ok("GPU", message) if cuda else warning("GPU", f"{message}, not used", INSTALL_CUDA)
    if cuda:
        message = "no nvidia-smi" if found is None else "nvidia-smi finds none"
        return problem("GPU", f"{message}, but vLLM is the CUDA build", f"install the driver, or {INSTALL_CPU}")
    return ok("GPU", "none; vLLM is the CPU build")


def check_cuda(name: str, error: str | None) -> DoctorFinding:
    """A part of the CUDA stack works. `error` is its error message, None if it works."""
    if error is None:
        return ok(name, "works")
    return problem(name, error, f"{INSTALL_CUDA}; check that the driver (nvidia-smi) supports CUDA 13")


def check_compiler(lacks: str | None, cuda: bool) -> DoctorFinding:
    """Torch and Triton can compile. `lacks` is what they need and do not have, None if they have all."""
    if lacks is None:
        return ok("compiler", "works")
    effect = "Triton and torch compile GPU kernels with it" if cuda else "requests with log-probabilities take longer"
    return warning(
        "compiler", f"no {lacks}: {effect}", "apt-get install g++ python3-dev, or your system's names of these"
    )


def check_shared_memory(total: int | None) -> DoctorFinding:
    """Ray's object store has room. `total` is the size of /dev/shm in bytes, None without one."""
    if total is None:
        return warning("shared memory", "there is no /dev/shm", "mount a tmpfs there")
    text = f"/dev/shm has {total / (1 << 20):,.0f} MiB"
    if total >= SHARED_MEMORY:
        return ok("shared memory", text)
    return warning("shared memory", f"{text}; Ray's object store goes to disk", "docker run --shm-size=4g")


def check_open_files(soft: int, hard: int) -> DoctorFinding:
    """The limit on open files allows many connections; -1 is no limit."""
    if soft < 0 or soft >= OPEN_FILES:
        return ok("open files", f"{'no limit' if soft < 0 else f'{soft:,}'}")
    wanted = 65536 if hard < 0 else min(65536, hard)
    remedy = f"ulimit -n {wanted}" if wanted > soft else "have an administrator raise the hard limit (limits.conf)"
    return warning("open files", f"at most {soft:,}; every connection needs one", remedy)


def check_endpoint(url: str, answers: bool, trouble: str | None) -> DoctorFinding:
    """Mell serves at the URL. `trouble` is the reason why not, None if it does."""
    if trouble is None:
        return ok("endpoint", f"{url} serves")
    if answers:
        return warning("endpoint", f"{url} is not ready: {trouble}", "wait for the start; see mell status and the logs")
    return warning("endpoint", trouble, START)


def check_port(port: int, taken: bool, ours: bool, use: str) -> DoctorFinding:
    """A port is free, or used by the expected program. `ours`: that program is running."""
    name = f"port {port}"
    if not taken:
        return ok(name, f"free, for {use}")
    if ours:
        return ok(name, f"taken, apparently by {use}")
    return warning(name, f"taken, and {use} is not running", f"ss -ltnp 'sport = :{port}' shows the program; stop it")


def check_ray_session(file: str, address: str | None, alive: bool) -> DoctorFinding:
    """Ray would not join a dead cluster. `address` is the content of the session file, None without one."""
    if address is None:
        return ok("Ray session", "none left behind")
    if alive:
        return ok("Ray session", f"the running cluster at {address}; `serve run` joins it")
    return problem("Ray session", f"{file} names {address}, where nothing listens", f"ray stop --force; rm -f {file}")


def check_config(file: str, errors: Sequence[str], notes: Sequence[str] = ()) -> DoctorFinding:
    """A file with Serve's configuration is valid; `errors` and `notes` are lines on its members."""
    lines = "".join(f"\n  {line}" for line in (*errors, *notes))
    if not errors:
        return ok("configuration", f"{file} is valid{lines}")
    return problem("configuration", f"{file}:{lines}", "docs/configuration.md lists all settings")

"""The checks: what was probed in, a finding out; pure."""

from collections.abc import Sequence

from app.cli.doctor.findings import Finding, ok, problem, warning

OLDEST, NEWEST, NEWEST_CUDA = (3, 11), (3, 13), (3, 12)
"""Python's versions for which all pinned packages have builds; see requirements/setup.sh."""
SHARED_MEMORY = 1 << 30
"""Bytes. Containers have 64 MiB unless told otherwise, less than Ray's object store wants on any machine."""
OPEN_FILES = 4096
"""Every connection to the ingress is one, and Ray's processes have hundreds."""


def check_python(version: tuple[int, int, int], cuda: bool) -> Finding:
    """Whether the pinned packages have builds for this Python."""
    said = ".".join(map(str, version))
    newest = NEWEST_CUDA if cuda else NEWEST
    if OLDEST <= version[:2] <= newest:
        return ok("Python", said)
    return problem("Python", said, f"make setup PYTHON=python{newest[0]}.{newest[1]}: 3.11 to 3.{newest[1]} is needed")


def check_package(name: str, installed: str, pinned: str | None) -> Finding:
    """Whether a package is the one that the lock file pins; Mell uses more than the public parts of some."""
    if installed == "none":
        return problem(name, "not installed", "make setup")
    if pinned is None:
        return warning(name, f"{installed}; no lock file says which it should be", "run mell from the project's tree")
    if installed != pinned:
        return warning(name, f"{installed}, tested is {pinned}", "make setup")
    return ok(name, installed)


def check_gpus(found: Sequence[str] | None, cuda: bool) -> Finding:
    """Whether GPUs and the build of vLLM belong together. `found` is None where there is no nvidia-smi."""
    if found:
        message = ", ".join(found)
        return ok("GPU", message) if cuda else warning("GPU", f"{message}, not used", "make setup DEVICE=cuda")
    if cuda:
        message = "no nvidia-smi" if found is None else "nvidia-smi finds none"
        return problem("GPU", f"{message}, but vLLM is the CUDA build", "install the driver, or make setup DEVICE=cpu")
    return ok("GPU", "none; vLLM is the CPU build")


def check_cuda(name: str, error: str | None) -> Finding:
    """Whether a part of the CUDA stack works here. `error` is what it said, None if it works."""
    if error is None:
        return ok(name, "works")
    return problem(name, error, "make setup DEVICE=cuda; see that the driver is new enough (nvidia-smi) for CUDA 13")


def check_shared_memory(total: int | None) -> Finding:
    """Whether Ray's object store has room. `total` is the size of /dev/shm in bytes, None if there is none."""
    if total is None:
        return warning("shared memory", "there is no /dev/shm", "mount a tmpfs there")
    said = f"/dev/shm has {total / (1 << 20):,.0f} MiB"
    if total >= SHARED_MEMORY:
        return ok("shared memory", said)
    return warning("shared memory", f"{said}; Ray's object store goes to disk", "docker run --shm-size=4g")


def check_open_files(soft: int, hard: int) -> Finding:
    """Whether there may be many connections; -1 is no limit."""
    if soft < 0 or soft >= OPEN_FILES:
        return ok("open files", f"{'no limit' if soft < 0 else f'{soft:,}'}")
    wanted = 65536 if hard < 0 else min(65536, hard)
    remedy = f"ulimit -n {wanted}" if wanted > soft else "have an administrator raise the hard limit (limits.conf)"
    return warning("open files", f"at most {soft:,}; every connection is one", remedy)


def check_endpoint(url: str, answers: bool, trouble: str | None) -> Finding:
    """Whether Mell serves at the URL. `trouble` is why not, None if it does."""
    if trouble is None:
        return ok("endpoint", f"{url} serves")
    if answers:
        return warning("endpoint", f"{url} is not ready: {trouble}", "wait for the start; mell status, and the logs")
    return warning("endpoint", trouble, "make serve")


def check_port(port: int, taken: bool, ours: bool, use: str) -> Finding:
    """Whether a port can be had. `ours` says that what is to listen there is running."""
    name = f"port {port}"
    if not taken:
        return ok(name, f"free, for {use}")
    if ours:
        return ok(name, f"taken, as it seems by {use}")
    return warning(name, f"taken, and {use} is not running", f"ss -ltnp 'sport = :{port}' says by whom; stop it")


def check_ray_session(file: str, address: str | None, alive: bool) -> Finding:
    """Whether Ray would join a cluster that is no more. `address` is what the file says, None without a file."""
    if address is None:
        return ok("Ray session", "none was left behind")
    if alive:
        return ok("Ray session", f"the cluster at {address}, which runs; `serve run` joins it")
    return problem("Ray session", f"{file} names {address}, where nothing listens", f"ray stop --force; rm -f {file}")


def check_config(file: str, mistakes: Sequence[str]) -> Finding:
    """Whether a serve_config.yaml is one."""
    if not mistakes:
        return ok("configuration", f"{file} is right")
    lines = "".join(f"\n  {mistake}" for mistake in mistakes)
    return problem("configuration", f"{file}:{lines}", "docs/configuration.md has all settings")

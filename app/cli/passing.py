"""The commands that are other programs of the project: their options, help and exit status are their own."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The project's root: it runs from its source tree."""


def python(*arguments: str) -> list[str]:
    """The command of a Python that imports the project, whatever the working directory holds.

    `-P` keeps that directory off the import path; what stands for it is in `environment`.
    """
    return [sys.executable, "-P", *arguments]


def environment() -> dict[str, str]:
    """This process's environment, with the project's root first on the import path."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def become(module: str, arguments: Sequence[str]) -> None:
    """Go on as `python -m MODULE ARGUMENTS`; does not return."""
    command = python("-m", module, *arguments)
    sys.stdout.flush()
    os.execve(command[0], command, environment())


def at_url(arguments: Sequence[str]) -> list[str]:
    """The arguments, behind the URL of `MELL_URL` where that is set: a later `--url` wins."""
    url = os.environ.get("MELL_URL")
    return [*(("--url", url) if url else ()), *arguments]

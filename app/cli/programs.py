"""`mell serve`, `replay`, `simulate`, `plan`, `keys`: programs with options and a status of their own."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The project's root folder; Mell runs from its source tree."""

PROGRAMS: Mapping[str, str] = {
    "serve": "app.vllm_cli",
    "replay": "simulator.replay",
    "simulate": "simulator",
    "plan": "simulator.planning",
    "keys": "app.keys",
}
"""The module of each program, by its command. Nothing else of the product names the simulator."""


def python(*arguments: str) -> list[str]:
    """A Python command line that imports the project from any working directory.

    `-P` keeps the working directory off the import path; `environment` adds the project's root.
    """
    return [sys.executable, "-P", *arguments]


def environment() -> dict[str, str]:
    """This process's environment with the project's root first on the import path."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def execute(program: str, arguments: Sequence[str]) -> None:
    """Replace this process by the program of a command; does not return."""
    command = python("-m", PROGRAMS[program], *arguments)
    sys.stdout.flush()
    os.execve(command[0], command, environment())


def with_url(arguments: Sequence[str]) -> list[str]:
    """The arguments, after a `--url` from `MELL_URL` if that is set; a later `--url` takes precedence."""
    url = os.environ.get("MELL_URL")
    return [*(("--url", url) if url else ()), *arguments]

"""`mell serve`, `convert`, `replay`, `simulate`, `plan`, `keys`: programs with options and a status of their own."""

import os
import sys
from collections.abc import Mapping, Sequence

from deployments.processes.importing import importing

PROGRAMS: Mapping[str, str] = {
    "serve": "app.vllm_cli",
    "convert": "app.convert",
    "replay": "simulator.replay",
    "simulate": "simulator.__main__",
    "plan": "simulator.planning",
    "keys": "app.keys",
}
"""The module of each program, by its command. Nothing else of the product names the simulator."""


def python(*arguments: str) -> list[str]:
    """A Python command line that imports Mell from any working directory, in the environment of `importing`.

    `-P` keeps the working directory off the import path.
    """
    return [sys.executable, "-P", *arguments]


def execute(program: str, arguments: Sequence[str]) -> None:
    """Replace this process by the program of a command; does not return."""
    command = python("-m", PROGRAMS[program], *arguments)
    sys.stdout.flush()
    os.execve(command[0], command, importing(os.environ))


def with_url(arguments: Sequence[str]) -> list[str]:
    """The arguments, after a `--url` from `MELL_URL` if that is set; a later `--url` takes precedence."""
    url = os.environ.get("MELL_URL")
    return [*(("--url", url) if url else ()), *arguments]

"""Runs of benchmarks: simulated ones with a bar, and files of measured ones, to which missing runs are added.

A file has one run in each line, as JSON, so that what has been measured stays if the command is interrupted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from simulator.command.runs import Performable, perform_all
from simulator.errors import BadInput

Run = TypeVar("Run")


def simulate_all(runs: Sequence[Performable[Any]], processes: int, label: str | None = None) -> list[Any]:
    """The results of simulations, with a bar of their virtual time, which disappears at the end if it has a label."""
    total = sum(run.seconds for run in runs)
    with tqdm(total=total, desc=label, leave=label is None, unit="s", unit_scale=True) as bar:

        def show(done_s: float) -> None:
            bar.update(done_s - bar.n)

        return perform_all(runs, processes, show)


def append_runs(path: Path, *runs: object) -> None:
    """Append runs, which are dataclasses, to a file."""
    with path.open("ab") as file:
        file.writelines(TypeAdapter(type(run)).dump_json(run) + b"\n" for run in runs)


def read_runs(path: Path, kind: type[Run]) -> list[Run]:
    """The runs in a file; none if there is no such file. Raises `BadInput` if the file has other content."""
    adapter = TypeAdapter(kind)
    try:
        return [adapter.validate_json(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not a file of runs: {str(error).splitlines()[0]}.") from None

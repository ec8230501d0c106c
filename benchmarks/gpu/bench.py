"""The surroundings of a step: the servers, the time that it may take, and the place of its results."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.gpu.record import RunRecord
from benchmarks.servers import Rig

MELL_PORT, BARE_PORT = 8110, 8111


class Allotment:
    """The time of one step. `clock` returns seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = clock() + seconds
        self.cut = False
        """True if there was no time for all turns."""

    @property
    def left_s(self) -> float:
        """Seconds left, 0 at least."""
        return max(0.0, self._ends - self._clock())

    def turns(self, count: int) -> Iterator[int]:
        """The numbers below `count`, as long as another turn as long as the longest one fits; the first one always."""
        longest = 0.0
        for number in range(count):
            began = self._clock()
            if number and self._ends - began < longest:
                self.cut = True
                return
            yield number
            longest = max(longest, self._clock() - began)


@dataclass(frozen=True, slots=True)
class Bench:
    """Servers that run, with what a step needs to measure them and to keep the results.

    `rig`, `conditions`, `transport` and `slots_mib` are those of the servers; the rig is None without servers. `folder`
    is for raw samples and logs.
    """

    part: str
    rig: Rig | None
    record: RunRecord
    folder: Path
    time: Allotment
    conditions: str = ""
    transport: str = ""
    slots_mib: float = 0.0
    mell_port: int = MELL_PORT
    bare_port: int = BARE_PORT

    def keep(self, kind: str, sample: Any) -> None:
        """Append a raw sample to the file of samples."""
        with (self.folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps({"part": self.part, "kind": kind, "sample": sample}) + "\n")


class PartStep(Protocol):
    """One measurement of a part: a value in the plan. `weight` is its share of the part's time."""

    @property
    def weight(self) -> float:
        """The share, relative to the weights of the part's other steps."""

    async def run(self, bench: Bench) -> None:
        """Measure, and add rows to the record; those of the turns so far also if cancelled."""

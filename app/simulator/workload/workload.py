"""Draws the requests of one run, with arrival times and lengths, from the user's recipe.

A prompt is cut to half of a replica's capacity, and prompt and output together to the capacity, since every request
must fit into a replica alone. The paper scales its conversations by ten (section VIII-B) and leaves open how it treats
those that then exceed a GPU; the cut is our reading.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from app.simulator.errors import BadInput, require_positive
from app.simulator.workload.hashed import is_hashed, read_hashed
from app.simulator.workload.lengths import LENGTHS, Lengths
from app.simulator.workload.table import read_table
from policies.model import RequestId, Tokens
from policies.precedence import DEFAULT_CLASS, Precedence

CLASS = "class"
"""The column of service classes, which a trace may have."""

SMALLEST_CAPACITY = 8
"""With a smaller capacity some size classes would be empty: they go down to an eighth of it (section VI-C)."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request to simulate: it arrives at `arrival_s` seconds with `prompt` tokens and generates `output` more. No
    policy sees `output`. `names` are those of its prompt's full blocks, if prefix caches are simulated.
    `service_class` is the name of its class.
    """

    id: RequestId
    arrival_s: float
    prompt: Tokens
    output: Tokens
    names: tuple[int, ...] = ()
    service_class: str = DEFAULT_CLASS

    @property
    def precedence(self) -> Precedence:
        """The facts that decide about its turn."""
        return Precedence(self.service_class, self.arrival_s)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An arrival at `at_s` seconds, with its lengths in tokens, the names of its prompt's blocks and its service class
    if the trace has them.
    """

    at_s: float
    prompt: float = 0.0
    output: float = 0.0
    names: tuple[int, ...] = ()
    service_class: str = ""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests that arrive independently of each other, `rate` per second."""

    rate: float

    def __post_init__(self) -> None:
        require_positive("Poisson rate", self.rate)


@dataclass(frozen=True, slots=True)
class ArrivalTrace:
    """Recorded arrivals, the earliest first."""

    rows: tuple[Recorded, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parameters of a workload. `lengths` is None for the trace's own lengths.

    `time_scale` is a factor on arrival times, `length_scale` one on token counts. Without `cap`, a request that does
    not fit into a replica is an error instead of being cut. The trace's names of blocks are of `block_tokens` tokens
    each (0: they are left out). `shares` are the shares of service classes among the requests without one; the rest has
    the default class.
    """

    arrivals: Poisson | ArrivalTrace
    lengths: Lengths | None
    horizon_s: float
    capacity: Tokens
    time_scale: float = 1.0
    length_scale: float = 1.0
    cap: bool = True
    block_tokens: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_positive("horizon", self.horizon_s)
        require_positive("time scale", self.time_scale)
        require_positive("length scale", self.length_scale)
        if self.capacity < SMALLEST_CAPACITY:
            raise BadInput(f"The capacity must be {SMALLEST_CAPACITY} tokens or more, got {self.capacity}.")
        if self.lengths is None and isinstance(self.arrivals, Poisson):
            raise BadInput("Poisson arrivals have no lengths of their own: give --lengths.")
        if self.block_tokens and (self.lengths is not None or self.length_scale != 1.0):
            raise BadInput("The names of a trace's blocks are those of its own lengths: leave the lengths as they are.")


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one run, the earliest first; `capped` of them were cut to the capacity of a replica."""

    seed: int
    jobs: tuple[Job, ...]
    capped: int


def read_trace(path: Path) -> ArrivalTrace:
    """The requests in a trace file. Raises `BadInput` if the file is not a trace."""
    if is_hashed(path):
        rows = [Recorded(*row) for row in read_hashed(path)]
    else:
        table = read_table(path)
        classes = (row.get(CLASS) or "" for row in table.rows)
        lengths = table.numbers("arrival_s", *LENGTHS)
        rows = [
            Recorded(at_s, prompt, output, (), name)
            for (at_s, prompt, output), name in zip(lengths, classes, strict=True)
        ]
    if not rows:
        raise BadInput(f"{path} has no requests.")
    return ArrivalTrace(tuple(sorted(rows, key=lambda row: row.at_s)))


def draw(recipe: Recipe, seed: int) -> Workload:
    """The requests that arrive before the horizon. Equal seeds give equal requests."""
    jobs, capped = [], 0
    chance = Random(f"{seed}-classes")
    for number, (row, prompt, output) in enumerate(_requests(recipe, seed)):
        kept = _cut(prompt, output, recipe.capacity) if recipe.cap else (prompt, output)
        if sum(kept) > recipe.capacity:
            raise BadInput(
                f"Request {number} needs {sum(kept):,} tokens, more than the {recipe.capacity:,} of a replica: "
                "leave out --no-cap to have it cut."
            )
        capped += kept != (prompt, output)
        name = row.service_class or _drawn_class(recipe.shares, chance)
        full = row.names[: kept[0] // recipe.block_tokens] if recipe.block_tokens else ()
        at_s = row.at_s * recipe.time_scale
        jobs.append(Job(RequestId(f"r{number}"), at_s, Tokens(kept[0]), Tokens(kept[1]), full, name))
    if not jobs:
        raise BadInput(f"No request arrives in the first {recipe.horizon_s:g} s.")
    return Workload(seed, tuple(jobs), capped)


def _requests(recipe: Recipe, seed: int) -> Iterator[tuple[Recorded, int, int]]:
    """The arrival, prompt tokens and output tokens of each request, before any cut."""
    chance = Random(f"{seed}-lengths")
    for row in _arrivals(recipe.arrivals, seed):
        if row.at_s * recipe.time_scale >= recipe.horizon_s:
            return
        lengths = recipe.lengths.draw(chance) if recipe.lengths else (row.prompt, row.output)
        prompt, output = (max(1, round(tokens * recipe.length_scale)) for tokens in lengths)
        yield row, prompt, output


def _drawn_class(shares: Mapping[str, float], chance: Random) -> str:
    left = chance.random() if shares else 1.0
    for name, share in shares.items():
        left -= share
        if left < 0:
            return name
    return DEFAULT_CLASS


def _arrivals(arrivals: Poisson | ArrivalTrace, seed: int) -> Iterator[Recorded]:
    if isinstance(arrivals, ArrivalTrace):
        yield from arrivals.rows
        return
    chance, at_s = Random(f"{seed}-arrivals"), 0.0
    while True:
        at_s += chance.expovariate(arrivals.rate)
        yield Recorded(at_s)


def _cut(prompt: int, output: int, capacity: int) -> tuple[int, int]:
    prompt = min(prompt, capacity // 2)
    return prompt, min(output, capacity - prompt)

"""Draws the requests of one run, with arrival times and lengths, from the user's recipe.

A prompt is cut to half of a replica's capacity, and prompt and output together to the capacity, since every request
must fit into a replica alone. The paper scales its conversations by ten (section VIII-B) and leaves open how it treats
those that then exceed a GPU; the cut is our reading.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import overload

from policies.model import RequestId, Tokens
from policies.precedence import DEFAULT_CLASS, Precedence
from policies.prefix.names import digests, name_of
from simulator.errors import BadInput, require_positive
from simulator.traces.rows import ReadWindow
from simulator.traces.trace import WHOLE, FileTrace, TraceAccount, read_trace_file
from simulator.workload.lengths import Lengths
from simulator.workload.sessions import SessionRequest, SessionShape, Texts, sessions

SMALLEST_CAPACITY = 8
"""With a smaller capacity some size classes would be empty: they go down to an eighth of it (section VI-C)."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request to simulate: it arrives at `arrival_s` seconds with `prompt` tokens and generates `output` more. No
    policy sees `output`. `names` are those of its prompt's full blocks, if prefix caches are simulated, and `outputs`
    those of the blocks that its output fills. `service_class` is the name of its class.

    A request of a `session` arrives `think_s` seconds after the end of the request `after`, and not before its time.
    """

    id: RequestId
    arrival_s: float
    prompt: Tokens
    output: Tokens
    names: tuple[int, ...] = ()
    service_class: str = DEFAULT_CLASS
    session: str = ""
    after: RequestId | None = None
    think_s: float = 0.0
    outputs: tuple[int, ...] = ()

    @property
    def context(self) -> tuple[int, ...]:
        """The names of all blocks that it leaves."""
        return (*self.names, *self.outputs) if self.outputs else self.names

    @property
    def precedence(self) -> Precedence:
        """The facts that decide about its turn."""
        return Precedence(self.service_class, self.arrival_s)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An arrival at `at_s` seconds, with its lengths in tokens, the names of its prompt's blocks, its service class,
    its session and its model if the trace has them. `think_s` is the time since the end of the session's previous
    request.
    """

    at_s: float
    prompt: float = 0.0
    output: float = 0.0
    names: tuple[int, ...] = ()
    service_class: str = ""
    session: str = ""
    think_s: float = 0.0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests that arrive independently of each other, `rate` per second; sessions with a `shape`, if there is one."""

    rate: float
    shape: SessionShape | None = None

    def __post_init__(self) -> None:
        require_positive("Poisson rate", self.rate)


@dataclass(frozen=True, slots=True)
class TracedRows(Sequence[Recorded]):
    """The requests of a trace, each made when it is asked for, so that millions of them take little memory."""

    trace: FileTrace

    def __len__(self) -> int:
        return len(self.trace.at_s)

    @overload
    def __getitem__(self, index: int) -> Recorded: ...

    @overload
    def __getitem__(self, index: slice) -> list[Recorded]: ...

    def __getitem__(self, index: int | slice) -> Recorded | list[Recorded]:
        if isinstance(index, slice):
            return [self._row(place) for place in range(len(self))[index]]
        return self._row(range(len(self))[index])

    def _row(self, place: int) -> Recorded:
        trace, number = self.trace, self.trace.numbers[place]
        return Recorded(
            trace.at_s[place],
            trace.prompts[place],
            trace.outputs[place],
            tuple(trace.names.get(number, ())),
            trace.classes.get(number, ""),
            trace.sessions.get(number, ""),
            trace.think_s.get(number, 0.0),
            trace.models.get(number, ""),
        )


@dataclass(frozen=True, slots=True)
class ArrivalTrace:
    """Recorded arrivals, the earliest first; from a file with its account."""

    rows: Sequence[Recorded]
    account: TraceAccount | None = None

    @property
    def classes(self) -> set[str]:
        """The service classes of its requests; empty for none."""
        if isinstance(self.rows, TracedRows):
            return {*self.rows.trace.classes.values()}
        return {row.service_class for row in self.rows}

    @property
    def has_names(self) -> bool:
        """True if requests have the names of their blocks."""
        if isinstance(self.rows, TracedRows):
            return any(self.rows.trace.names.values())
        return any(row.names for row in self.rows)


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
        if self.lengths is None and isinstance(self.arrivals, Poisson) and self.arrivals.shape is None:
            raise BadInput("Poisson arrivals have no lengths of their own: give --lengths or --sessions.")
        if self.block_tokens and (self.lengths is not None or self.length_scale != 1.0):
            raise BadInput("The names of a trace's blocks are those of its own lengths: leave the lengths as they are.")


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one run, the earliest first; `capped` of them were cut to a replica, by `cut_tokens` in all."""

    seed: int
    jobs: tuple[Job, ...]
    capped: int
    cut_tokens: int = 0


def read_trace(
    path: Path, window: ReadWindow = WHOLE, *, with_names: bool = True, with_models: bool = False
) -> ArrivalTrace:
    """The requests in a trace file, in a window of it. Raises `BadInput` if the file is not a trace."""
    trace = read_trace_file(path, window, with_names=with_names, with_models=with_models)
    return ArrivalTrace(TracedRows(trace), trace.account)


def draw(recipe: Recipe, seed: int) -> Workload:
    """The requests that arrive before the horizon. Equal seeds give equal requests."""
    jobs, capped, cut_tokens = [], 0, 0
    chance = Random(f"{seed}-classes")
    for number, (row, prompt, output) in enumerate(_requests(recipe, seed)):
        kept = _cut(prompt, output, recipe.capacity) if recipe.cap else (prompt, output)
        if sum(kept) > recipe.capacity:
            raise BadInput(
                f"Request {number} needs {sum(kept):,} tokens, more than the {recipe.capacity:,} of a replica: "
                "leave out --no-cap to have it cut."
            )
        capped += kept != (prompt, output)
        cut_tokens += prompt + output - sum(kept)
        name = row.service_class or _drawn_class(recipe.shares, chance)
        full = row.names[: kept[0] // recipe.block_tokens] if recipe.block_tokens else ()
        at_s = row.at_s * recipe.time_scale
        lengths = Tokens(kept[0]), Tokens(kept[1])
        think_s = row.think_s * recipe.time_scale
        jobs.append(Job(RequestId(f"r{number}"), at_s, *lengths, full, name, row.session, think_s=think_s))
    if not jobs:
        raise BadInput(f"No request arrives in the first {recipe.horizon_s:g} s.")
    return Workload(seed, tuple(_in_sessions(jobs, recipe.block_tokens)), capped, cut_tokens)


def _in_sessions(jobs: Sequence[Job], block_tokens: int) -> Iterator[Job]:
    """The same requests; those of sessions with the request before them, and with the names of their outputs' blocks.

    These are in the next prompt of the session, if it goes on after this one. Nobody finds the others, which have names
    of their own, below 0.
    """
    latest: dict[str, Job] = {}
    following: dict[RequestId, Job] = {}
    for job in jobs:
        if job.session:
            if (before := latest.get(job.session)) is not None:
                following[before.id] = job
            latest[job.session] = job
    before_it = {job.id: id for id, job in following.items()}
    for number, job in enumerate(jobs):
        if not job.session:
            yield job
            continue
        outputs: tuple[int, ...] = ()
        if block_tokens:
            first, last = len(job.names), (job.prompt + job.output - 1) // block_tokens
            following_names = following[job.id].names if job.id in following else ()
            found = following_names[first:last] if following_names[:first] == job.names else ()
            own = range(-1 - number * _OWN_NAMES, -1 - number * _OWN_NAMES - (last - first - len(found)), -1)
            outputs = (*found, *own)
        yield replace(job, after=before_it.get(job.id), outputs=outputs)


_OWN_NAMES = 1 << 20
"""More names than a request has blocks."""


class Succession:
    """The order of requests in sessions: `first` are those that wait for no other one, sorted by arrival."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.first = [job for job in jobs if job.after is None]
        self._after = {job.after: job for job in jobs if job.after is not None}

    def ended(self, request: RequestId, now: float) -> Job | None:
        """The request that follows one that has just ended, with its arrival; None if there is none."""
        job = self._after.pop(request, None)
        return None if job is None else replace(job, arrival_s=max(job.arrival_s, now + job.think_s))


def _requests(recipe: Recipe, seed: int) -> Iterator[tuple[Recorded, int, int]]:
    """The arrival, prompt tokens and output tokens of each request, before any cut."""
    chance = Random(f"{seed}-lengths")
    for row in _arrivals(recipe, seed):
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


def _arrivals(recipe: Recipe, seed: int) -> Iterator[Recorded]:
    match recipe.arrivals:
        case ArrivalTrace(rows, _):
            yield from rows
        case Poisson(rate, None):
            yield from map(Recorded, poisson_times(rate, seed))
        case Poisson(rate, shape):
            assert shape is not None
            begins_s = takewhile(lambda at_s: at_s * recipe.time_scale < recipe.horizon_s, poisson_times(rate, seed))
            # Requests that do not wait come between those of other sessions.
            requests = made_up(sessions(shape, begins_s, seed), seed, recipe.block_tokens)
            yield from sorted(requests, key=attrgetter("at_s"))


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Arrival times in seconds, without an end. Equal seeds give equal times."""
    chance, at_s = Random(f"{seed}-arrivals"), 0.0
    while True:
        at_s += chance.expovariate(rate)
        yield at_s


def made_up(requests: Iterable[SessionRequest], seed: int, block_tokens: int) -> Iterator[Recorded]:
    """Requests of made-up sessions; the names of blocks are those of the prompts' tokens, as an engine names them."""
    texts = Texts(seed)
    for each in requests:
        named = digests(texts.tokens(each.prompt), block_tokens) if block_tokens else ()
        names = tuple(map(name_of, named))
        prompt, output = each.prompt_tokens, each.output
        yield Recorded(each.at_s, prompt, output, names, session=each.session, think_s=each.think_s)


def _cut(prompt: int, output: int, capacity: int) -> tuple[int, int]:
    prompt = min(prompt, capacity // 2)
    return prompt, min(output, capacity - prompt)

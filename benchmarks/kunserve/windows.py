"""The windows of arrivals. Three are generated; those of traces need the folder with these.

spikes    Poisson arrivals, five times as many in two spikes
on-off    Poisson arrivals that are three times as many in on-times; on- and off-times are exponential
clumps    arrivals in clumps, as a renewal process with gamma intervals of variation 3

Policies were tuned on `spikes` alone. A trace's arrivals keep their times; more load is more requests at each time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from random import Random

from policies.model import RequestId, Tokens
from simulator.traces.trace import read_trace_file
from simulator.workload.lengths import Curve, Lengths, Quantiles
from simulator.workload.workload import Job

WINDOW_S = 250.0
"""Seconds of arrivals."""
SPIKES = ((90.0, 12.0), (190.0, 12.0))
"""The beginning and length of each spike, in seconds."""
SPIKE = 5.0
ON_S, OFF_S, ON = 15.0, 45.0, 3.0
VARIATION = 3.0
JITTER_S = 1.0
"""Copies of a traced arrival come up to this long after it."""

GENERATED = ("spikes", "on-off", "clumps")
TRACED: Mapping[str, str] = {"burstgpt-like": "burstgpt_like_1400s.csv.gz", "azure-code": "azure2023_code.csv.gz"}
"""Windows of traces and their files."""


def _curve(p50: float, p80: float, p95: float, p99: float) -> Curve:
    return Curve((0.0, 0.5, 0.8, 0.95, 0.99, 1.0), (1.0, p50, p80, p95, p99, p99))


LENGTHS: Mapping[str, Lengths] = {
    "BurstGPT": Quantiles(_curve(400, 1146, 1804, 2009), _curve(249, 462, 715, 1161)),
    "AzureConv": Quantiles(_curve(998, 1159, 4080, 4096), _curve(202, 411, 451, 585)),
    "AGIEval-CoT": Quantiles(_curve(128, 556, 619, 651), _curve(363, 450, 578, 698)),
}
"""The lengths of the paper's data sets, from the quantiles in its table 2."""


@dataclass(frozen=True, slots=True)
class PairWindow:
    """Arrivals: `rate` requests per second and replica outside of bursts, or as many for each request of a trace."""

    name: str
    rate: float
    lengths: str = "BurstGPT"
    folder: Path | None = None

    def jobs(self, seed: int, capacity: Tokens, replicas: int, long: int = 0) -> tuple[Job, ...]:
        """The requests for all replicas. None is longer than one's capacity, but every `long`-th (0: none): by half."""
        chance = Random(f"{seed}-lengths")
        jobs = []
        for number, (at_s, prompt, output) in enumerate(self._rows(seed, replicas, chance)):
            if long and number % long == long // 2:
                prompt, output = round(1.5 * capacity) - 100, 100
            else:
                prompt = min(prompt, capacity // 2)
                output = min(output, capacity - prompt)
            jobs.append(Job(RequestId(f"r{number}"), at_s, Tokens(prompt), Tokens(output)))
        return tuple(jobs)

    def _rows(self, seed: int, replicas: int, chance: Random) -> Iterable[tuple[float, int, int]]:
        if self.name in TRACED:
            yield from self._traced(seed)
            return
        for at_s in takewhile(lambda at_s: at_s < WINDOW_S, self._times(seed, self.rate * replicas)):
            prompt, output = LENGTHS[self.lengths].draw(chance)
            yield at_s, max(1, round(prompt)), max(2, round(output))

    def _traced(self, seed: int) -> list[tuple[float, int, int]]:
        assert self.folder is not None, "a trace has a folder"
        chance = Random(f"{seed}-copies")
        trace = read_trace_file(self.folder / TRACED[self.name])
        rows = []
        for at_s, prompt, output in zip(trace.at_s, trace.prompts, trace.outputs, strict=True):
            if at_s >= WINDOW_S:
                break
            copies = int(self.rate) + (chance.random() < self.rate % 1)
            rows += [
                (at_s + (chance.random() * JITTER_S if copy else 0.0), max(1, round(prompt)), max(2, round(output)))
                for copy in range(copies)
            ]
        return sorted(rows)

    def _times(self, seed: int, rate: float) -> Iterator[float]:
        chance = Random(f"{seed}-arrivals")
        match self.name:
            case "spikes":
                yield from _poisson(chance, rate, [(begin, begin + length, SPIKE) for begin, length in SPIKES])
            case "on-off":
                yield from _poisson(chance, rate, list(_on_times(Random(f"{seed}-on"))))
            case "clumps":
                shape, at_s = 1 / VARIATION**2, 0.0
                while True:
                    at_s += chance.gammavariate(shape, 1 / (shape * rate))
                    yield at_s
            case _:
                raise ValueError(f"there is no window {self.name!r}")


def _poisson(chance: Random, rate: float, bursts: list[tuple[float, float, float]]) -> Iterator[float]:
    """Times of a rate that is a multiple in each burst, thinned from the highest one."""
    most, at_s = rate * max(factor for _, _, factor in bursts), 0.0
    while True:
        at_s += chance.expovariate(most)
        factor = next((factor for begin, end, factor in bursts if begin <= at_s < end), 1.0)
        if chance.random() < factor * rate / most:
            yield at_s


def _on_times(chance: Random) -> Iterator[tuple[float, float, float]]:
    at_s = 0.0
    while at_s < WINDOW_S:
        at_s += chance.expovariate(1 / OFF_S)
        length = chance.expovariate(1 / ON_S)
        yield at_s, at_s + length, ON
        at_s += length

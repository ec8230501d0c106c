"""Access to raw runs: a metric of a case, or its mean over several cases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evaluation.runs.case import Case
from simulator.outcome.metrics import Metrics
from simulator.outcome.statistics import Interval, interval


@dataclass(frozen=True, slots=True)
class Results:
    """The metrics of every case, and its processor time in seconds."""

    metrics: Mapping[Case, Metrics]
    cpu_s: Mapping[Case, float]

    def value(self, case: Case, metric: str) -> float:
        """A metric by name, or a part of one by `name.part`; 0 if the run has no value of it."""
        found: Any = self.metrics[case]
        for part in metric.split("."):
            found = None if found is None else found[part]
        return 0.0 if found is None else float(found)

    def over(self, cases: Sequence[Case], metric: str) -> Interval:
        """The mean of a metric over cases with different seeds, with its 95 % confidence interval."""
        return interval([self.value(case, metric) for case in cases])

    def mean(self, cases: Sequence[Case], metric: str) -> float:
        """The mean of a metric over cases."""
        return self.over(cases, metric).mean

    def most(self, cases: Sequence[Case], metric: str) -> float:
        """The largest value of a metric in any of the cases."""
        return max(self.value(case, metric) for case in cases)

"""Prometheus's text format in pieces, one per process, merged by the process that is scraped.

Every process renders its own registry, with its name as a label. Merging the pieces of several processes is joining
strings: the format only requires that all samples of a family follow one HELP and TYPE.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_HEAD_LINES = 2


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of one process: `head` is its HELP and TYPE, `samples` its sample lines; each line ends in a newline.

    `name` has no `_total`, not even for a counter.
    """

    name: str
    head: str
    samples: str


class _One:
    """A registry of one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def expose(registry: Collector, labels: Mapping[str, str], prefix: str = "") -> tuple[Family, ...]:
    """The metrics whose names begin with `prefix`, with `labels` added to every sample.

    The creation times of series are left out: Prometheus's text format would need a gauge for each series.
    """
    return tuple(_render(metric, labels) for metric in registry.collect() if metric.name.startswith(prefix))


def _render(metric: Metric, labels: Mapping[str, str]) -> Family:
    labelled = Metric(metric.name, metric.documentation, metric.type)
    created = f"{metric.name}_created"
    labelled.samples = [
        sample._replace(labels={**sample.labels, **labels}) for sample in metric.samples if sample.name != created
    ]
    lines = generate_latest(_One(labelled)).decode().splitlines(keepends=True)
    return Family(metric.name, "".join(lines[:_HEAD_LINES]), "".join(lines[_HEAD_LINES:]))


def join_families(sources: Iterable[Sequence[Family]]) -> tuple[Family, ...]:
    """The metrics of all sources by name, each once with all samples. HELP and TYPE are those of the first source."""
    heads: dict[str, str] = {}
    samples: dict[str, list[str]] = {}
    for families in sources:
        for family in families:
            heads.setdefault(family.name, family.head)
            samples.setdefault(family.name, []).append(family.samples)
    return tuple(Family(name, heads[name], "".join(samples[name])) for name in sorted(heads))


def merge(processes: Iterable[Sequence[Family]]) -> bytes:
    """The metrics of all processes as one text, sorted by name. HELP and TYPE are those of the first process."""
    return "".join(family.head + family.samples for family in join_families(processes)).encode()

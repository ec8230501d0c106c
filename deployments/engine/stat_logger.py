"""vLLM's logger of statistics: its only import. Several of a process need registries of their own.

Each one unregisters the metrics of all earlier ones from the common registry.
"""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import PrometheusStatLogger

__all__ = ["PrometheusStatLogger", "stat_logger"]


def stat_logger(registry: CollectorRegistry) -> type[PrometheusStatLogger]:
    """vLLM's logger of statistics, with its metrics in this registry."""

    def registered(kind: type[Any]) -> type[Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            kind.__init__(self, *args, **{"registry": registry, **kwargs})

        return type(kind.__name__, (kind,), {"__init__": init})

    class RegistryStatLogger(PrometheusStatLogger):
        """See `stat_logger`."""

        _gauge_cls = registered(Gauge)
        _counter_cls = registered(Counter)
        _histogram_cls = registered(Histogram)

    return RegistryStatLogger

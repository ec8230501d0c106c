"""vLLM's metrics of whole requests: each counts once, however many engines it has been on.

The engines' outputs hold what vLLM's frontend would have read from them: the events of scheduling and the statistics of
the prefill come with the first token. vLLM's own classes make metrics of them, so names, buckets and meanings are those
of vLLM's server. The metrics of engines are exposed by the engines' replicas.
"""

import time
from typing import Any, Protocol

from deployments.metrics.exposition import Family, expose
from deployments.metrics.vllm import of_requests
from migration.protocol.reading import Output
from migration.protocol.request import RequestSpec

_FLUSHED_AT = 1_000
"""Gaps between outputs that are kept before they are recorded, if no scrape records them before."""


class RequestRecord(Protocol):
    """The statistics of one request."""

    def took(self, output: Output) -> None:
        """The next output has arrived; with a finish reason it is the last."""
        ...

    def stopped(self) -> None:
        """The reader has found a stop string: there is no more output."""
        ...


class RequestStatistics(Protocol):
    """The statistics of all requests of an ingress."""

    def begin(self, spec: RequestSpec) -> RequestRecord:
        """A request has arrived."""
        ...

    def expose(self, replica: str) -> tuple[Family, ...]:
        """The metrics of whole requests, labelled with `replica`, this ingress replica's id."""
        ...


class _NoRecord:
    def took(self, output: Output) -> None:
        pass

    def stopped(self) -> None:
        pass


class FrontendStatistics:
    """Implements `RequestStatistics` where vLLM's own application keeps them, or nobody does."""

    def begin(self, spec: RequestSpec) -> RequestRecord:
        """See `RequestStatistics.begin`."""
        return NO_RECORD

    def expose(self, replica: str) -> tuple[Family, ...]:
        """See `RequestStatistics.expose`."""
        from prometheus_client import REGISTRY

        families = expose(REGISTRY, {"replica": replica}, "vllm:")
        return tuple(family for family in families if of_requests(family.name))


NO_RECORD = _NoRecord()
NO_STATISTICS = FrontendStatistics()


class VllmRequestMetrics:
    """Implements `RequestStatistics` with vLLM's metrics."""

    def __init__(self, config: Any) -> None:
        """`config` is vLLM's configuration of a frontend; there is one such object per process."""
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.metrics.loggers import PrometheusStatLogger
        from vllm.v1.metrics.stats import LoRARequestStates
        from vllm.v1.serial_utils import MsgpackDecoder

        self._logger = PrometheusStatLogger(config, [0])
        self.adapters = LoRARequestStates()
        self.decode = MsgpackDecoder(EngineCoreOutput).decode
        self.make = EngineCoreOutput
        self._begin()

    def _begin(self) -> None:
        from vllm.v1.metrics.stats import IterationStats

        self._fresh = IterationStats()

    def begin(self, spec: RequestSpec) -> RequestRecord:
        """See `RequestStatistics.begin`."""
        return _VllmRecord(self, spec)

    def now(self) -> Any:
        """The statistics to add to, as of now."""
        if len(self._fresh.inter_token_latencies_iter) >= _FLUSHED_AT:
            self.flush()
        self._fresh.iteration_timestamp = time.time()
        return self._fresh

    def flush(self) -> None:
        """Record what is new."""
        self._logger.record(None, self._fresh)
        self._begin()

    def expose(self, replica: str) -> tuple[Family, ...]:
        """See `RequestStatistics.expose`."""
        self.flush()
        return NO_STATISTICS.expose(replica)


class _VllmRecord:
    """Implements `RequestRecord`."""

    def __init__(self, metrics: VllmRequestMetrics, spec: RequestSpec) -> None:
        from vllm.v1.metrics.stats import RequestStateStats

        self._metrics = metrics
        self._spec = spec
        self._stats = RequestStateStats(arrival_time=time.time())
        self._begun = time.monotonic()
        self._prefilling = True
        self._cached = 0
        self._over = False

    def took(self, output: Output) -> None:
        """See `RequestRecord.took`."""
        now = time.monotonic()
        made = self._metrics.make("", list(output.tokens))
        for _, rest in output.extras:
            self._add_rest(made, self._metrics.decode(rest), now)
        if output.tokens:
            adapters = self._metrics.adapters
            self._metrics.now().update_from_output(made, now, self._prefilling, self._stats, adapters, None)
            self._prefilling = False
            if not self._stats.scheduled_ts:
                # An engine without such events: the prefill is all that came before.
                self._stats.queued_ts = self._stats.scheduled_ts = self._begun
        if output.finish is not None:
            self._finish(output.finish)

    def _add_rest(self, made: Any, rest: Any, now: float) -> None:
        """Add the statistics of one step. Those of a later engine's prefill are about a prompt with output in it."""
        from vllm.v1.engine import EngineCoreEventType

        for event in rest.events or ():
            if self._prefilling or event.type == EngineCoreEventType.PREEMPTED:
                event.timestamp += now
                made.events = [*(made.events or ()), event]
        if self._prefilling and rest.prefill_stats is not None:
            made.prefill_stats = rest.prefill_stats
            self._cached = rest.prefill_stats.num_cached_tokens

    def stopped(self) -> None:
        """See `RequestRecord.stopped`."""
        self._finish("stop")

    def _finish(self, reason: str) -> None:
        from vllm.v1.engine import FinishReason
        from vllm.v1.engine.parallel_sampling import ParentRequest

        if self._over or self._prefilling:
            return
        self._over = True
        fresh = self._metrics.now()
        fresh.update_from_finished_request(
            FinishReason[reason.upper()],
            self._spec.id,
            self._spec.prompt_tokens,
            self._spec.max_tokens,
            self._stats,
            self._cached,
        )
        ParentRequest.observe_finished_request(None, fresh, self._stats.num_generation_tokens)

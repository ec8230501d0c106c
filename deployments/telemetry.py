"""What the scheduler counts: migrations, replicas, GPU time."""

from collections import Counter as Counts
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from deployments.exposition import Family, expose
from deployments.instruments import Counter, Gauge, Histogram
from migration.record import MigrationRecord, Outcome
from policies.model import ReplicaLoad, ReplicaState

_PAUSES_S = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
_PREDICTED_S = [0.01, 0.03, 0.1, 0.3, 1, 3, 10]
_FREE_S = [0.5, 1, 2, 5, 10, 20, 30, 60, 120]


class Telemetry:
    """The scheduler's metrics, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._migrations = Counter("mell_migrations", "Migrations that ended.", registry, ("path", "reason", "outcome"))
        self._pause = Histogram(
            "mell_migration_pause_seconds",
            "From a migration's freeze to the target's confirmation.",
            registry,
            _PAUSES_S,
            ("path",),
        )
        self._bytes = Counter("mell_migration_bytes", "KV bytes sent.", registry)
        self._predicted = Histogram(
            "mell_migration_predicted_seconds",
            "Predicted time of a migration, from the order to the first token at the target.",
            registry,
            _PREDICTED_S,
            ("path",),
        )
        self._replicas = Gauge("mell_replicas", "Engine replicas by state.", registry, ("state",))
        self._gpu_seconds = Counter("mell_gpu_seconds", "Seconds times replicas that exist.", registry)
        self._free = Histogram(
            "mell_time_to_free_replica_seconds",
            "From the decision to empty a replica until it is gone.",
            registry,
            _FREE_S,
        )

    def expose(self, replica: str) -> tuple[Family, ...]:
        """All of it, as the metrics of that replica of the scheduler."""
        return expose(self._registry, {"replica": replica})

    def migrated(self, record: MigrationRecord) -> None:
        """A migration has ended."""
        path, outcome = str(record.path), record.outcome
        reason = record.reason.split(":")[0].split(";")[0]
        self._migrations.inc(1, path, reason, str(outcome))
        self._bytes.inc(record.bytes)
        if outcome is Outcome.COMMITTED and record.pause_s is not None:
            self._pause.observe(record.pause_s, path)
        if record.predicted_s is not None:
            self._predicted.observe(record.predicted_s, path)

    def epoch(self, loads: Iterable[ReplicaLoad], passed_s: float) -> None:
        """An epoch found those replicas, so many seconds after the last one."""
        states = Counts(load.state for load in loads)
        for state in ReplicaState:
            self._replicas.set(states[state], str(state))
        self._gpu_seconds.inc(passed_s * states.total())

    def freed(self, took_s: float) -> None:
        """A replica is gone that was emptied."""
        self._free.observe(took_s)

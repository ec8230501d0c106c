"""Ray application metrics of the scheduler; Ray adds application, deployment and replica as tags."""

from collections import Counter as Counts
from collections.abc import Iterable

from ray.serve.metrics import Counter, Gauge, Histogram

from migration.record import MigrationRecord, Outcome
from policies.model import ReplicaLoad, ReplicaState

_PAUSES_S = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
_PREDICTED_S = [0.01, 0.03, 0.1, 0.3, 1, 3, 10]
_FREE_S = [0.5, 1, 2, 5, 10, 20, 30, 60, 120]


class Telemetry:
    """What the scheduler counts."""

    def __init__(self) -> None:
        self._migrations = Counter("mell_migrations", "Migrations that ended.", ("path", "reason", "outcome"))
        self._pause = Histogram("mell_migration_pause_seconds", "Pause of a migration.", _PAUSES_S, ("path",))
        self._bytes = Counter("mell_migration_bytes", "KV bytes sent.")
        self._predicted = Histogram(
            "mell_migration_predicted_seconds", "Predicted time of a migration.", _PREDICTED_S, ("path",)
        )
        self._replicas = Gauge("mell_replicas", "Engine replicas by state.", ("state",))
        self._gpu_seconds = Counter("mell_gpu_seconds", "Seconds times replicas that exist.")
        self._free = Histogram(
            "mell_time_to_free_replica_seconds", "From the decision to empty a replica until it is gone.", _FREE_S
        )

    def migrated(self, record: MigrationRecord) -> None:
        """A migration has ended."""
        reason = record.reason.split(":")[0].split(";")[0]
        tags = {"path": str(record.path), "reason": reason, "outcome": str(record.outcome)}
        self._migrations.inc(tags=tags)
        if record.bytes:
            self._bytes.inc(record.bytes)
        if record.outcome is Outcome.COMMITTED and record.pause_s is not None:
            self._pause.observe(record.pause_s, {"path": str(record.path)})
        if record.predicted_s is not None:
            self._predicted.observe(record.predicted_s, {"path": str(record.path)})

    def epoch(self, loads: Iterable[ReplicaLoad], passed_s: float) -> None:
        """An epoch found those replicas, so many seconds after the last one."""
        states = Counts(load.state for load in loads)
        for state in ReplicaState:
            self._replicas.set(states[state], {"state": str(state)})
        if seconds := passed_s * states.total():
            self._gpu_seconds.inc(seconds)

    def freed(self, took_s: float) -> None:
        """A replica is gone that was emptied."""
        self._free.observe(took_s)

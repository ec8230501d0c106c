"""The scheduler's metrics: of each pool migrations, replicas, GPU time, and in mode `observe` the dry run's results; of
all pools the memory that they share.
"""

from collections import Counter as Counts
from collections.abc import Iterable, Mapping
from math import inf, nan

from prometheus_client.core import GaugeMetricFamily, Metric

from deployments.metrics.cache import CACHE_TOKENS, COPIES, COPY_BYTES
from deployments.metrics.exposition import Family, expose
from deployments.metrics.instruments import Counter, Gauge, Histogram, LabelledRegistry
from migration.protocol.record import CopyRecord, MigrationRecord, Outcome
from policies.cost.latencies import NO_TIMES
from policies.decision.level.scaling import ScaleDownBlock, ScaleUp, ScalingReport
from policies.decision.level.service import STATES, ServiceReport
from policies.decision.limits import Mode
from policies.decision.observation import PairPhase
from policies.model import Bytes, PoolId, ReplicaState, Role
from policies.plan import Path
from policies.precedence import DEFAULT_CLASS
from policies.prefix.routing import Matched

_PAUSES_S = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
_MOVES_S = [0.01, 0.03, 0.1, 0.3, 1, 3, 10]
_FREE_S = [0.5, 1, 2, 5, 10, 20, 30, 60, 120]


class Telemetry:
    """The scheduler's metrics of one pool, in a registry of their own. Their label `pool` is the pool's id."""

    def __init__(self, pool: PoolId) -> None:
        registry = self._registry = LabelledRegistry({"pool": pool})
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
            _MOVES_S,
            ("path",),
        )
        self._took = Histogram(
            "mell_migration_seconds",
            "Duration of a migration, from the order to the first token at the target.",
            registry,
            _MOVES_S,
            ("path",),
        )
        self._replicas = Gauge("mell_replicas", "Engine replicas by state.", registry, ("state",))
        self._roles = Gauge("mell_replica_roles", "Running engine replicas by role.", registry, ("role",))
        self._wanted = Gauge("mell_replicas_wanted", "Wanted number of engine replicas.", registry)
        self._gpu_seconds = Counter("mell_gpu_seconds", "Time of all replicas that are not asleep added up.", registry)
        self._free = Histogram(
            "mell_time_to_free_replica_seconds",
            "From the decision to empty a replica to its end.",
            registry,
            _FREE_S,
        )
        self._scaling = Gauge(
            "mell_replicas_reason",
            "1 for the present reason for opening replicas, or for closing none.",
            registry,
            ("decision", "reason"),
        )
        self._cache_tokens = Counter("mell_cache_tokens", CACHE_TOKENS, registry, ("stage",))
        self._copies = Counter("mell_cache_copies", COPIES, registry, ("reason", "outcome"))
        self._copy_bytes = Counter("mell_cache_copy_bytes", COPY_BYTES, registry)
        self._scales = False
        self._pairs: Gauge | None = None
        self._dry_run: _DryRun | None = None
        self._service: _Service | None = None

    def expose(self, replica: str) -> tuple[Family, ...]:
        """All metrics, with `replica`, the scheduler's own id, as a label."""
        return expose(self._registry, {"replica": replica, **self._registry.labels})

    def migrated(self, record: MigrationRecord) -> None:
        """Count a migration that has ended."""
        path, outcome = str(record.path), record.outcome
        self._migrations.inc(1, path, str(record.trigger), str(outcome))
        self._bytes.inc(record.bytes)
        if outcome is Outcome.COMMITTED and record.pause_s is not None:
            self._pause.observe(record.pause_s, path)
        if record.predicted_s is not None:
            self._predicted.observe(record.predicted_s, path)

    def matched(self, matched: Matched) -> None:
        """Count the tokens of an arrival's prompt that are in prefix caches."""
        self._cache_tokens.inc(matched.available, "available")
        self._cache_tokens.inc(matched.predicted, "predicted")

    def copied(self, record: CopyRecord) -> None:
        """Count a copy, made by a replica that stops, that has ended."""
        self._copies.inc(1, str(record.reason), str(record.outcome))
        self._copy_bytes.inc(record.bytes)

    def resumed(self, path: Path, took_s: float) -> None:
        """Observe the first token of a migrated request at its target, `took_s` seconds after the order."""
        self._took.observe(took_s, str(path))

    def epoch(self, states: Iterable[ReplicaState], passed_s: float, wanted: int) -> None:
        """Count an epoch's replicas by their `states`, `passed_s` seconds after the last epoch, and the wanted ones."""
        self._wanted.set(wanted)
        counts = Counts(states)
        for state in ReplicaState:
            self._replicas.set(counts[state], str(state))
        # A replica asleep has its seat in Serve, but neither parameters nor KV on the device.
        self._gpu_seconds.inc(passed_s * (counts.total() - counts[ReplicaState.ASLEEP]))

    def roles(self, roles: Iterable[Role]) -> None:
        """Set the numbers of running replicas by their `roles`."""
        counts = Counts(roles)
        for role in Role:
            self._roles.set(counts[role], str(role))

    def pairs(self, counts: Mapping[PairPhase, int]) -> None:
        """Set the numbers of pairs of replicas by phase. Without a call this metric does not exist."""
        if self._pairs is None:
            self._pairs = Gauge("mell_pairs", "Pairs of replicas by phase.", self._registry, ("phase",))
        for phase, count in counts.items():
            self._pairs.set(count, str(phase))

    def begin_mode(self, mode: Mode) -> None:
        """End the metrics of other modes. The moves of a dry run are added to those of the last one."""
        if mode is not Mode.ACT and self._scales:
            self._set_reasons(None, None)
        if self._dry_run is not None:
            self._dry_run.needed.set(nan)

    def scaling(self, report: ScalingReport) -> None:
        """Set the reasons for the number of replicas."""
        self._scales = True
        self._set_reasons(report.up, report.kept)

    def _set_reasons(self, up: ScaleUp | None, kept: ScaleDownBlock | None) -> None:
        for reason in ScaleUp:
            self._scaling.set(up is reason, "open", reason)
        for block in ScaleDownBlock:
            self._scaling.set(kept is block, "keep", block)

    def freed(self, took_s: float) -> None:
        """Observe the end of an emptied replica, `took_s` seconds after the decision to empty it."""
        self._free.observe(took_s)

    def dry_run(self, replicas_needed: int, moves: int) -> None:
        """Set the needed replicas of a dry run, and count its new moves. Without a call these metrics do not exist."""
        if self._dry_run is None:
            self._dry_run = _DryRun(self._registry)
        self._dry_run.needed.set(replicas_needed)
        self._dry_run.moves.inc(moves)

    def service(self, report: ServiceReport) -> None:
        """Set the metrics of the service level. Without a call these metrics do not exist."""
        if self._service is None:
            self._service = _Service(self._registry)
        self._service.update(report)


def expose_budgets(nodes: Iterable[str], budget: Bytes, replica: str) -> tuple[Family, ...]:
    """The memory of each of the `nodes` for all replicas on it, with `replica`, the scheduler's own id, as a label."""
    return expose(_Budgets(nodes, budget), {"replica": replica})


class _Budgets:
    """A registry of the budgets."""

    def __init__(self, nodes: Iterable[str], budget: Bytes) -> None:
        self._nodes = nodes
        self._budget = budget

    def collect(self) -> Iterable[Metric]:
        budgets = GaugeMetricFamily(
            "mell_memory_budget_bytes", "Memory of a node for all replicas on it.", labels=("node",)
        )
        for node in self._nodes:
            budgets.add_metric((node,), self._budget)
        yield budgets


class _Service:
    """The metrics of a service level."""

    def __init__(self, registry: LabelledRegistry) -> None:
        self._state = Gauge("mell_service_state", "1 for the present state of the service level.", registry, ("state",))
        self._step = Gauge("mell_service_step_seconds", "Longest decoding step of a replica, predicted.", registry)
        self._limit = Gauge("mell_service_step_limit_seconds", "Limit of a decoding step.", registry)
        self._late = Gauge("mell_service_late_replicas", "Replicas on which an arrival would wait too long.", registry)
        self._free = Gauge("mell_service_free_replicas", "Free capacity, in replicas.", registry)
        self._reserve = Gauge("mell_service_reserve_replicas", "Capacity to keep free, in replicas.", registry)
        self._p99 = Gauge(
            "mell_service_p99_seconds",
            "99th percentile of a time: the target, the prediction, and as clients got it.",
            registry,
            ("time", "of"),
        )

    def update(self, report: ServiceReport) -> None:
        for state in STATES:
            self._state.set(state == report.state, state)
        self._step.set(report.slowest_step_s)
        self._limit.set(inf if report.limits is None else report.limits.step_s)
        self._late.set(report.late_replicas)
        self._free.set(report.free_replicas)
        self._reserve.set(report.reserve_replicas)
        reached = report.reached.get(DEFAULT_CLASS, NO_TIMES)
        for source, times in ("target", report.level), ("predicted", report.predicted), ("reached", reached):
            for name, seconds in ("ttft", times.ttft_p99_s), ("itl", times.itl_p99_s):
                self._p99.set(nan if seconds is None else seconds, name, source)


class _DryRun:
    """The metrics of a dry run."""

    def __init__(self, registry: LabelledRegistry) -> None:
        self.needed = Gauge("mell_dry_run_replicas_needed", "Replicas that mode act would need.", registry)
        self.moves = Counter("mell_dry_run_moves", "Moves that mode act would begin.", registry)

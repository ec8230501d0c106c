"""Asks the planner of `migration.paths` which way moves go, with what a cluster monitor would know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.simulator.costs import MigrationCosts, PathChoice
from app.simulator.engine import Engine
from app.simulator.moving import Mover
from app.simulator.steps import StepTimes
from migration.paths import Candidate, Choice, Link, LinkId, Prefill, choose, choose_alone
from policies.model import Bytes, ReplicaId
from policies.plan import Move, Path


@dataclass(frozen=True, slots=True)
class Boundaries:
    """What links and replicas can take in within an epoch of `epoch_s` seconds, under given costs."""

    costs: MigrationCosts
    times: StepTimes
    epoch_s: float

    def paths(
        self, moves: Sequence[Move], engines: Mapping[ReplicaId, Engine], mover: Mover, now: float
    ) -> list[Choice]:
        """A choice for each move."""
        if self.costs.path is not PathChoice.ADAPTIVE:
            always = Path.KV if self.costs.path is PathChoice.KV else Path.TOKENS
            return [Choice(move.request, always, 0.0, 0.0) for move in moves]
        candidates = [self._candidate(move, engines, mover) for move in moves]
        links = {link: self._link(link, mover) for candidate in candidates for link in candidate.links}
        prefills = {move.target: self._prefill(engines[move.target], now) for move in moves}
        return (choose if self.costs.consensus else choose_alone)(candidates, links, prefills)

    def _candidate(self, move: Move, engines: Mapping[ReplicaId, Engine], mover: Mover) -> Candidate:
        size = Bytes(move.tokens * self.costs.kv_bytes)
        route = mover.route(engines[move.source], engines[move.target])
        return Candidate(move.request, move.source, move.target, move.reason, move.tokens, size, route)

    def _link(self, link: LinkId, mover: Mover) -> Link:
        costs = mover.costs_of(link)
        return Link(
            bytes_per_s=costs.bytes_per_s,
            boundary=costs.bytes_per_s * self.costs.time_limit_s,
            backlog=mover.links.backlog(link),
            latency_s=costs.latency_s + self.costs.handover_s,
        )

    def _prefill(self, engine: Engine, now: float) -> Prefill:
        batch, context = engine.batch.size, engine.batch.context(now)
        return Prefill(
            tokens_per_s=self.times.prefill_rate(batch, context),
            boundary=self.times.boundary(batch, context, self.costs.slowdown * self.epoch_s),
            backlog=engine.prefilling(),
            latency_s=self.costs.handover_s,
        )

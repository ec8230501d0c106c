"""Does to replicas and requests what plans say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from app.simulator.boundaries import Boundaries
from app.simulator.live import Live, Stage
from app.simulator.loop import Loop
from app.simulator.moving import Mover
from app.simulator.observer import Outcome, Transfer
from app.simulator.replicas import Replicas
from migration import paths
from policies.cluster.cluster import Cluster
from policies.model import Bytes, ReplicaId, RequestId
from policies.plan import Move, Path, Plan

Choices = Mapping[RequestId, paths.Choice]


class Execution:
    """Carries out one epoch's plans. Without a `mover` requests move at once; `report` is told of such moves, and of
    those that are put off, which the scheduler sees undone.
    """

    def __init__(
        self,
        loop: Loop,
        cluster: Cluster,
        lives: Mapping[RequestId, Live],
        replicas: Replicas,
        mover: Mover | None,
        boundaries: Boundaries | None,
        report: Callable[[Transfer], None],
    ) -> None:
        self._loop = loop
        self._cluster = cluster
        self._lives = lives
        self._replicas = replicas
        self._mover = mover
        self._boundaries = boundaries
        self._report = report

    def carry_out(self, plans: Sequence[Plan]) -> list[Plan]:
        """Begin what the plans say; what is left of them without the moves that are put off."""
        for plan in plans:
            for opening in plan.opened:
                self._replicas.open(opening.replica, opening.node, self._cluster.capacity)
        choices = self._choose([move for plan in plans for move in plan.moves])
        for plan in plans:
            self._begin(plan, choices)
        deferred = {request for request, choice in choices.items() if choice.path is None}
        return [replace(plan, moves=tuple(m for m in plan.moves if m.request not in deferred)) for plan in plans]

    def _choose(self, moves: Sequence[Move]) -> Choices:
        """The path of every move that has a choice: its request holds KV, and moving it costs something."""
        if self._mover is None or self._boundaries is None:
            return {}
        decoding = [move for move in moves if self._lives[move.request].stage is Stage.DECODE]
        choices = self._boundaries.paths(decoding, self._replicas.engines, self._mover, self._loop.now)
        return {choice.request: choice for choice in choices}

    def _begin(self, plan: Plan, choices: Choices) -> None:
        for eviction in plan.evicted:
            self._evict(self._lives[eviction.request], eviction.source)
        for move in plan.moves:
            self._move(self._lives[move.request], move, choices.get(move.request))
        for placement in plan.placements:
            self._replicas.place(self._lives[placement.request], placement.replica)
        for closed in plan.closed:
            self._replicas.close(closed)

    def _evict(self, live: Live, source: ReplicaId) -> None:
        if self._mover:
            self._mover.land(live)
        self._replicas.evict(live, source)

    def _move(self, live: Live, move: Move, choice: paths.Choice | None) -> None:
        """Begin a move, put it off, or do it at once; of a request that has just ended, nothing is left to move."""
        source, target = self._replicas.engines[move.source], self._replicas.engines[move.target]
        if self._mover is None:
            self._replicas.move(live, source, target)
            self._report(self._transfer(move, None, Outcome.MOVED))
        elif live.stage is Stage.OVER:
            return
        elif choice is None:
            self._mover.begin(live, source, target, move.reason, Path.TOKENS)
        elif choice.path is None:
            self._put_off(move)
            self._report(self._transfer(move, choice.sooner, Outcome.DEFERRED))
        else:
            self._mover.begin(live, source, target, move.reason, choice.path, choice.predicted_s)

    def _put_off(self, move: Move) -> None:
        """The scheduler is to see the request where it is, and free to be moved in the next epoch."""
        request = self._cluster.requests[move.request]
        self._cluster.locate(request, request.source)
        self._cluster.rest(move.request, until=0.0)

    def _transfer(self, move: Move, path: Path | None, outcome: Outcome) -> Transfer:
        """A move that took no time, or never began."""
        now = self._loop.now
        source, target = self._node(move.source), self._node(move.target)
        return Transfer(
            path,
            move.tokens,
            Bytes(0),
            began_s=now,
            ended_s=now,
            stall_s=0.0,
            same_node=source == target,
            completed=outcome is Outcome.MOVED,
            outcome=outcome,
            reason=move.reason,
            resumed_s=now if outcome is Outcome.MOVED else None,
        )

    def _node(self, replica: ReplicaId) -> str:
        return self._replicas.engines[replica].node

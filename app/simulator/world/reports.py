"""What the simulated replicas report: the observations that the scheduler decides on.

Replicas would report every request's phase. In the idealised model, where a request that was placed on a replica is
served there, they report none, and a request for one epoch more after its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.simulator.world.batch import NEARLY, Batch
from app.simulator.world.live import Live, Stage
from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.model import Phase, ReplicaId, RequestId, RequestLoad, Tokens
from policies.paths.beliefs import Profile
from policies.plan import MoveReport

PHASES = {
    Stage.NOWHERE: Phase.MOVING,
    Stage.WAITING: Phase.WAITING,
    Stage.PREFILL: Phase.PREFILL,
    Stage.DECODE: Phase.DECODE,
    Stage.FROZEN: Phase.MOVING,
    Stage.OVER: Phase.DECODE,
}
"""A request on a replica that is nowhere has left its engine's queue, to be handed over."""


@dataclass(slots=True)
class Reports:
    """Collects what is new between two observations. With `slots`, the model is the idealised one.

    `changed` are requests of which something else is new than their size, `over` those that have ended.
    """

    pool: Pool
    slots: bool
    statuses: dict[ReplicaId, Status] = field(default_factory=dict)
    profiles: dict[ReplicaId, Profile] = field(default_factory=dict)
    lost: list[ReplicaId] = field(default_factory=list)
    changed: dict[Live, None] = field(default_factory=dict)
    over: list[Live] = field(default_factory=list)
    moves: list[MoveReport] = field(default_factory=list)
    _lingering: list[Live] = field(default_factory=list)

    def take(self, known: dict[RequestId, Live], batches: Iterable[Batch], now: float) -> PoolReport:
        """All of it, with the sizes of the `known` requests, from which those are taken that are over.

        `known` are in the order of their arrival.
        """
        if self.slots:
            departed, self._lingering = self._lingering, self.over
        else:
            departed = self.over
        for live in departed:
            del known[live.id]
            self.changed.pop(live, None)
        sizes = _grown(known.values(), batches, now)
        residents = self._residents(now)
        if not self.slots:
            for resident in residents:
                sizes.pop(resident.load.id, None)
        report = PoolReport(
            self.pool,
            tuple(self.statuses.values()),
            tuple(self.lost),
            residents,
            tuple(live.id for live in sorted(departed, key=lambda live: live.order)),
            sizes,
            tuple(self.moves),
            self.profiles,
        )
        self.statuses, self.profiles, self.lost, self.moves = {}, {}, [], []
        self.changed, self.over = {}, []
        return report

    def _residents(self, now: float) -> tuple[Resident, ...]:
        """The requests of which something is new, the oldest first."""
        residents = []
        for live in sorted(self.changed, key=lambda live: live.order):
            phase = Phase.DECODE if self.slots else PHASES[live.stage]
            standing = (live.at, phase, live.moves)
            if live.standing != standing:
                live.standing = standing
                residents.append(self._resident(live, phase, now))
        return tuple(residents)

    def _resident(self, live: Live, phase: Phase, now: float) -> Resident:
        load = RequestLoad(live.id, "", Tokens(live.told), phase, now - live.job.arrival_s, live.moves)
        return Resident(live.at, load)


def _grown(known: Iterable[Live], batches: Iterable[Batch], now: float) -> dict[RequestId, Tokens]:
    """Every request that holds another number of tokens than was reported last; the one loop over all of them."""
    for batch in batches:
        batch.look(now)
    sizes: dict[RequestId, Tokens] = {}
    for live in known:
        batch_of = live.batch
        tokens = int(live.held + NEARLY) if batch_of is None else int(live.base + batch_of.seen)
        if tokens != live.told:
            sizes[live.id] = live.told = Tokens(tokens)
    return sizes

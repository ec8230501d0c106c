"""The reports of the simulated replicas: the observations that decisions are based on.

In the idealised model, where every placed request runs, replicas report no phases, and they report a request for one
more epoch after its end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.model import Phase, ReplicaId, RequestId, RequestLoad, Tokens
from policies.paths.prices import Profile
from policies.plan import MoveReport
from policies.prefix.change import CacheChange
from simulator.world.batch import NEARLY, Batch
from simulator.world.live import Live, Stage

PHASES = {
    Stage.NOWHERE: Phase.MOVING,
    Stage.WAITING: Phase.WAITING,
    Stage.PREFILL: Phase.PREFILL,
    Stage.DECODE: Phase.DECODE,
    Stage.FROZEN: Phase.MOVING,
    Stage.OVER: Phase.DECODE,
}
"""The reported phases. A request that has a replica and is NOWHERE has left its engine's queue for a hand-over."""


@dataclass(slots=True)
class Reports:
    """Collects the changes between two observations. With `slots`, the model is the idealised one.

    `changed` are the requests with changes other than growth, `over` those that have ended.
    """

    pool: Pool
    slots: bool
    statuses: dict[ReplicaId, Status] = field(default_factory=dict)
    profiles: dict[ReplicaId, Profile] = field(default_factory=dict)
    lost: list[ReplicaId] = field(default_factory=list)
    changed: dict[Live, None] = field(default_factory=dict)
    over: list[Live] = field(default_factory=list)
    moves: list[MoveReport] = field(default_factory=list)
    caches: Mapping[ReplicaId, CacheChange] = field(default_factory=dict)
    _lingering: list[Live] = field(default_factory=list)

    def take(self, lives: dict[RequestId, Live], batches: Iterable[Batch], now: float) -> PoolReport:
        """The changes so far and the sizes of all requests, `lives`, in the order of their arrival.

        Removes the requests that have departed from `lives`, and begins to collect anew.
        """
        if self.slots:
            departed, self._lingering = self._lingering, self.over
        else:
            departed = self.over
        for live in departed:
            del lives[live.id]
            self.changed.pop(live, None)
        sizes = _grown(lives.values(), batches, now)
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
            caches=self.caches,
        )
        self.statuses, self.profiles, self.lost, self.moves = {}, {}, [], []
        self.changed, self.over = {}, []
        return report

    def _residents(self, now: float) -> tuple[Resident, ...]:
        """The requests with a change to report, the oldest first."""
        residents = []
        for live in sorted(self.changed, key=lambda live: live.order):
            phase = Phase.DECODE if self.slots else PHASES[live.stage]
            standing = (live.at, phase, live.moves)
            if live.standing != standing:
                live.standing = standing
                residents.append(self._resident(live, phase, now))
        return tuple(residents)

    def _resident(self, live: Live, phase: Phase, now: float) -> Resident:
        age_s, precedence = now - live.job.arrival_s, live.job.precedence
        load = RequestLoad(live.id, "", Tokens(live.reported), phase, age_s, live.moves, precedence=precedence)
        return Resident(live.at, load)


def _grown(lives: Iterable[Live], batches: Iterable[Batch], now: float) -> dict[RequestId, Tokens]:
    """The sizes that have changed since the last report. This is the one loop over all requests."""
    for batch in batches:
        batch.count(now)
    sizes: dict[RequestId, Tokens] = {}
    for live in lives:
        batch_of = live.batch
        tokens = int(live.held + NEARLY) if batch_of is None else int(live.base + batch_of.counted)
        if tokens != live.reported:
            sizes[live.id] = live.reported = Tokens(tokens)
    return sizes

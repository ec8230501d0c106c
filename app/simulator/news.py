"""What has happened that the scheduler does not know yet."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.simulator.batch import NEARLY, Batch
from app.simulator.live import Live
from policies.cluster.changes import Arrival
from policies.decision.epoch import Events
from policies.model import ReplicaId, RequestId, Tokens


@dataclass(slots=True)
class News:
    """Collected between epochs. With `slots` the scheduler sees a request for one epoch more after its end."""

    slots: bool
    arrived: list[Live] = field(default_factory=list)
    over: list[Live] = field(default_factory=list)
    moved: list[RequestId] = field(default_factory=list)
    stayed: list[RequestId] = field(default_factory=list)
    started: list[ReplicaId] = field(default_factory=list)
    _lingering: list[Live] = field(default_factory=list)

    def take(self, known: dict[RequestId, Live], batches: Iterable[Batch], now: float) -> Events:
        """All of it as events, with the sizes of the `known` requests, from which those are taken that are over.

        `known` are in the order of their arrival.
        """
        if self.slots:
            departed, self._lingering = self._lingering, self.over
        else:
            departed = self.over
        for live in departed:
            del known[live.id]
        events = Events(
            sizes=_grown(known.values(), batches, now),
            departed=[live.id for live in sorted(departed, key=lambda live: live.order)],
            arrived=[Arrival(live.id, live.job.prompt) for live in self.arrived],
            moved=self.moved,
            stayed=self.stayed,
            started=self.started,
        )
        self.arrived, self.over, self.moved, self.stayed, self.started = [], [], [], [], []
        return events


def _grown(known: Iterable[Live], batches: Iterable[Batch], now: float) -> dict[RequestId, Tokens]:
    """Every request that holds another number of tokens than the scheduler knows of; the one loop over all of them."""
    for batch in batches:
        batch.look(now)
    sizes: dict[RequestId, Tokens] = {}
    for live in known:
        batch_of = live.batch
        tokens = int(live.held + NEARLY) if batch_of is None else int(live.base + batch_of.seen)
        if tokens != live.told:
            sizes[live.id] = live.told = Tokens(tokens)
    return sizes

"""The replicas' engines, as they serve: what is put on them, and what comes of it."""

from functools import partial
from typing import Protocol

from app.simulator.costs.steps import StepTimes
from app.simulator.world.batch import NEVER
from app.simulator.world.engine import Memory, Settled, SimulatedEngine
from app.simulator.world.live import Live, Stage
from app.simulator.world.loop import Loop, Timer, Turn
from policies.model import ReplicaId, RequestId, Tokens


class Witness(Protocol):
    """Who is told what happens on engines."""

    def prefilling(self, live: Live) -> None:
        """An engine has begun to prefill a request."""
        ...

    def decoding(self, live: Live) -> None:
        """A request has begun to decode, or begun again."""
        ...

    def over(self, live: Live) -> None:
        """A request has produced its last token."""
        ...

    def preempted(self, live: Live) -> None:
        """An engine has dropped a request's KV; the request waits there."""
        ...

    def refused(self, request: RequestId) -> None:
        """The room that was promised to a request on its way is needed for others."""
        ...


class Replicas:
    """All engines. What changes one calls `touch`, and `settle` when everything is changed that changes at once."""

    def __init__(self, loop: Loop, times: StepTimes, memory: Memory, witness: Witness) -> None:
        self.engines: dict[ReplicaId, SimulatedEngine] = {}
        self._loop = loop
        self._times = times
        self._memory = memory
        self._witness = witness
        self._touched: dict[SimulatedEngine, None] = {}
        self._timers: dict[SimulatedEngine, Timer] = {}

    def open(self, replica: ReplicaId, node: str, capacity: Tokens) -> None:
        """A new replica."""
        self.engines[replica] = SimulatedEngine(replica, node, capacity, self._times, self._memory)

    def close(self, replica: ReplicaId) -> None:
        """A replica goes. Raises `ValueError` if anything is on it."""
        engine = self.engines.pop(replica)
        if engine.running or engine.waiting or engine.reserved or engine.handed:
            raise ValueError(f"{replica} is closed but not empty")
        self._touched.pop(engine, None)
        if timer := self._timers.pop(engine, None):
            timer.cancel()

    def place(self, live: Live, replica: ReplicaId) -> None:
        """A request without KV is to run there."""
        if live.stage is Stage.NOWHERE:
            self.engines[replica].add(live)
            self.touch(self.engines[replica])

    def evict(self, live: Live, replica: ReplicaId) -> None:
        """A request loses its KV, and its place there."""
        if live.stage is not Stage.OVER:
            self.engines[replica].remove(live, self._loop.now)
            live.at = None
            live.preemptions += 1
            self.touch(self.engines[replica])

    def move(self, live: Live, source: SimulatedEngine, target: SimulatedEngine) -> None:
        """A request goes from there to there at once, with all that it has."""
        if live.stage is not Stage.OVER:
            target.take_over(live, source, self._loop.now)
            live.moves += 1
            self.touch(source)
            self.touch(target)

    def touch(self, engine: SimulatedEngine) -> None:
        """The engine has been changed."""
        self._touched[engine] = None

    def settle(self, decided: bool = False) -> None:
        """Bring up to date what has been changed and, when decisions have been carried out, what is full."""
        if decided:
            full = [engine for engine in self.engines.values() if engine.full_s <= self._loop.now]
            self._touched.update(dict.fromkeys(full))
        while self._touched:
            engine = next(iter(self._touched))
            del self._touched[engine]
            self._tell(engine.settle(self._loop.now, decided))
            self._schedule(engine)

    def _tell(self, happened: Settled) -> None:
        for live in happened.prefilling:
            self._witness.prefilling(live)
        for live in happened.decoding:
            self._witness.decoding(live)
        for live in happened.over:
            self._witness.over(live)
        for live in happened.preempted:
            self._witness.preempted(live)
        for request in happened.refused:
            self._witness.refused(request)

    def _schedule(self, engine: SimulatedEngine) -> None:
        if timer := self._timers.pop(engine, None):
            timer.cancel()
        due = engine.due()
        if due < NEVER:
            self._timers[engine] = self._loop.at(due, Turn.ENGINE, partial(self._due, engine))

    def _due(self, engine: SimulatedEngine) -> None:
        del self._timers[engine]
        self.touch(engine)
        self.settle()

"""The engines of all replicas: changes to them, and the events that follow."""

from functools import partial
from typing import Protocol

from policies.model import ReplicaId, RequestId, Tokens
from policies.prefix.change import CacheChange
from simulator.caches.cache import SimulatedCache
from simulator.costs.steps import StepTimes
from simulator.world.batch import NEVER
from simulator.world.crowding import DeviceTime
from simulator.world.engine import Memory, Settled, SimulatedEngine
from simulator.world.live import Live, Stage
from simulator.world.loop import Loop, Timer, Turn


class EngineObserver(Protocol):
    """The world's reactions to the events of engines."""

    def stepped(self, step_s: float, tokens: float) -> None:
        """Decoding requests have got that number of tokens in all, each in a step of that time."""
        ...

    def prefilling(self, live: Live) -> None:
        """An engine has begun to prefill the request."""
        ...

    def filling(self, live: Live) -> None:
        """An engine has computed a part of the request's prefill, and a part is left."""
        ...

    def decoding(self, live: Live) -> None:
        """The request has begun to decode, for the first time or again."""
        ...

    def over(self, live: Live) -> None:
        """The request has generated its last token."""
        ...

    def preempted(self, live: Live) -> None:
        """An engine has dropped the request's KV; the request waits there."""
        ...

    def refused(self, request: RequestId) -> None:
        """An engine has withdrawn the room promised to the request on its way there."""
        ...


class Replicas:
    """All engines. The caller marks each changed engine by `touch`, and calls `settle` after simultaneous changes.

    With `device_time`, engines share it with the other engines of their devices.
    """

    def __init__(
        self,
        loop: Loop,
        times: StepTimes,
        memory: Memory,
        observer: EngineObserver,
        device_time: DeviceTime | None = None,
    ) -> None:
        self.engines: dict[ReplicaId, SimulatedEngine] = {}
        self._loop = loop
        self._times = times
        self._memory = memory
        self._observer = observer
        self._device_time = device_time
        self._touched: dict[SimulatedEngine, None] = {}
        self._timers: dict[SimulatedEngine, Timer] = {}

    def open(
        self, replica: ReplicaId, node: str, capacity: Tokens, cache: SimulatedCache | None = None, device: int = 0
    ) -> None:
        """Add a replica on a device, with a prefix cache if one is given."""
        engine = SimulatedEngine(replica, node, capacity, self._times, self._memory, self._observer.stepped, cache)
        self.engines[replica] = engine
        if self._device_time is not None:
            self._device_time.join(engine, device, self)

    def resize(self, replica: ReplicaId, capacity: Tokens) -> None:
        """Change a replica's capacity."""
        engine = self.engines[replica]
        engine.capacity = capacity
        self.touch(engine)

    def cache_changes(self) -> dict[ReplicaId, CacheChange]:
        """The changes of all prefix caches since the last call."""
        caches = ((replica, engine.cache) for replica, engine in self.engines.items() if engine.cache is not None)
        changes = ((replica, cache.change()) for replica, cache in caches)
        return {replica: change for replica, change in changes if change is not None}

    def close(self, replica: ReplicaId) -> SimulatedEngine:
        """Remove a replica; its engine. Raises `ValueError` if it is not empty."""
        engine = self.engines.pop(replica)
        if not engine.is_empty:
            raise ValueError(f"{replica} is closed but not empty")
        self._touched.pop(engine, None)
        if timer := self._timers.pop(engine, None):
            timer.cancel()
        if self._device_time is not None:
            self._device_time.leave(engine)
        return engine

    def place(self, live: Live, replica: ReplicaId) -> None:
        """Queue a request without KV on a replica."""
        if live.stage is Stage.NOWHERE:
            self.engines[replica].add(live)
            self.touch(self.engines[replica])

    def evict(self, live: Live, replica: ReplicaId) -> None:
        """Remove a request and its KV from a replica."""
        if live.stage is not Stage.OVER:
            self.engines[replica].remove(live, self._loop.now)
            live.at = None
            live.preemptions += 1
            self.touch(self.engines[replica])

    def move(self, live: Live, source: SimulatedEngine, target: SimulatedEngine) -> None:
        """Move a request with its KV instantaneously."""
        if live.stage is not Stage.OVER:
            target.take_over(live, source, self._loop.now)
            live.moves += 1
            self.touch(source)
            self.touch(target)

    def touch(self, engine: SimulatedEngine) -> None:
        """Mark a changed engine, to be settled."""
        self._touched[engine] = None

    def settle(self, decided: bool = False) -> None:
        """Settle all changed engines and, after decisions (`decided`), all full ones."""
        if decided:
            full = [engine for engine in self.engines.values() if engine.full_s <= self._loop.now]
            self._touched.update(dict.fromkeys(full))
        while self._touched:
            engine = next(iter(self._touched))
            del self._touched[engine]
            self._notify(engine.settle(self._loop.now, decided))
            self._schedule(engine)
            if self._device_time is not None:
                self._device_time.settled(engine)
            if engine.lockstep is not None:
                self._touched.update(dict.fromkeys(engine.lockstep.affected(engine)))

    def _notify(self, happened: Settled) -> None:
        for live in happened.prefilling:
            self._observer.prefilling(live)
        for live in happened.filling:
            self._observer.filling(live)
        for live in happened.decoding:
            self._observer.decoding(live)
        for live in happened.over:
            self._observer.over(live)
        for live in happened.preempted:
            self._observer.preempted(live)
        for request in happened.refused:
            self._observer.refused(request)

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

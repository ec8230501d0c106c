"""Two other ways to serve several models on the same devices, with the engines of the simulated world.

    static shares   every model is always awake, with a constant share of a device's KV memory
    swapping        a device has one model at a time, with all of its memory. A request for another model waits until a
                    device is free or idle; else the device with the fewest requests takes no more of them, and swaps
                    once the last one has ended. The first in line comes first, as in llama-swap

Neither moves a request. A router sends each request to the only replica of its model.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from policies.model import PoolId, ReplicaId, RequestId, Tokens
from simulator.costs.steps import StepTimes
from simulator.models.files import BLOCK_TOKENS, PlannedModel
from simulator.outcome.service import ServiceRecorder
from simulator.workload.workload import Job
from simulator.world.crowding import DeviceTime
from simulator.world.engine import Memory
from simulator.world.live import Live
from simulator.world.loop import Loop, Turn
from simulator.world.observer import Life
from simulator.world.replicas import Replicas

REPLICA = ReplicaId("gpu-0")
"""The only replica of a model."""
UNUSED_RATE = 1.0
"""The rate of engines without decode times; all costs here have them."""


class SoleReplica:
    """A model with one replica at most, and the requests that wait for it. `ongoing` counts the requests on it.

    It observes its engine; `ended` is called at the end of each request.
    """

    def __init__(
        self,
        model: PlannedModel,
        loop: Loop,
        device_time: DeviceTime,
        recorder: ServiceRecorder,
        ended: Callable[["SoleReplica"], None],
    ) -> None:
        self.model = model
        self.queue: deque[Live] = deque()
        self.ongoing = 0
        self.running = False
        self._loop = loop
        self._recorder = recorder
        self._ended = ended
        self._times = StepTimes(model.costs.compute, UNUSED_RATE)
        memory = Memory.STRICT if model.costs.preemption else Memory.UNBOUNDED
        self._replicas = Replicas(loop, self._times, memory, self, device_time)
        self._arrived = 0

    def await_jobs(self, jobs: Sequence[Job], arrived: Callable[["SoleReplica"], None]) -> None:
        """Queue requests at their arrival, and call `arrived` after each."""
        for job in jobs:
            self._loop.at(job.arrival_s + self.model.costs.ingress_s, Turn.ARRIVAL, partial(self._take, job, arrived))

    def open(self, device: int, capacity: Tokens, seconds: float = 0.0) -> None:
        """Begin a replica on a device, which runs after that time."""
        self._replicas.open(REPLICA, f"node-{device}", capacity, device=device)
        if seconds:
            self._loop.at(self._loop.now + seconds, Turn.START, self._run)
        else:
            self.running = True

    def close(self) -> None:
        """End the replica, which has no requests."""
        self._replicas.close(REPLICA)
        self.running = False

    def send(self) -> None:
        """Send all waiting requests to the replica, if it runs."""
        while self.running and self.queue:
            self.ongoing += 1
            self._replicas.place(self.queue.popleft(), REPLICA)
        self._replicas.settle()

    # --- events of the engine -------------------------------------------------------------------------

    def stepped(self, step_s: float, tokens: float) -> None:
        """See `EngineObserver`."""
        self._recorder.stepped(self._loop.now, step_s, tokens)

    def prefilling(self, live: Live) -> None:
        """See `EngineObserver`."""

    def filling(self, live: Live) -> None:
        """See `EngineObserver`."""

    def decoding(self, live: Live) -> None:
        """See `EngineObserver`."""

    def over(self, live: Live) -> None:
        """See `EngineObserver`."""
        self.ongoing -= 1
        alone = self._times.alone(live.job.prompt, live.job.output, self.model.costs.ingress_s)
        life: Life = live.life(self._loop.now, alone)
        self._recorder.finished(self._loop.now, life)
        self._ended(self)

    def preempted(self, live: Live) -> None:
        """See `EngineObserver`."""
        self._recorder.preempted(self._loop.now, live.need)

    def refused(self, request: RequestId) -> None:
        """See `EngineObserver`. No room is promised where no request moves."""

    def _run(self) -> None:
        self.running = True
        self.send()

    def _take(self, job: Job, arrived: Callable[["SoleReplica"], None]) -> None:
        self.queue.append(Live(job, self._arrived))
        self._arrived += 1
        arrived(self)


def static_devices(
    models: Sequence[PlannedModel], work: Mapping[PoolId, float], count: int, budget: int
) -> list[list[PlannedModel]] | None:
    """The models of each of `count` devices: those with the most work first, each to the device with the least work.

    `work` is that of the whole trace, known in advance. None if they do not fit.
    """
    devices: list[list[PlannedModel]] = [[] for _ in range(count)]
    room, load = [budget] * count, [0.0] * count
    for model in sorted(models, key=lambda model: (-work[model.pool], model.pool)):
        fitting = [device for device in range(count) if room[device] >= model.memory.least]
        if not fitting:
            return None
        device = min(fitting, key=lambda device: (load[device], device))
        devices[device].append(model)
        room[device] -= model.memory.least
        load[device] += work[model.pool]
    return devices


def play_static(
    devices: Sequence[Sequence[PlannedModel]],
    budget: int,
    jobs: Mapping[PoolId, Sequence[Job]],
    recorders: Mapping[PoolId, ServiceRecorder],
    until_s: float,
) -> None:
    """Serve the jobs with every model awake on its device; the rest of KV memory is shared by weight."""
    loop = Loop()
    device_time = DeviceTime(loop)
    for device, models in enumerate(devices):
        rest, weights = budget - sum(model.memory.least for model in models), sum(m.entry.weight for m in models)
        for model in models:
            own = model.memory.least + int(rest * model.entry.weight / weights)
            served = SoleReplica(model, loop, device_time, recorders[model.pool], lambda ended: None)
            served.open(device, Tokens(BLOCK_TOKENS * model.memory.blocks_in(own)))
            served.await_jobs(jobs[model.pool], SoleReplica.send)
    loop.run(until_s)


@dataclass(slots=True)
class SwapSlot:
    """A device of the swapping: its model, whether this takes no more requests, and since when it has been idle."""

    served: SoleReplica | None = None
    leaving: bool = False
    idle_since: float = 0.0


class SwappingDevices:
    """`count` devices, each with one model at a time. With `asleep`, the other models sleep on all devices."""

    def __init__(
        self,
        models: Sequence[PlannedModel],
        count: int,
        asleep: bool,
        recorders: Mapping[PoolId, ServiceRecorder],
    ) -> None:
        self.swaps = 0
        self._loop = Loop()
        self._asleep = asleep
        self._sleeping = sum(model.memory.asleep for model in models) if asleep else 0
        device_time = DeviceTime(self._loop)
        self._served = [SoleReplica(m, self._loop, device_time, recorders[m.pool], self._ended) for m in models]
        self._slots = [SwapSlot() for _ in range(count)]
        self._line: dict[SoleReplica, None] = {}

    def run(self, jobs: Mapping[PoolId, Sequence[Job]], budget: int, until_s: float) -> None:
        """Serve the jobs, on devices with `budget` bytes."""
        self._budget = budget
        for served in self._served:
            served.await_jobs(jobs[served.model.pool], self._arrived)
        self._loop.run(until_s)

    def _arrived(self, served: SoleReplica) -> None:
        slot = self._slot_of(served)
        if slot is not None and not slot.leaving:
            served.send()
        else:
            self._line[served] = None
            self._swap()

    def _ended(self, served: SoleReplica) -> None:
        slot = self._slot_of(served)
        assert slot is not None, "a request ends on a device"
        slot.idle_since = self._loop.now
        if not served.ongoing and self._line:
            # After the other events of this time: the engine is not empty before.
            self._loop.at(self._loop.now, Turn.START, self._swap)

    def _swap(self) -> None:
        """Give devices to the models in line, as far as some are free or idle; have others empty themselves."""
        waiting = [served for served in self._line if self._slot_of(served) is None]
        while waiting and (idle := [slot for slot in self._slots if self._is_idle(slot)]):
            served = waiting.pop(0)
            del self._line[served]
            self._load(min(idle, key=lambda slot: (slot.served is not None, slot.idle_since)), served)
            waiting = [served for served in self._line if self._slot_of(served) is None]
        leaving = [slot for slot in self._slots if slot.leaving]
        staying = [s for s in self._slots if s.served is not None and s.served.running and not s.leaving]
        for slot in sorted(staying, key=_ongoing)[: max(0, len(waiting) - len(leaving))]:
            slot.leaving = True
        for slot in sorted(leaving, key=_ongoing, reverse=True)[: max(0, len(leaving) - len(waiting))]:
            slot.leaving = False
            if slot.served is not None:
                self._line.pop(slot.served, None)
                slot.served.send()

    def _load(self, slot: SwapSlot, served: SoleReplica) -> None:
        if slot.served is not None:
            slot.served.close()
            if slot.served.queue:
                self._line[slot.served] = None
        slot.served, slot.leaving = served, False
        self.swaps += 1
        memory = served.model.memory
        own = self._budget - (self._sleeping - memory.asleep if self._asleep else 0)
        seconds = served.model.entry.wake_s if self._asleep else served.model.startup_s
        served.open(self._slots.index(slot), Tokens(BLOCK_TOKENS * memory.blocks_in(own)), seconds)

    def _slot_of(self, served: SoleReplica) -> SwapSlot | None:
        return next((slot for slot in self._slots if slot.served is served), None)

    @staticmethod
    def _is_idle(slot: SwapSlot) -> bool:
        served = slot.served
        return served is None or (served.running and not served.ongoing and (slot.leaving or not served.queue))


def _ongoing(slot: SwapSlot) -> int:
    return 0 if slot.served is None else slot.served.ongoing

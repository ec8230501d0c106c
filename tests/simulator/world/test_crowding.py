"""Engines that share the time of a device."""

from dataclasses import dataclass, field

import pytest

from policies.model import ReplicaId, RequestId, Tokens
from simulator.costs.steps import StepTimes
from simulator.world.crowding import DeviceTime
from simulator.world.engine import Memory
from simulator.world.live import Live
from simulator.world.loop import Loop, Turn
from simulator.world.replicas import Replicas
from tests.simulator.physics import COMPUTE, live

REPLICA = ReplicaId("gpu-0")


@dataclass(slots=True)
class Ends:
    """Keeps when requests end, in seconds."""

    loop: Loop
    over_s: dict[str, float] = field(default_factory=dict)

    def stepped(self, step_s: float, tokens: float) -> None: ...

    def prefilling(self, live: Live) -> None: ...

    def filling(self, live: Live) -> None: ...

    def decoding(self, live: Live) -> None: ...

    def preempted(self, live: Live) -> None: ...

    def refused(self, request: RequestId) -> None: ...

    def over(self, live: Live) -> None:
        self.over_s[live.id] = self.loop.now


def ends(*requests: tuple[int, float, int]) -> list[float]:
    """When requests end that an engine each gets: on which device, at which second, and with how long an output."""
    loop = Loop()
    log, time = Ends(loop), DeviceTime(loop)
    for number, (device, at_s, output) in enumerate(requests):
        engines = Replicas(loop, StepTimes(COMPUTE, 1.0), Memory.STRICT, log, time)
        engines.open(REPLICA, "node-0", Tokens(1000), device=device)

        def come(engines: Replicas = engines, name: str = f"q{number}", output: int = output) -> None:
            engines.place(live(name, 100, output), REPLICA)
            engines.settle()

        loop.at(at_s, Turn.ARRIVAL, come)
    loop.run(100.0)
    return [log.over_s[f"q{number}"] for number in range(len(requests))]


def test_engines_at_work_on_a_device_take_turns() -> None:
    assert ends((0, 0.0, 200)) == pytest.approx([2.0])
    assert ends((0, 0.0, 200), (0, 0.0, 200)) == pytest.approx([4.0, 4.0], abs=0.05)
    assert ends((0, 0.0, 200), (1, 0.0, 200)) == pytest.approx([2.0, 2.0])


def test_the_pace_changes_when_a_neighbour_begins_and_ends() -> None:
    # Alone for a second, for two seconds with the neighbour, which needs one alone, and alone again.
    first, second = ends((0, 0.0, 300), (0, 1.0, 100))
    assert (first, second) == pytest.approx((4.0, 3.0), abs=0.05)
    assert ends((0, 0.0, 300), (0, 3.5, 100)) == pytest.approx([3.0, 4.5], abs=0.05)

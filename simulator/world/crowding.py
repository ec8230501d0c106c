"""The time of devices with several engines: those at work share it equally, and none gains by running with others.

That is the conservative assumption: processes on a GPU take turns, and decoding is bound by reading each model's own
parameters. An engine's step takes the pace that holds at its beginning; decoding without prefills follows at once.
"""

from collections import defaultdict
from functools import partial
from typing import Protocol

from simulator.world.engine import SimulatedEngine
from simulator.world.loop import Loop, Turn


class EngineGroup(Protocol):
    """The engines of a pool, which are settled after changes."""

    def touch(self, engine: SimulatedEngine) -> None:
        """Mark a changed engine."""
        ...

    def settle(self, decided: bool = False) -> None:
        """Settle all changed engines."""
        ...


class DeviceTime:
    """Slows engines down by the number of engines at work on their device."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._homes: dict[SimulatedEngine, tuple[int, EngineGroup]] = {}
        self._at_work: defaultdict[int, dict[SimulatedEngine, None]] = defaultdict(dict)

    def join(self, engine: SimulatedEngine, device: int, group: EngineGroup) -> None:
        """Add an engine to a device."""
        self._homes[engine] = device, group

    def leave(self, engine: SimulatedEngine) -> None:
        """Remove an engine, if it is on a device."""
        home = self._homes.pop(engine, None)
        if home is not None and self._at_work[home[0]].pop(engine, self) is None:
            self._share_anew(home[0])

    def settled(self, engine: SimulatedEngine) -> None:
        """Note if an engine that was settled is at work."""
        home = self._homes.get(engine)
        if home is None or (engine in self._at_work[home[0]]) == engine.is_at_work:
            return
        if engine.is_at_work:
            self._at_work[home[0]][engine] = None
        else:
            del self._at_work[home[0]][engine]
        self._share_anew(home[0])

    def _share_anew(self, device: int) -> None:
        """Set the pace of a device's engines, after the other changes of this time."""
        self._loop.at(self._loop.now, Turn.ENGINE, partial(self._pace, device))

    def _pace(self, device: int) -> None:
        engines = self._at_work[device]
        groups: dict[int, EngineGroup] = {}
        for engine in engines:
            if engine.slowdown != len(engines):
                engine.slow_down(float(len(engines)), self._loop.now)
                group = self._homes[engine][1]
                group.touch(engine)
                groups[id(group)] = group
        for group in groups.values():
            group.settle()

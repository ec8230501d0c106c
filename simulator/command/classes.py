"""The service classes of a command line: `chat:rank=1,share=0.3,itl_p99=50`."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from policies.cost.service import ReplicaSpeed, ServiceLevel, unreachable
from policies.precedence import DEFAULT_CLASS, ServiceClass, ServiceClasses
from simulator.errors import BadInput

_SETTINGS = ("rank", "share", "ttft_p99", "itl_p99")


class SimulatedClass(NamedTuple):
    """A service class, and its share of the requests."""

    name: str
    service_class: ServiceClass
    share: float


def read_classes(specs: Sequence[str], speed: ReplicaSpeed | None) -> tuple[SimulatedClass, ...]:
    """The classes. Raises `BadInput` for an invalid one, or a level that no replica of this `speed` meets."""
    classes = tuple(_read(spec, speed) for spec in specs)
    names = [each.name for each in classes]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"--class {doubled[0]} is given twice.")
    if sum(each.share for each in classes) > 1 + 1e-9:
        raise BadInput("The shares of the classes add up to more than 1.")
    return classes


def recorded_classes(classes: ServiceClasses) -> tuple[SimulatedClass, ...]:
    """The classes of a recording, whose requests name theirs."""
    return tuple(SimulatedClass(name, each, 0.0) for name, each in classes.by_name.items())


def require_known(found: Collection[str], classes: Sequence[SimulatedClass]) -> None:
    """Raise `BadInput` if a trace has a class that is not given."""
    known = [DEFAULT_CLASS, *(each.name for each in classes)]
    if others := sorted(set(found) - {"", *known}):
        raise BadInput(f"The trace has the class {others[0]}: give --class {others[0]}:rank=N.")


def _read(spec: str, speed: ReplicaSpeed | None) -> SimulatedClass:
    name, _, settings = spec.partition(":")
    values = dict.fromkeys(_SETTINGS, math.nan)
    for setting in filter(None, settings.split(",")):
        key, _, text = setting.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.inf
        if key not in values or not math.isfinite(value) or (key != "rank" and value < 0):
            raise BadInput(f"--class {spec}: {setting!r} is none of rank=N, share=X, ttft_p99=S and itl_p99=MS.")
        values[key] = value
    rank, share, ttft_s, itl_ms = (None if math.isnan(value) else value for value in values.values())
    level = _level(spec, name, ttft_s, itl_ms, speed)
    if not name or (rank or 0) != int(rank or 0):
        raise BadInput(f"--class {spec}: write NAME:rank=N with a whole number.")
    return SimulatedClass(name, ServiceClass(int(rank or 0), level), share or 0.0)


def _level(
    spec: str, name: str, ttft_s: float | None, itl_ms: float | None, speed: ReplicaSpeed | None
) -> ServiceLevel | None:
    if ttft_s is None and itl_ms is None:
        return None
    if name == DEFAULT_CLASS:
        raise BadInput(f"--class {spec}: the level of this class is --ttft-p99 and --itl-p99.")
    if speed is None:
        raise BadInput(f"--class {spec}: a level needs --costs with the times of decoding and of prefills.")
    level = ServiceLevel(ttft_s, None if itl_ms is None else itl_ms / 1e3)
    if reasons := unreachable(level, speed):
        raise BadInput(f"--class {spec}: its level cannot be met: {'; '.join(reasons)}.")
    return level

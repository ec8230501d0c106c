"""The fewest devices with which each contender keeps the level."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from simulator.models.cases import ON_OWN_DEVICES, SharingCase, SharingContender
from simulator.models.outcome import SharedOutcome

Perform = Callable[[SharingCase, int], SharedOutcome | None]
"""A run of a case on a number of devices; None if the models do not fit."""
Keeps = Callable[[SharedOutcome], bool]


STEP = 0.7


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """A case at the fewest devices that keep the level; if it is not kept, at the most that were allowed."""

    case: SharingCase
    devices: int
    outcome: SharedOutcome
    kept: bool


def best_cases(cases: Iterable[SharingCase], most: int, perform: Perform, keeps: Keeps) -> list[FoundDevices]:
    """The best setting of every contender that fits at all: the one with the fewest GPU-seconds at the level.

    If none keeps it, the one with the fewest late requests.
    """
    by_contender: dict[SharingContender, list[SharingCase]] = {}
    for case in cases:
        by_contender.setdefault(case.contender, []).append(case)
    found = []
    for contender, settings in by_contender.items():
        own = contender in ON_OWN_DEVICES
        tried = _own(settings, most, perform, keeps) if own else _shared(settings, most, perform, keeps)
        if tried:
            found.append(min(tried, key=_order))
    return found


def fewest_devices(
    most: int, run: Callable[[int], SharedOutcome | None], keeps: Keeps
) -> tuple[int, SharedOutcome] | None:
    """The fewest devices, up to `most`, with which a run keeps the level; None if `most` do not.

    More devices are taken to be no worse. Steps down to `STEP` of the devices, until the level is missed, come before a
    bisection: runs with far too few devices take long, since all requests wait.
    """
    outcome = run(most)
    if outcome is None or not keeps(outcome):
        return None
    missed, best = 0, (most, outcome)
    while best[0] - missed > 1:
        middle = (missed + best[0]) // 2 if missed else max(1, int(STEP * best[0]))
        outcome = run(middle)
        if outcome is not None and keeps(outcome):
            best = middle, outcome
        else:
            missed = middle
    return best


def _own(settings: Sequence[SharingCase], most: int, perform: Perform, keeps: Keeps) -> list[FoundDevices]:
    """All settings of a contender whose number of devices follows from the workload."""
    outcomes = ((case, perform(case, most)) for case in settings)
    return [FoundDevices(case, most, each, keeps(each)) for case, each in outcomes if each is not None]


def _shared(settings: Sequence[SharingCase], most: int, perform: Perform, keeps: Keeps) -> list[FoundDevices]:
    """The fewest devices of the first setting, and of others those that need fewer than the ones before them."""
    found: list[FoundDevices] = []
    for case in settings:
        kept = [each.devices for each in found if each.kept]
        bound = min(kept) - 1 if kept else most
        best = fewest_devices(bound, partial(perform, case), keeps) if bound else None
        if best is not None:
            found.append(FoundDevices(case, *best, kept=True))
        elif not kept and (outcome := perform(case, most)) is not None:
            found.append(FoundDevices(case, most, outcome, kept=False))
    return found


def _order(found: FoundDevices) -> tuple[bool, float, float]:
    """A sort key: the best has the lowest one."""
    late = found.outcome.whole.late if not found.kept else 0
    return not found.kept, late, found.outcome.gpu_seconds

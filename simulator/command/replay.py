"""Replays the recording of a live scheduler: the same observations must give the same plans."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from policies.decision.deciding import SchedulerMemory, decide_in_slices, order_by_hand, place
from policies.decision.disaggregation.roles import set_role
from policies.decision.recording import Entry, Epoch, LevelsOrdered, ModeOrdered, Ordered, PlacedCall, RoleOrdered
from policies.decision.slices import finish
from simulator.errors import BadInput
from simulator.workload.recording import read_recording


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay. `moves`, `opened` and `closed` are counts over the recorded plans; `different` are the
    numbers, from 1, of the epochs whose plans differ from the recorded ones.
    """

    policy: str
    epochs: int
    moves: int
    opened: int
    closed: int
    different: tuple[int, ...]


def replay(path: Path) -> Replay:
    """Decide every epoch of a recording again. Raises `BadInput` if the recording cannot be read."""
    try:
        terms, epochs = read_recording(path)
        played = list(play(SchedulerMemory(terms), epochs))
    except (OSError, ValueError) as error:
        raise BadInput(f"--recording: {error}") from None
    plans = [plan for epoch, _ in played for pool in epoch.plans.values() for plan in pool]
    return Replay(
        terms.policy,
        len(played),
        sum(len(plan.moves) for plan in plans),
        sum(len(plan.opened) for plan in plans),
        sum(len(plan.closed) for plan in plans),
        tuple(number for number, (_, same) in enumerate(played, 1) if not same),
    )


def play(memory: SchedulerMemory, epochs: Iterator[Epoch]) -> Iterator[tuple[Epoch, bool]]:
    """Every epoch, and True if its plans and its division of memory are the recorded ones."""
    for epoch in epochs:
        slices, done = decide_in_slices(memory, epoch.seen), 0
        for entry in epoch.entries:
            while done < entry.slices:
                next(slices)
                done += 1
            _enter(memory, entry)
        plans = finish(slices)
        yield epoch, (plans, memory.division.newest) == (dict(epoch.plans), epoch.division)


def _enter(memory: SchedulerMemory, entry: Entry) -> None:
    """Have the decision take an entry again."""
    match entry:
        case PlacedCall():
            pool = memory.pool(entry.pool)
            place(pool, entry.arrival, entry.at, entry.exclude, entry.label, entry.submitted)
        case Ordered():
            order_by_hand(memory.pool(entry.pool), entry.move, entry.at)
        case RoleOrdered():
            set_role(memory.pool(entry.pool), entry.replica, entry.role)
        case ModeOrdered():
            memory.set_mode(entry.mode)
        case LevelsOrdered():
            memory.pool(entry.pool).set_levels(entry.levels)
        case _:
            assert_never(entry)


def render_replay(outcome: Replay) -> str:
    """The result as text to print."""
    same = outcome.epochs - len(outcome.different)
    lines = [
        f"policy {outcome.policy}, {outcome.epochs} epochs: {outcome.moves} moves planned, {outcome.opened} replicas "
        f"opened, {outcome.closed} closed",
        f"{same} of {outcome.epochs} plans are the recorded ones",
    ]
    if outcome.different:
        lines.append(f"different: epochs {', '.join(map(str, outcome.different[:10]))}")
    return "\n".join(lines)

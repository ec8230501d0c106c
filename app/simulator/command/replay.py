"""Decides the recorded epochs of a live scheduler again: the same observations have to give the same plans."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.simulator.errors import BadInput
from deployments.scheduler.recording import Epoch, PlacedCall, read_recording
from policies.decision.deciding import SchedulerMemory, decide, order_by_hand, place


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it. `moves`, `opened` and `closed` count what the recorded plans did; `different` has the numbers of
    epochs, from 1, whose plans are not the ones that were recorded.
    """

    policy: str
    epochs: int
    moves: int
    opened: int
    closed: int
    different: tuple[int, ...]


def replay(path: Path) -> Replay:
    """Decide every epoch of a recording anew. Raises `BadInput` if it cannot be read."""
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
    """Every epoch, and whether it is decided as it was recorded."""
    for epoch in epochs:
        for entry in epoch.entries:
            if isinstance(entry, PlacedCall):
                place(memory.pool(), entry.arrival, entry.at, entry.exclude, entry.label)
            else:
                order_by_hand(memory.pool(), entry.move, entry.at)
        yield epoch, decide(memory, epoch.seen) == dict(epoch.plans)


def render_replay(outcome: Replay) -> str:
    """A few lines for people."""
    same = outcome.epochs - len(outcome.different)
    lines = [
        f"policy {outcome.policy}, {outcome.epochs} epochs: {outcome.moves} moves planned, {outcome.opened} replicas "
        f"opened, {outcome.closed} closed",
        f"{same} of {outcome.epochs} plans are the recorded ones",
    ]
    if outcome.different:
        lines.append(f"different: epochs {', '.join(map(str, outcome.different[:10]))}")
    return "\n".join(lines)

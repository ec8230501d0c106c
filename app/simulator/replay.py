"""Plays a recording of live epochs through the planner again: the same observations have to give the same plans."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.simulator.errors import BadInput
from deployments.recording import Epoch, read_recording
from policies.decision.planner import Decided, Planner
from policies.rules.registry import policy


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it. `moves`, `opened` and `closed` count what the recorded plans did; `different` has the numbers of
    epochs, from 1, whose plan is not the one that was recorded.
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
        setting, epochs = read_recording(path)
        planner = Planner(policy(setting.policy), setting.limits, setting.epoch_s)
        played = list(_play(planner, epochs))
    except (OSError, ValueError) as error:
        raise BadInput(f"--recording: {error}") from None
    return Replay(
        setting.policy,
        len(played),
        sum(len(epoch.plan.moves) for epoch, _ in played),
        sum(len(epoch.plan.opened) for epoch, _ in played),
        sum(len(epoch.plan.closed) for epoch, _ in played),
        tuple(number for number, (_, same) in enumerate(played, 1) if not same),
    )


def _play(planner: Planner, epochs: Iterator[Epoch]) -> Iterator[tuple[Epoch, bool]]:
    for epoch in epochs:
        planner.observe(epoch.seen)
        decided = planner.decide(epoch.mode)
        planner.put_off(epoch.put_off)
        yield epoch, decided == Decided(epoch.plan, epoch.orders)


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

"""The slowdown of other requests on both replicas by a migration: their gaps during it over their gaps without one."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.instruments.admin import Admin, OpenedStream
from benchmarks.instruments.moved import MoveMode, MoveSample, move_one
from benchmarks.load import TimedStream, percentile

PROMPT, OUTPUT = 32, 4000
"""Tokens of a background stream, long enough to outlast its round."""
MARGIN_S = 0.03
"""Added before and after the migration's time, for its messages, and since a gap counts by its end."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Gaps (s) of one replica's background streams: during a migration, and while the same stream ran unmoved."""

    mode: str
    role: str
    during: list[float]
    quiet: list[float]


async def disturb(
    admin: Admin, port: int, modes: Sequence[MoveMode], per_replica: int, context: int, output: int, name: str
) -> tuple[list[MoveSample], list[Effect]]:
    """Run one round: background streams on both replicas, and beside them one moved stream of each mode.

    Raises:
        RuntimeError: a background stream ended before its round, or could not be moved.
    """
    others = [OpenedStream(port, f"{name}/beside/{i}", PROMPT, OUTPUT) for i in range(2 * per_replica)]
    samples: list[MoveSample] = []
    effects: list[Effect] = []
    try:
        for opened in others:
            await opened.reached(2)
        placed = await _spread(admin, others)
        for mode in modes:
            sample, stream = await move_one(admin, port, mode, context, output, f"{name}/{mode.name}")
            samples.append(sample)
            for role in ("source", "target"):
                streams = [opened.stream for opened in placed[sample.record[role]]]
                effects.append(_effect(sample, stream, role, streams))
    finally:
        running = [await opened.leave() for opened in others]
    if not all(running):
        raise RuntimeError("a background stream ended before its round")
    return samples, effects


async def _spread(admin: Admin, others: Sequence[OpenedStream]) -> Mapping[str, list[OpenedStream]]:
    """Move half of the streams to the other replica, since the scheduler packs them; return the streams by replica."""
    hosts = await admin.hosts({opened.label for opened in others})
    placed = {replica: [o for o in others if hosts[o.label] == replica] for replica in await admin.replicas()}
    empty, full = sorted(placed, key=lambda replica: len(placed[replica]))
    while len(placed[full]) > len(placed[empty]):
        opened = placed[full].pop()
        record = await admin.record(await admin.move(opened.label, "kv", empty))
        if record["outcome"] != "committed":
            raise RuntimeError(f"a background stream could not be moved: {record}")
        placed[empty].append(opened)
    return placed


def _effect(sample: MoveSample, moved: TimedStream, role: str, streams: Sequence[TimedStream]) -> Effect:
    """Sort gaps by their end: during the migration, or while the moved stream ran without one."""
    record = sample.record
    first = record["started_at"] - MARGIN_S
    last = max(record["started_at"] + record["duration_s"], sample.resumed_at) + MARGIN_S
    own = moved.spans()
    during: list[float] = []
    quiet: list[float] = []
    for began, ended in (span for stream in streams for span in stream.spans()):
        if first <= ended <= last:
            during.append(ended - began)
        elif own[0][1] <= ended <= own[-1][1]:
            quiet.append(ended - began)
    return Effect(sample.mode, role, during, quiet)


def print_effects(effects: Sequence[Effect], per_replica: int, context: int) -> None:
    """Print the ratios of gaps during migrations to gaps without, by mode and by replica."""
    print(f"\n{per_replica} background streams per replica beside a moved one of {context} tokens: gaps between chunks")
    print(f"within {MARGIN_S} s of a migration / gaps while the same stream ran unmoved")
    print(f"{'':24}{'rounds':>7}{'gaps':>7}{'median':>9} [by round]    {'p99':>9}   quiet: median, p99 (ms)")
    for mode, role in dict.fromkeys((effect.mode, effect.role) for effect in effects):
        chosen = [e for e in effects if (e.mode, e.role) == (mode, role) and e.during and e.quiet]
        if not chosen:
            continue
        during, quiet = ([gap for e in chosen for gap in getattr(e, side)] for side in ("during", "quiet"))
        rounds = [statistics.median(e.during) / statistics.median(e.quiet) for e in chosen]
        median, p99 = statistics.median(quiet), percentile(quiet, 0.99)
        print(
            f"{mode:14}on {role:7}{len(chosen):7}{len(during):7}{statistics.median(during) / median:9.2f} "
            f"[{min(rounds):.2f}, {max(rounds):.2f}]{percentile(during, 0.99) / p99:11.2f}   "
            f"{median * 1e3:.1f}, {p99 * 1e3:.1f}"
        )

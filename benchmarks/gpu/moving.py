"""Steps that move streams: the pause and the copying against the context, and the effect on neighbours."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from app.client.errors import ClientError
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.record import MovesRow, NeighbourRow, Spread
from benchmarks.instruments.admin import Admin
from benchmarks.instruments.beside import Effect, disturb
from benchmarks.instruments.moved import MODES, MoveMode, MoveSample, move_one
from benchmarks.load import percentile
from migration.protocol.sizing import MIB

FAILED = (RuntimeError, TimeoutError, ClientError)
KEPT_FAILURES = 3


def modes_of(names: Iterable[str]) -> list[MoveMode]:
    """The modes of these names."""
    return [mode for mode in MODES if mode.name in names]


@dataclass(slots=True)
class MovedCell:
    """The moves of one mode and context: samples as ordered, and reasons of all other ones."""

    samples: list[MoveSample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Spread]:
        """The figures of the samples."""
        records = [sample.record for sample in self.samples]
        copied = [r for r in records if r["bytes"] and r["copy_s"]]
        found = {
            "client_ms": Spread.of(sample.pause_s * 1e3 for sample in self.samples),
            "handed_ms": Spread.of(s.handed_s * 1e3 for s in self.samples if s.handed_s is not None),
            "gaps": Spread.of(sample.multiple for sample in self.samples),
            "gap_ms": Spread.of(sample.gap_s * 1e3 for sample in self.samples),
            "source_ms": Spread.of(r["pause_s"] * 1e3 for r in records),
            "resume_ms": Spread.of(r["resume_s"] * 1e3 for r in records if r["resume_s"] is not None),
            "whole_ms": Spread.of(r["duration_s"] * 1e3 for r in records),
            "copy_ms": Spread.of(r["copy_s"] * 1e3 for r in copied),
            "mib": Spread.of(r["bytes"] / MIB for r in copied),
            "gb_s": Spread.of(r["bytes"] / r["copy_s"] / 1e9 for r in copied),
            "rounds": Spread.of(r["rounds"] for r in copied),
        }
        return {name: figure for name, figure in found.items() if figure is not None}


@dataclass(frozen=True, slots=True)
class MeasureMoves:
    """Move one stream at a time: `repeat` turns over all contexts and modes, of streams with `output` tokens."""

    contexts: Sequence[int]
    modes: Sequence[str] = ("pre-copy", "tokens")
    repeat: int = 5
    output: int = 400
    weight: float = 1.0

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        modes = modes_of(self.modes)
        cells = {(context, mode.name): MovedCell() for context in self.contexts for mode in modes}
        try:
            async with Admin(bench.mell_port) as admin:
                for mode in modes:
                    await self._move(admin, bench, mode, self.contexts[0], "warm", MovedCell())
                for turn in bench.time.turns(self.repeat):
                    for context in self.contexts:
                        for mode in modes:
                            cell = cells[context, mode.name]
                            await self._move(admin, bench, mode, context, f"{context}/{turn}", cell)
        finally:
            for (context, name), cell in cells.items():
                asked = len(cell.samples) + len(cell.failures)
                if asked:
                    failures = cell.failures[:KEPT_FAILURES]
                    row = (bench.conditions, bench.transport, name, context, asked, cell.figures(), failures)
                    bench.record.add(MovesRow(*row))

    async def _move(self, admin: Admin, bench: Bench, mode: MoveMode, context: int, name: str, into: MovedCell) -> None:
        label = f"{bench.part}/{mode.name}/{name}"
        try:
            sample, _ = await move_one(admin, bench.mell_port, mode, context, self.output, label)
        except FAILED as error:
            into.failures.append(f"{type(error).__name__}: {error}"[:300])
            return
        bench.keep("move", asdict(sample))
        if sample.as_asked:
            into.samples.append(sample)
        else:
            into.failures.append(f"{sample.record['outcome']} by {sample.record['path']}: {sample.record['error']}")


@dataclass(frozen=True, slots=True)
class MeasureNeighbours:
    """Move a stream of `context` tokens beside `per_replica` others on each replica, in `rounds` rounds."""

    context: int
    modes: Sequence[str] = ("pre-copy", "tokens")
    per_replica: int = 4
    rounds: int = 6
    output: int = 400
    weight: float = 1.0

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        modes = modes_of(self.modes)
        effects: list[Effect] = []
        try:
            async with Admin(bench.mell_port) as admin:
                for turn in bench.time.turns(self.rounds):
                    name, order = f"{bench.part}/beside/{turn}", modes[:: 1 if turn % 2 else -1]
                    port, count = bench.mell_port, self.per_replica
                    samples, found = await disturb(admin, port, order, count, self.context, self.output, name)
                    effects += found
                    for sample, effect in zip((s for s in samples for _ in range(2)), found, strict=True):
                        bench.keep("neighbours", {"move": asdict(sample), "effect": asdict(effect)})
        finally:
            for mode, role in dict.fromkeys((effect.mode, effect.role) for effect in effects):
                row = self._row(bench, mode, role, [e for e in effects if (e.mode, e.role) == (mode, role)])
                if row is not None:
                    bench.record.add(row)

    def _row(self, bench: Bench, mode: str, role: str, effects: Sequence[Effect]) -> NeighbourRow | None:
        """The row of one mode and role; None without a gap during a move and one without."""
        seen = [effect for effect in effects if effect.during and effect.quiet]
        medians = [(statistics.median(e.during), statistics.median(e.quiet)) for e in seen]
        tails = [(percentile(e.during, 0.99), percentile(e.quiet, 0.99)) for e in seen]
        spreads = (
            Spread.of(during / quiet for during, quiet in medians),
            Spread.of(during / quiet for during, quiet in tails),
            Spread.of(quiet * 1e3 for _, quiet in medians),
            Spread.of(quiet * 1e3 for _, quiet in tails),
        )
        median, p99, quiet_ms, quiet_p99_ms = spreads
        if median is None or p99 is None or quiet_ms is None or quiet_p99_ms is None:
            return None
        where = (bench.conditions, bench.transport, mode, role, self.context, self.per_replica)
        return NeighbourRow(*where, median, p99, quiet_ms, quiet_p99_ms)

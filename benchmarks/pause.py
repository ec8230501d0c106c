"""The cost of a migration at the client: the pause of the stream, by pre-copied KV, stop-and-copy KV, and tokens.

    python -m benchmarks.pause [--contexts 256 1024 2048 3500] [--repeat 8] [--rounds 8] [--transport shared]
                               [--device cuda] [--workers 2] [--parts] [--json FILE] [--png FILE]

A stream is moved between two replicas while a client reads it, with nothing else running. Its pause is the gap at the
client between the source's last chunk and the target's first, in milliseconds and as a multiple of the stream's own
median gap. "vs tokens" divides this multiple by the token path's at the same context. With `--workers 2` each replica
splits the model over two workers.

With `--parts`, the pause of KV moves is taken apart. The hand-over is the gap between the source's last token and the
target's first; the pause is longer than that if the copying caused a larger gap. Of the hand-over, "engine" is the time
from the freeze to the target's first token, but for the message to the target, and "messages" is all the rest.

Then the same with background streams on both replicas, and their slowdown by migrations.

Pre-copy and tokens share a server, in turns; stop-and-copy (no rounds, all blocks within the pause) needs other
settings, and runs on a second server afterwards. Migrations that failed, or used another path than ordered, are counted
and left out of the figures; the exit status is 1 if any failed.
"""

import argparse
import asyncio
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from benchmarks.instruments.admin import Admin
from benchmarks.instruments.beside import Effect, disturb, print_effects
from benchmarks.instruments.moved import MODES, STOP_AND_COPY, MoveMode, MoveSample, move_one
from benchmarks.load import spread
from benchmarks.servers import Rig, add_rig_options, mell, transports_of
from migration.protocol.sizing import MIB

PORT = 8100


@dataclass(slots=True)
class PauseResults:
    """Migrations with nothing else running, migrations beside other streams, and their effects on these."""

    alone: list[MoveSample] = field(default_factory=list)
    beside: list[MoveSample] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)


def main() -> None:
    """Parse the options, measure, print."""
    options = _options()
    measured = PauseResults()
    rig = Rig.of(options)
    for stop_and_copy in (False, True):
        modes = [mode for mode in MODES if mode.stop_and_copy is stop_and_copy]
        migration = {"transport": options.transport} | (STOP_AND_COPY if stop_and_copy else {})
        with mell(PORT, 2, rig, migration=migration):
            asyncio.run(_measure(modes, options, measured))
    if options.json:
        options.json.write_text(json.dumps(asdict(measured), indent=1))
    print(f"\n{rig}; transport {options.transport}: median [min, max]")
    _print(measured.alone, options.contexts)
    if options.parts:
        _print_parts(measured.alone, options.contexts)
    print_effects(measured.effects, options.streams, options.beside)
    if options.png:
        _draw(measured.alone, options.contexts, options.png)
    failed = [sample for sample in measured.alone + measured.beside if not sample.committed]
    for sample in failed:
        print(f"FAILED: {sample.mode}, {sample.context} tokens: {sample.record}", file=sys.stderr)
    sys.exit(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 2048, 3500])
    parser.add_argument("--output", type=int, default=400, help="tokens of the moved stream")
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--transport", choices=transports_of("cuda"), default="shared")
    parser.add_argument("--streams", type=int, default=4, help="background streams per replica")
    parser.add_argument("--beside", type=int, default=2048, help="context of the moved stream beside these, in tokens")
    parser.add_argument("--rounds", type=int, default=8, help="rounds with background streams; 0 for none")
    parser.add_argument("--parts", action="store_true", help="take the pause of KV moves apart")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    add_rig_options(parser)
    options = parser.parse_args()
    rig = Rig.of(options)
    if max(*options.contexts, options.beside) + options.output > rig.context:
        parser.error(f"a context and --output together exceed {rig.context} tokens")
    if options.transport not in transports_of(rig.device):
        parser.error(f"--transport {options.transport} needs --device cuda")
    return options


async def _measure(modes: Sequence[MoveMode], options: argparse.Namespace, into: PauseResults) -> None:
    """Measure every context and mode in turns, on one server; then the rounds with background streams."""
    names, output = " and ".join(mode.name for mode in modes), options.output
    async with Admin(PORT) as admin:
        for mode in modes:
            await move_one(admin, PORT, mode, options.contexts[0], output, f"warm/{mode.name}")
        turns = [(i, c, mode) for i in range(options.repeat) for c in options.contexts for mode in modes]
        for i, context, mode in tqdm(turns, desc=names, unit="migration"):
            sample, _ = await move_one(admin, PORT, mode, context, output, f"{context}/{i}/{mode.name}")
            into.alone.append(sample)
        for i in tqdm(range(options.rounds), desc=f"{names}, beside others", unit="round"):
            order = modes[:: 1 if i % 2 else -1]
            found, effects = await disturb(admin, PORT, order, options.streams, options.beside, output, f"round/{i}")
            into.beside += found
            into.effects += effects


def _print(samples: Sequence[MoveSample], contexts: Sequence[int]) -> None:
    """Print a line for every context and mode. The last columns are medians from the source's records."""
    print(f"{'':37}{'pause at the client':^48}{'the source: pause':>22}{'total':>8}{'sent':>7}")
    print(
        f"{'context':>7} {'mode':14}{'n':>3}{'fell back':>11} {'ms':>24}{'median gaps':>20}{'vs tokens':>11}"
        f"{'ms':>16}{'ms':>8}{'MiB':>7}{'rounds':>8}"
    )
    for context in contexts:
        tokens = _of(samples, context, "tokens")
        yardstick = statistics.median(s.multiple for s in tokens) if tokens else math.nan
        for mode in MODES:
            asked = [s for s in samples if (s.context, s.mode) == (context, mode.name)]
            moved = _of(samples, context, mode.name)
            others = sum(s.committed for s in asked) - len(moved)
            start = f"{context:7} {mode.name:14}{len(moved):3}{others:11} "
            if not moved:
                print(start)
                continue
            record = {
                name: statistics.median(s.record[name] for s in moved)
                for name in ("pause_s", "duration_s", "bytes", "rounds")
            }
            print(
                f"{start}{spread([s.pause_s * 1e3 for s in moved]):>24}{spread([s.multiple for s in moved]):>20}"
                f"{statistics.median(s.multiple for s in moved) / yardstick:11.2f}"
                f"{record['pause_s'] * 1e3:16.1f}{record['duration_s'] * 1e3:8.0f}{record['bytes'] / MIB:7.1f}"
                f"{record['rounds']:8.1f}"
            )


def _print_parts(samples: Sequence[MoveSample], contexts: Sequence[int]) -> None:
    """Print the parts of KV moves: hand-over and its parts in milliseconds, and the hand-over in median gaps."""
    print(f"\n{'':26}{'hand-over: ms':>24}{'median gaps':>20}{'engine, ms':>24}{'messages, ms':>24}")
    for context in contexts:
        for mode in MODES:
            moved = [
                (s.handed_s, s.gap_s, s.record["resume_s"])
                for s in _of(samples, context, mode.name)
                if mode.path == "kv" and s.handed_s is not None and s.record["resume_s"] is not None
            ]
            if moved:
                parts = [[handed, engine, handed - engine] for handed, _, engine in moved]
                whole, engine_s, rest = (spread([part * 1e3 for part in column]) for column in zip(*parts, strict=True))
                gaps = spread([handed / gap for handed, gap, _ in moved])
                print(f"{context:7} {mode.name:14}{len(moved):4}{whole:>24}{gaps:>20}{engine_s:>24}{rest:>24}")


def _of(samples: Sequence[MoveSample], context: int, mode: str) -> list[MoveSample]:
    """The samples of a context and mode that used the path asked for."""
    return [s for s in samples if (s.context, s.mode) == (context, mode) and s.as_asked]


def _draw(samples: Sequence[MoveSample], contexts: Sequence[int], path: Path) -> None:
    """Draw the pause against the context, medians with ranges, as a PNG file."""
    # Imported here, since the import is slow and only the figure needs it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for mode in MODES:
        found = {context: [s.multiple for s in _of(samples, context, mode.name)] for context in contexts}
        points = [(c, min(v), statistics.median(v), max(v)) for c, v in sorted(found.items()) if v]
        if points:
            at, low, middle, high = zip(*points, strict=True)
            axes.plot(at, middle, marker="o", label=mode.name)
            axes.fill_between(at, low, high, alpha=0.2)
    axes.set(xlabel="tokens of the prompt", ylabel="pause (median gaps of the same stream)", yscale="log")
    axes.set_title("Pause of a migration at the client: median, and range of all runs")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)


if __name__ == "__main__":
    main()

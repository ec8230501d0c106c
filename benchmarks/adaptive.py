"""The value of choosing a path for each move: always KV, always tokens, and adaptive, over links of several speeds.

    python -m benchmarks.adaptive [--speeds 8 32 128 0] [--contexts 256 1024 2048] [--learn 4] [--rounds 4]
                                  [--streams 2] [--device cuda] [--json FILE]

Two replicas exchange KV blocks over a link limited to a speed in MB/s (0: unlimited). Every round moves three streams
of the same context: by KV, by tokens, and by the scheduler's choice ("auto"), in alternating order, beside other
streams on both replicas. The link's speed is not among the scheduler's settings. It learns the speed from --learn moves
by each fixed path, for every context, after each change of the speed, and from the rounds.

Ratios are within a round, hence independent of the machine's speed; printed are their median and range over the rounds:

    total       from the order to the first new token at the target: KV / tokens, and adaptive / the faster of the two
    pause       between the source's last and the target's first chunk at the client: the same two ratios
    neighbours  gaps between chunks of the target's other streams during the move / otherwise: medians of each path

The exit status is 1 if a request was lost or a migration failed.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from benchmarks.instruments.admin import Admin
from benchmarks.instruments.beside import Effect, disturb
from benchmarks.instruments.moved import MoveMode, MoveSample, move_one
from benchmarks.load import spread
from benchmarks.servers import Rig, add_rig_options, mell
from tests.integration import faults
from tests.integration.faults import Fault

PORT = 8104
MODES = (MoveMode("kv", "kv"), MoveMode("tokens", "tokens"), MoveMode("adaptive", "auto"))
MB = 1e6
DECODES_PER_S = {"cpu": 250, "cuda": 600}
"""An upper bound of a stream's decode speed, by device: it must not end while its blocks are copied."""
MARGIN = 200
"""Tokens that a moved stream decodes before and after its move."""


@dataclass(slots=True)
class Round:
    """One round: a sample of each mode, and the effects on the background streams."""

    speed: float
    context: int
    samples: list[MoveSample]
    effects: list[Effect] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True if all moves committed and have a total time, and those with a fixed path used it."""
        return all(_total_s(s) is not None and (s.as_asked or s.asked == "auto") for s in self.samples)

    def sample(self, mode: str) -> MoveSample:
        """The sample of a mode."""
        return next(sample for sample in self.samples if sample.mode == mode)


def main() -> None:
    """Parse the options, measure, print."""
    options = _options()
    rig = Rig.of(options)
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        switches = Path(folder) / "faults.json"
        faults.write(switches, "shared")
        os.environ[faults.VARIABLE] = str(switches)
        with mell(PORT, 2, rig, migration={"transport": "tests.integration.faults:make"}, scheduler={"mode": "off"}):
            asyncio.run(_measure(options, switches, rounds))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in rounds], indent=1))
    _print(rounds, options.streams)
    failed = [s for each in rounds for s in each.samples if not s.committed]
    for sample in failed:
        print(f"FAILED: {sample.mode}, {sample.context} tokens: {sample.record}", file=sys.stderr)
    sys.exit(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=float, nargs="+", default=[8, 32, 128, 0], help="MB/s; 0: unlimited")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--learn", type=int, default=4, help="unmeasured moves by each fixed path")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=2, help="background streams per replica")
    parser.add_argument("--json", type=Path)
    add_rig_options(parser)
    options = parser.parse_args()
    rig = Rig.of(options)
    for speed in options.speeds:
        for context in options.contexts:
            if context + _output(speed, context, rig) > rig.context:
                parser.error(f"{context} tokens of context at {speed} MB/s: the stream would end before its move")
    return options


async def _measure(options: argparse.Namespace, switches: Path, into: list[Round]) -> None:
    rig = Rig.of(options)
    async with Admin(PORT) as admin:
        for speed in options.speeds:
            faults.write(switches, "shared", *((Fault.SLOW, speed * MB) if speed else ()))
            lessons = [(i, c, mode) for i in range(options.learn) for c in options.contexts for mode in MODES[:2]]
            for i, context, mode in tqdm(lessons, desc=f"{speed:g} MB/s, learning", unit="move"):
                label = f"learn/{speed:g}/{i}/{context}/{mode.name}"
                await move_one(admin, PORT, mode, context, _output(speed, context, rig), label)
            turns = [(i, context) for i in range(options.rounds) for context in options.contexts]
            for number, (i, context) in enumerate(tqdm(turns, desc=f"{speed:g} MB/s", unit="round")):
                order = [*MODES[number % len(MODES) :], *MODES[: number % len(MODES)]]
                name, output = f"{speed:g}/{i}/{context}", _output(speed, context, rig)
                samples, effects = await disturb(admin, PORT, order, options.streams, context, output, name)
                into.append(Round(speed, context, samples, effects))


def _output(speed: float, context: int, rig: Rig) -> int:
    """Output tokens of a stream that has to run until it has been moved over a link of `speed` MB/s."""
    copying_s = context * rig.kv_bytes / (speed * MB) if speed else 0.0
    return MARGIN + round(DECODES_PER_S[rig.device] * copying_s)


def _total_s(sample: MoveSample) -> float | None:
    """Seconds from the order to the first new token, from the migration's record."""
    record = sample.record
    if not sample.committed or record["resume_s"] is None:
        return None
    return float(record["duration_s"] - record["pause_s"] + record["resume_s"])


def _print(rounds: Sequence[Round], streams: int) -> None:
    """Print a line for every speed and context, then the accuracy of the scheduler's predictions."""
    print(f"\n{streams} background streams on each replica. Median [min, max] of ratios within rounds.\n")
    print(
        f"{'MB/s':>6}{'context':>9}{'rounds':>8}{'chosen':>11}  {'total: kv/tokens':^21}{'adaptive/better':^21}"
        f"  {'pause: kv/tokens':^21}{'adaptive/better':^21}  {'neighbours: kv':^15}{'tokens':^9}{'adaptive':^9}"
    )
    for speed, context in dict.fromkeys((each.speed, each.context) for each in rounds):
        asked = [each for each in rounds if (each.speed, each.context) == (speed, context)]
        good = [each for each in asked if each.complete]
        chosen = [str(each.sample("adaptive").record["path"]) for each in asked]
        tally = ", ".join(f"{chosen.count(path)} {path}" for path in ("kv", "tokens") if path in chosen)
        start = f"{speed or 'free':>6}{context:9}{f'{len(good)}/{len(asked)}':>8}{tally:>17}"
        if not good:
            print(start)
            continue
        totals = [{s.mode: _total_s(s) or 0.0 for s in each.samples} for each in good]
        pauses = [{s.mode: s.pause_s for s in each.samples} for each in good]
        slowed = "".join(f"{_slowdown(good, mode.name):^11}" for mode in MODES)
        print(f"{start}  {_ratios(totals)}  {_ratios(pauses)}  {slowed}")
    _print_errors([sample for each in rounds for sample in each.samples])


def _ratios(rounds: Sequence[dict[str, float]]) -> str:
    """The ratios KV / tokens, and adaptive / the better of the two."""
    fixed = [each["kv"] / each["tokens"] for each in rounds]
    adaptive = [each["adaptive"] / min(each["kv"], each["tokens"]) for each in rounds]
    return f"{spread(fixed, 2):^21}{spread(adaptive, 2):^21}"


def _slowdown(rounds: Sequence[Round], mode: str) -> str:
    """The slowdown of the target's other streams: the median over rounds of the ratio of median gaps."""
    effects = [e for each in rounds for e in each.effects if (e.mode, e.role) == (mode, "target")]
    ratios = [statistics.median(e.during) / statistics.median(e.quiet) for e in effects if e.during and e.quiet]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _print_errors(samples: Sequence[MoveSample]) -> None:
    """Print the ratios of predicted to actual times of adaptive moves."""
    print()
    for path in ("kv", "tokens"):
        pairs = [
            (float(s.record[f"predicted_{path}_s"]), total)
            for s in samples
            if s.asked == "auto" and s.record["path"] == path and s.record[f"predicted_{path}_s"] is not None
            if (total := _total_s(s)) is not None
        ]
        if pairs:
            ratios = [predicted / total for predicted, total in pairs]
            print(f"predicted / actual of adaptive moves by {path}: {spread(ratios, 2)}, {len(ratios)} moves")


if __name__ == "__main__":
    main()

"""The speed of the copying phase of real migrations, beside that of the same code without engines.

    python -m benchmarks.copying [--contexts 512 2048 3500] [--repeat 8] [--transport shared collective] [--slot-mib 8]
                                 [--streams 4] [--rounds 0] [--device cuda] [--json FILE]

A stream is moved between two replicas by pre-copied KV, with nothing else running. Its copying phase (`copy_s` of the
record) covers all rounds: from the first gather to the moment when the target has confirmed all blocks. Then
`benchmarks.transfer` moves as many bytes between two processes without engines, on the same transport: gather, send and
scatter alone, with Mell's messages.

With `--rounds`, streams of the longest context also move beside `--streams` background streams on each replica, whose
gaps during these moves are compared with their other gaps.

Figures are medians; the exit status is 1 if a migration failed or used another path.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import ray
from tqdm import tqdm

from benchmarks.instruments.admin import Admin
from benchmarks.instruments.beside import Effect, disturb, print_effects
from benchmarks.instruments.moved import MODES, MoveSample, move_one
from benchmarks.load import spread
from benchmarks.servers import ROOT, Rig, add_rig_options, mell, transports_of
from benchmarks.transfer.pair import PIPELINE, EndPair
from migration.protocol.sizing import MIB

PORT = 8100
OUTPUT = 300
"""Tokens of the moved stream: enough to copy 3,500 tokens of context at a twentieth of the usual speed."""
PRE_COPY = MODES[0]


@dataclass(frozen=True, slots=True)
class CopyingVariant:
    """The settings of one server: transport, and size of a staging slot."""

    transport: str
    slot_mib: int

    def __str__(self) -> str:
        return f"{self.transport}, slots of {self.slot_mib} MiB"


@dataclass(frozen=True, slots=True)
class CopyingResults:
    """The moves of one server by context, alone and beside other streams; the effects on these; transfers alone."""

    alone: dict[int, list[MoveSample]]
    beside: list[MoveSample] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    transfer_s: dict[int, float] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """True if all moves went as ordered."""
        return all(s.as_asked for s in [*self.beside, *(s for samples in self.alone.values() for s in samples)])


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 3500])
    parser.add_argument("--transport", nargs="+", choices=transports_of("cuda"), default=["shared", "collective"])
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--slot-mib", type=int, nargs="+", default=[8], help="sizes of staging slots")
    parser.add_argument("--streams", type=int, default=4, help="background streams per replica")
    parser.add_argument("--rounds", type=int, default=0, help="moves beside background streams")
    parser.add_argument("--json", type=Path)
    add_rig_options(parser)
    options = parser.parse_args()
    rig = Rig.of(options)
    if not set(options.transport) <= set(transports_of(rig.device)):
        parser.error(f"--transport {' '.join(options.transport)} needs --device cuda")
    variants = [CopyingVariant(transport, mib) for transport in options.transport for mib in options.slot_mib]
    results: dict[CopyingVariant, CopyingResults] = {}
    for variant in variants:
        with mell(PORT, 2, rig, migration=asdict(variant)):
            results[variant] = asyncio.run(_move(options))
    os.environ.update(rig.environment | {"PYTHONPATH": str(ROOT)})
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning")
    for variant, found in results.items():
        found.transfer_s.update(_transfer(variant, found.alone, options))
    ray.shutdown()
    for variant, found in results.items():
        _print(variant, found)
        if found.effects:
            print_effects(found.effects, options.streams, max(options.contexts))
    if options.json:
        raw = [asdict(variant) | asdict(found) for variant, found in results.items()]
        options.json.write_text(json.dumps(raw, indent=1))
    sys.exit(not all(found.whole for found in results.values()))


async def _move(options: argparse.Namespace) -> CopyingResults:
    """Move streams of all contexts in turns, after one that is not measured; then beside background streams."""
    contexts: Sequence[int] = options.contexts
    results = CopyingResults({context: [] for context in contexts})
    async with Admin(PORT) as admin:
        await move_one(admin, PORT, PRE_COPY, contexts[0], OUTPUT, "warm")
        for i, context in tqdm([(i, c) for i in range(options.repeat) for c in contexts], unit="migration"):
            sample, _ = await move_one(admin, PORT, PRE_COPY, context, OUTPUT, f"{context}/{i}")
            results.alone[context].append(sample)
        for i in tqdm(range(options.rounds), desc="beside others", unit="round"):
            modes = [PRE_COPY]
            samples, effects = await disturb(admin, PORT, modes, options.streams, max(contexts), OUTPUT, f"round/{i}")
            results.beside.extend(samples)
            results.effects.extend(effects)
    return results


def _transfer(
    variant: CopyingVariant, moved: Mapping[int, Sequence[MoveSample]], options: argparse.Namespace
) -> dict[int, float]:
    """The median seconds that as many bytes take without engines, in whole MiB, by context."""
    sizes = {context: max(MIB, round(_bytes(samples) / MIB) * MIB) for context, samples in moved.items()}
    pair = EndPair(variant.transport, max(sizes.values()), options.device, variant.slot_mib, options.gpus)
    try:
        runs = {context: pair.measure(size, options.repeat)[PIPELINE] for context, size in sizes.items()}
    finally:
        pair.close()
    return {
        context: statistics.median(run.took_s for run in runs[context]) * _bytes(moved[context]) / size
        for context, size in sizes.items()
    }


def _bytes(samples: Sequence[MoveSample]) -> float:
    return float(statistics.median(sample.record["bytes"] for sample in samples))


def _print(variant: CopyingVariant, results: CopyingResults) -> None:
    print(f"\n{variant}: median [min, max]")
    print(f"{'context':>7}{'n':>4}{'MiB':>7}{'copying, ms':>26}{'GB/s':>20}{'transfer, ms':>14}{'share':>7}")
    for context, samples in results.alone.items():
        bare = results.transfer_s[context]
        took = [s.record["copy_s"] for s in samples]
        rates = [s.record["bytes"] / s.record["copy_s"] / 1e9 for s in samples]
        print(
            f"{context:7}{len(samples):4}{_bytes(samples) / MIB:7.1f}{spread([s * 1e3 for s in took]):>26}"
            f"{spread(rates, 2):>20}{bare * 1e3:14.1f}{bare / statistics.median(took):7.2f}"
        )


if __name__ == "__main__":
    main()

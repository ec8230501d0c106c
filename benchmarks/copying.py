"""The speed of the copying phase of real migrations, beside that of the same code without engines.

    python -m benchmarks.copying [--contexts 512 2048 3500] [--repeat 8] [--transport shared collective] [--device cuda]
                                 [--json FILE]

A stream is moved between two replicas by pre-copied KV, with nothing else running. Its copying phase (`copy_s` of the
record) covers all rounds: from the first gather and the target's allocation of blocks to the moment when all of them
are in the target's prefix cache. Then `benchmarks.transfer` moves as many bytes between two processes without engines,
on the same transport: gather, send and scatter alone, with Mell's messages.

Figures are medians; the exit status is 1 if a migration failed or used another path.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import ray
from tqdm import tqdm

from benchmarks.admin import Admin
from benchmarks.load import spread
from benchmarks.moved import MODES, MoveSample, move_one
from benchmarks.servers import ROOT, Rig, add_rig_options, mell, transports_of
from benchmarks.transfer.pair import MIB, PIPELINE, EndPair

PORT = 8100
OUTPUT = 300
"""Tokens of the moved stream: enough to copy 3,500 tokens of context at a twentieth of the usual speed."""
PRE_COPY = MODES[0]


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 3500])
    parser.add_argument("--transport", nargs="+", choices=transports_of("cuda"), default=["shared", "collective"])
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--slot-mib", type=int, default=8, help="size of a staging slot")
    parser.add_argument("--json", type=Path)
    add_rig_options(parser)
    options = parser.parse_args()
    rig = Rig.of(options)
    if not set(options.transport) <= set(transports_of(rig.device)):
        parser.error(f"--transport {' '.join(options.transport)} needs --device cuda")
    moved: dict[str, dict[int, list[MoveSample]]] = {}
    for transport in options.transport:
        with mell(PORT, 2, rig, migration={"transport": transport, "slot_mib": options.slot_mib}):
            moved[transport] = asyncio.run(_move(options.contexts, options.repeat))
    os.environ.update(rig.environment | {"PYTHONPATH": str(ROOT)})
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning")
    bare = {transport: _transfer(transport, moved[transport], options) for transport in moved}
    ray.shutdown()
    for transport, by_context in moved.items():
        _print(transport, by_context, bare[transport])
    if options.json:
        raw = {t: {c: [asdict(s) for s in samples] for c, samples in b.items()} for t, b in moved.items()}
        options.json.write_text(json.dumps({"moved": raw, "transfer_s": bare}, indent=1))
    sys.exit(not all(s.as_asked for by_context in moved.values() for samples in by_context.values() for s in samples))


async def _move(contexts: Sequence[int], repeat: int) -> dict[int, list[MoveSample]]:
    """Move streams of all contexts in turns, after one that is not measured."""
    samples: dict[int, list[MoveSample]] = {context: [] for context in contexts}
    async with Admin(PORT) as admin:
        await move_one(admin, PORT, PRE_COPY, contexts[0], OUTPUT, "warm")
        for i, context in tqdm([(i, c) for i in range(repeat) for c in contexts], unit="migration"):
            sample, _ = await move_one(admin, PORT, PRE_COPY, context, OUTPUT, f"{context}/{i}")
            samples[context].append(sample)
    return samples


def _transfer(
    transport: str, moved: Mapping[int, Sequence[MoveSample]], options: argparse.Namespace
) -> dict[int, float]:
    """The median seconds that as many bytes take without engines, in whole MiB, by context."""
    sizes = {context: max(MIB, round(_bytes(samples) / MIB) * MIB) for context, samples in moved.items()}
    pair = EndPair(transport, max(sizes.values()), options.device, options.slot_mib, options.gpus)
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


def _print(transport: str, moved: Mapping[int, Sequence[MoveSample]], bare: Mapping[int, float]) -> None:
    print(f"\n{transport}: median [min, max]")
    print(f"{'context':>7}{'n':>4}{'MiB':>7}{'copying, ms':>26}{'GB/s':>20}{'transfer, ms':>14}{'share':>7}")
    for context, samples in moved.items():
        took = [s.record["copy_s"] for s in samples]
        rates = [s.record["bytes"] / s.record["copy_s"] / 1e9 for s in samples]
        print(
            f"{context:7}{len(samples):4}{_bytes(samples) / MIB:7.1f}{spread([s * 1e3 for s in took]):>26}"
            f"{spread(rates, 2):>20}{bare[context] * 1e3:14.1f}{bare[context] / statistics.median(took):7.2f}"
        )


if __name__ == "__main__":
    main()

"""The cost of serving through Mell: one replica against vLLM's own OpenAI server, in interleaved pairs.

    python -m benchmarks.serving [--pairs 10] [--streams 16 64] [--device cuda] [--json FILE]

Both run at the same time on the same machine, with the same model, engine settings and client; the server that is not
measured is idle. A pair is one run of each, in alternating order; figures are the pairs' ratios Mell / bare.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.load import Load, offer
from benchmarks.servers import MODEL, Rig, add_rig_options, bare_vllm, mell

BARE_PORT, MELL_PORT = 8101, 8100
PROMPT, OUTPUT = 64, 128
FIGURES: Sequence[tuple[str, str, float]] = (
    ("tokens_per_s", "tok/s", 1),
    ("ttft_p50", "ms", 1e3),
    ("ttft_p99", "ms", 1e3),
    ("itl_p50", "ms", 1e3),
    ("itl_p99", "ms", 1e3),
    ("chunks_per_token", "", 1),
)
"""The figures of a `Load`, each with its unit and the factor for this unit."""


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--json", type=Path)
    add_rig_options(parser)
    options = parser.parse_args()
    rig = Rig.of(options)
    with bare_vllm(BARE_PORT, rig), mell(MELL_PORT, 1, rig):
        results = {n: asyncio.run(_pairs(n, options.pairs)) for n in options.streams}
    print_pairs("Mell", "bare", results)
    if options.json:
        write_pairs(results, options.json)


async def _pairs(streams: int, count: int) -> list[tuple[Load, Load]]:
    """Measure (Mell, bare) pairs; the order within a pair alternates."""
    ports = (MELL_PORT, BARE_PORT)
    await warm_up(ports, streams, PROMPT, OUTPUT)
    turns = tqdm(range(count), desc=f"{streams} streams", unit="pair")
    return [await measure_pair(ports, streams, PROMPT, OUTPUT, i) for i in turns]


async def warm_up(ports: tuple[int, int], streams: int, prompt: int, output: int) -> None:
    """Offer one load to each server."""
    for port in ports:
        await offer(port, MODEL, streams, prompt, output, f"warm/{streams}")


async def measure_pair(ports: tuple[int, int], streams: int, prompt: int, output: int, turn: int) -> tuple[Load, Load]:
    """Offer a load to both servers, one after the other: the second one first in even turns."""
    loads: dict[int, Load] = {}
    for port in ports[:: 1 if turn % 2 else -1]:
        loads[port] = await offer(port, MODEL, streams, prompt, output, f"{streams}/{turn}/{port}")
    return loads[ports[0]], loads[ports[1]]


def write_pairs(results: Mapping[int, Sequence[tuple[Load, Load]]], file: Path) -> None:
    """Write the pairs of each number of streams to a JSON file."""
    raw = {n: [[dataclasses.asdict(a), dataclasses.asdict(b)] for a, b in pairs] for n, pairs in results.items()}
    file.write_text(json.dumps(raw, indent=1))


def print_pairs(
    first: str,
    second: str,
    results: Mapping[int, Sequence[tuple[Load, Load]]],
    figures: Sequence[tuple[str, str, float]] = FIGURES,
) -> None:
    """Print the medians of both, and the ratios first / second of the pairs, for each number of streams."""
    for streams, pairs in results.items():
        print(f"\n{streams} streams, {PROMPT} prompt and {OUTPUT} output tokens, {len(pairs)} pairs")
        _table(first, second, pairs, figures)


def _table(
    first: str, second: str, pairs: Sequence[tuple[Load, Load]], figures: Sequence[tuple[str, str, float]]
) -> None:
    print(f"{'':18}{first:>10}{second:>10}   ratio of pairs: median [min, max]")
    for name, unit, scale in figures:
        ours = [getattr(m, name) * scale for m, _ in pairs]
        theirs = [getattr(b, name) * scale for _, b in pairs]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{name:18}{statistics.median(ours):10.1f}{statistics.median(theirs):10.1f}   "
            f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] {unit}"
        )


if __name__ == "__main__":
    main()

"""Serving by this version of Mell against another version, in interleaved pairs.

    python -m benchmarks.versions --other FOLDER [--pairs 10] [--streams 16 64] [--json FILE]

FOLDER is a checkout of the other version; it runs with this version's packages. One replica with a real engine. Two
clusters on one machine would disturb each other, so a session starts one version, warms it up and offers a load a few
times; its figures are the medians. A pair is a session of each, in alternating order; ratios are this / the other.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from benchmarks.load import Load, offer
from benchmarks.servers import MODEL, mell

PORT = 8100
PROMPT, OUTPUT = 64, 128
OFFERS = {16: 6, 64: 2}
"""The repetitions of a load in a session, by number of streams; 2 for other numbers."""


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="a checkout of another version")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--session", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.session:
        figures = {n: dataclasses.asdict(load) for n, load in _session(options.streams).items()}
        options.session.write_text(json.dumps(figures))
        return
    if options.other is None or not (options.other / "benchmarks").is_dir():
        parser.error("--other: give the folder of a checkout")
    _compare(options.other.resolve(), options.pairs, options.streams, options.json)


def _compare(other: Path, count: int, streams: list[int], file: Path | None) -> None:
    # Not at the top: a session imports the other version's `benchmarks`, which may lack these functions.
    from benchmarks.serving import print_pairs, write_pairs

    here = Path(__file__).parents[1]
    pairs: dict[int, list[tuple[Load, Load]]] = {n: [] for n in streams}
    for i in tqdm(range(count), unit="pair"):
        both = {folder: _run(folder, streams) for folder in (here, other)[:: 1 if i % 2 else -1]}
        for n in streams:
            pairs[n].append((both[here][n], both[other][n]))
        if file is not None:
            write_pairs(pairs, file)
    print_pairs("this", "other", pairs)


def _run(folder: Path, streams: list[int]) -> dict[int, Load]:
    """Run a session of the version in `folder` as a process, after the complete end of the previous session."""
    while _listening():
        time.sleep(1)
    with tempfile.NamedTemporaryFile() as figures:  # Not a pipe: Ray's remaining processes hold one open for a minute.
        command = [sys.executable, str(Path(__file__)), "--session", figures.name, "--streams", *map(str, streams)]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        subprocess.run(command, cwd=folder, env=environment, check=True, preexec_fn=_heed_interrupts)
        return {int(n): Load(**load) for n, load in json.load(figures).items()}


def _heed_interrupts() -> None:
    """Restore the default action of SIGINT, which ends older versions; a shell's background processes ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _listening() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORT)) == 0


def _session(streams: list[int]) -> dict[int, Load]:
    with mell(PORT, 1):
        return {n: asyncio.run(_offers(n)) for n in streams}


async def _offers(streams: int) -> Load:
    await offer(PORT, MODEL, streams, PROMPT, OUTPUT, f"warm/{streams}")
    loads = [await offer(PORT, MODEL, streams, PROMPT, OUTPUT, f"{streams}/{i}") for i in range(OFFERS.get(streams, 2))]
    return Load(*(statistics.median(values) for values in zip(*map(dataclasses.astuple, loads), strict=True)))


if __name__ == "__main__":
    main()

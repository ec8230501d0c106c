"""This version of Mell against another one: serving, in interleaved pairs.

    python -m benchmarks.versions --other FOLDER [--pairs 10] [--streams 16 64] [--json FILE]

FOLDER is a checkout of the other version; it runs with the packages of this one. One replica with a real engine. Two
clusters on one machine would disturb each other, so a session starts one version anew, warms it up and offers a load
a few times; its figures are the medians. A pair is a session of each, in turns; ratios are this / the other.
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
"""How often a load of so many streams is offered in a session; others as often as the second."""


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
        told = {n: dataclasses.asdict(load) for n, load in _session(options.streams).items()}
        options.session.write_text(json.dumps(told))
        return
    if options.other is None or not (options.other / "benchmarks").is_dir():
        parser.error("--other: give the folder of a checkout")
    _compare(options.other.resolve(), options.pairs, options.streams, options.json)


def _compare(other: Path, count: int, streams: list[int], file: Path | None) -> None:
    from benchmarks.serving import keep, show  # of this version: the other one's may have none

    here = Path(__file__).parents[1]
    pairs: dict[int, list[tuple[Load, Load]]] = {n: [] for n in streams}
    for i in tqdm(range(count), unit="pair"):
        both = {folder: _run(folder, streams) for folder in (here, other)[:: 1 if i % 2 else -1]}
        for n in streams:
            pairs[n].append((both[here][n], both[other][n]))
        if file is not None:
            keep(pairs, file)
    show("this", "other", pairs)


def _run(folder: Path, streams: list[int]) -> dict[int, Load]:
    """A session of the version in that folder, in a process of its own, once the one before is really over."""
    while _listening():
        time.sleep(1)
    with tempfile.NamedTemporaryFile() as told:  # a pipe would be held open by what Ray leaves behind for a minute
        command = [sys.executable, str(Path(__file__)), "--session", told.name, "--streams", *map(str, streams)]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        subprocess.run(command, cwd=folder, env=environment, check=True, preexec_fn=_heed_interrupts)
        return {int(n): Load(**load) for n, load in json.load(told).items()}


def _heed_interrupts() -> None:
    """For a session of an older version, which ends by SIGINT: the background of a shell ignores it."""
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

"""Serving by this version of Mell against another version, in interleaved pairs.

    python -m benchmarks.versions --other FOLDER [--pairs 10] [--streams 16 64] [--json FILE]

FOLDER is a checkout of the other version; it runs with this version's packages. One replica with a real engine. Two
clusters on one machine would disturb each other, so a session starts one version, warms it up and offers a load a few
times; its figures are the medians. A pair is a session of each, in alternating order; ratios are this / the other.
CPU times are those of all processes of a kind, per output token.
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
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmarks.load import Load, offer
from benchmarks.servers import MODEL, mell

PORT = 8100
PROMPT, OUTPUT = 64, 128
OFFERS = {16: 6, 64: 2}
"""The repetitions of a load in a session, by number of streams; 2 for other numbers."""

KINDS = {
    "ingress_cpu": "ServeReplica:mell:Ingress",
    "replica_cpu": "ServeReplica:mell:Engine",
    "core_cpu": "VLLM::EngineCore",
    "worker_cpu": "VLLM::Worker",
}
"""The kinds of processes, by a part of their titles."""


@dataclass(frozen=True, slots=True)
class SessionFigures(Load):
    """The figures of a session: of its loads, CPU seconds per output token by kind of process, and the ingress's RSS.

    `other_cpu` is that of all processes but the client that are of no kind, such as those of Ray and the scheduler.
    """

    ingress_cpu: float
    replica_cpu: float
    core_cpu: float
    worker_cpu: float
    other_cpu: float
    ingress_mib: float
    start_s: float


FIGURES = (
    *((name, "us", 1e6) for name in (*KINDS, "other_cpu")),
    ("ingress_mib", "MiB", 1.0),
    ("start_s", "s", 1.0),
)


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
        figures = {n: dataclasses.asdict(found) for n, found in _session(options.streams).items()}
        options.session.write_text(json.dumps(figures))
        return
    if options.other is None or not (options.other / "benchmarks").is_dir():
        parser.error("--other: give the folder of a checkout")
    _compare(options.other.resolve(), options.pairs, options.streams, options.json)


def _compare(other: Path, count: int, streams: list[int], file: Path | None) -> None:
    # Not at the top: a session imports the other version's `benchmarks`, which may lack these functions.
    from benchmarks.serving import FIGURES as OF_LOADS
    from benchmarks.serving import print_pairs, write_pairs

    here = Path(__file__).parents[1]
    pairs: dict[int, list[tuple[SessionFigures, SessionFigures]]] = {n: [] for n in streams}
    for i in tqdm(range(count), unit="pair"):
        both = {folder: _run(folder, streams) for folder in (here, other)[:: 1 if i % 2 else -1]}
        for n in streams:
            pairs[n].append((both[here][n], both[other][n]))
        if file is not None:
            write_pairs(pairs, file)
    print_pairs("this", "other", pairs, (*OF_LOADS, *FIGURES))


def _run(folder: Path, streams: list[int]) -> dict[int, SessionFigures]:
    """Run a session of the version in `folder` as a process, after the complete end of the previous session."""
    while _listening():
        time.sleep(1)
    with tempfile.NamedTemporaryFile() as figures:  # Not a pipe: Ray's remaining processes hold one open for a minute.
        command = [sys.executable, str(Path(__file__)), "--session", figures.name, "--streams", *map(str, streams)]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        subprocess.run(command, cwd=folder, env=environment, check=True, preexec_fn=_heed_interrupts)
        return {int(n): SessionFigures(**found) for n, found in json.load(figures).items()}


def _heed_interrupts() -> None:
    """Restore the default action of SIGINT, which ends older versions; a shell's background processes ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _listening() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORT)) == 0


def _session(streams: list[int]) -> dict[int, SessionFigures]:
    began = time.monotonic()
    with mell(PORT, 1):
        took = time.monotonic() - began
        return {n: asyncio.run(_offers(n, took)) for n in streams}


async def _offers(streams: int, start_s: float) -> SessionFigures:
    await offer(PORT, MODEL, streams, PROMPT, OUTPUT, f"warm/{streams}")
    repetitions = OFFERS.get(streams, 2)
    before = _cpu_s()
    loads = [await offer(PORT, MODEL, streams, PROMPT, OUTPUT, f"{streams}/{i}") for i in range(repetitions)]
    after = _cpu_s()
    medians = {f.name: statistics.median(getattr(load, f.name) for load in loads) for f in dataclasses.fields(Load)}
    tokens = repetitions * streams * OUTPUT
    cpu = {kind: (after[kind] - before[kind]) / tokens for kind in (*KINDS, "other_cpu")}
    return SessionFigures(**medians, **cpu, ingress_mib=_ingress_mib(), start_s=start_s)


def _cpu_s() -> Mapping[str, float]:
    """CPU seconds so far, by kind of process, of all processes that this one has started."""
    used = defaultdict[str, float](float)
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        used[_kind(process)] += times.user + times.system
    return used


def _ingress_mib() -> float:
    processes = psutil.Process().children(recursive=True)
    return float(sum(p.memory_info().rss for p in processes if _kind(p) == "ingress_cpu")) / (1 << 20)


def _kind(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    return next((kind for kind, part in KINDS.items() if part in title), "other_cpu")


if __name__ == "__main__":
    main()

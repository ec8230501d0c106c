"""The cost of serving through Mell: one replica and one ingress beside vLLM's own OpenAI server, in interleaved rounds.

    python -m benchmarks.serving [--rounds 10] [--streams 16 64] [--servers vllm control mell] [--device cuda]
                                 [--json FILE]

    vllm      vLLM's own server
    control   the same over an engine core that it has not started (`instruments.control`), as in Mell's ingress
    relayed   the control with one more process between engine and server, which forwards the outputs unread
    mell      Mell

All run at the same time on the same machine, with the same model, engine settings and client; servers that are not
measured are idle. A round is one load for each, in changing order; ratios are those of a round. CPU times are per
output token. `added_cpu` is that of all processes of Mell but the frontend and the engine's, without what they use when
nobody calls (Ray's processes, and epochs), which is printed per second.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmarks.load import Load, offer
from benchmarks.servers import CONTROL, MODEL, RELAY, VLLM_SERVER, Rig, add_rig_options, bare_vllm, control, mell

PROMPT, OUTPUT = 64, 128

STARTS: Mapping[str, tuple[int, Callable[[int, Rig], AbstractContextManager[int]]]] = {
    "vllm": (8101, bare_vllm),
    "control": (8102, control),
    "relayed": (8103, lambda port, rig: control(port, rig, relayed=True)),
    "mell": (8100, lambda port, rig: mell(port, 1, rig)),
}
"""The servers: the port of each, and its start. The first one of a run is the reference of all others."""

FIGURES: Sequence[tuple[str, str, float]] = (
    ("tokens_per_s", "tok/s", 1),
    ("ttft_p50", "ms", 1e3),
    ("ttft_p99", "ms", 1e3),
    ("itl_p50", "ms", 1e3),
    ("itl_p99", "ms", 1e3),
    ("chunks_per_token", "", 1),
)
"""The figures of a `Load`, each with its unit and the factor for this unit."""

CPU_FIGURES: Sequence[tuple[str, str, float]] = tuple(
    (name, "us", 1e6)
    for name in ("frontend_cpu", "added_cpu", "replica_cpu", "other_cpu", "core_cpu", "worker_cpu", "idle_cpu")
)
"""The figures that a `ServedLoad` has beside those of a `Load`."""

IDLE_S = 5.0
"""The time for which servers that nobody calls are measured."""

KINDS: Sequence[tuple[str, str]] = (
    ("VLLM::EngineCore", "core_cpu"),
    ("VLLM::Worker", "worker_cpu"),
    ("ServeReplica:mell:Engine", "replica_cpu"),
    (RELAY, "replica_cpu"),
    ("ServeReplica:mell:Ingress", "frontend_cpu"),
    (VLLM_SERVER, "frontend_cpu"),
    (CONTROL, "frontend_cpu"),
)
"""Parts of processes' titles, and the figures that these processes count for; all others are `other_cpu`."""


@dataclass(frozen=True, slots=True)
class ServedLoad(Load):
    """A load on one of several servers, and CPU seconds per output token.

    They are those of the processes that answer clients (`frontend_cpu`), of Mell's replica, of the engine's processes,
    and of all other processes of the server; `idle_cpu` is that of all other servers meanwhile. `added_cpu` is that of
    replica and others, without what they use when nobody calls.
    """

    frontend_cpu: float
    added_cpu: float
    replica_cpu: float
    other_cpu: float
    core_cpu: float
    worker_cpu: float
    idle_cpu: float


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server: `root` is its first process."""

    name: str
    port: int
    root: psutil.Process

    def cpu_s(self) -> Mapping[str, float]:
        """CPU seconds so far of all its processes, by figure."""
        used = defaultdict[str, float](float)
        for figure, cpu_s, _ in self._usage():
            used[figure] += cpu_s
        return used

    def frontend_mib(self) -> float:
        """Resident memory of the processes that answer clients."""
        return sum(rss for figure, _, rss in self._usage() if figure == "frontend_cpu") / (1 << 20)

    def _usage(self) -> Iterator[tuple[str, float, int]]:
        """The figure of each process, its CPU seconds so far, and its resident bytes."""
        for process in (self.root, *self.root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                yield self._figure(process), times.user + times.system, process.memory_info().rss

    def _figure(self, process: psutil.Process) -> str:
        # The root keeps the others, and has their command line among its arguments.
        title = " ".join(process.cmdline()) if process != self.root else ""
        return next((figure for part, figure in KINDS if part in title), "other_cpu")


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--servers", nargs="+", choices=STARTS, default=["vllm", "control", "mell"])
    parser.add_argument("--json", type=Path)
    add_rig_options(parser)
    options = parser.parse_args()
    with ExitStack() as stack:
        servers = [_start(name, Rig.of(options), stack) for name in options.servers]
        idle = idle_rates(servers)
        results = {n: asyncio.run(_rounds(servers, idle, n, options.rounds)) for n in options.streams}
        memory = {server.name: server.frontend_mib() for server in servers}
    for first, second in itertools.combinations(reversed(options.servers), 2):
        pairs = {n: [(loads[first], loads[second]) for loads in rounds] for n, rounds in results.items()}
        print_pairs(first, second, pairs, (*FIGURES, *CPU_FIGURES))
    print("\nfrontend's memory, MiB: " + ", ".join(f"{name} {mib:.0f}" for name, mib in memory.items()))
    print("idle, ms of CPU per s: " + ", ".join(f"{name} {sum(r.values()) * 1e3:.0f}" for name, r in idle.items()))
    if options.json:
        raw = {
            n: [{s: dataclasses.asdict(load) for s, load in r.items()} for r in rounds] for n, rounds in results.items()
        }
        options.json.write_text(json.dumps({"rounds": raw, "frontend_mib": memory, "idle": idle}, indent=1))


def _start(name: str, rig: Rig, stack: ExitStack) -> RunningServer:
    port, start = STARTS[name]
    me = psutil.Process()
    before = set(me.children())
    stack.enter_context(start(port, rig))
    (root,) = set(me.children()) - before
    return RunningServer(name, port, root)


def idle_rates(servers: Sequence[RunningServer]) -> dict[str, Mapping[str, float]]:
    """CPU seconds per second of servers that nobody calls, by server and figure."""
    before = {server.name: server.cpu_s() for server in servers}
    time.sleep(IDLE_S)
    after = {server.name: server.cpu_s() for server in servers}
    return {name: {f: (used - before[name][f]) / IDLE_S for f, used in after[name].items()} for name in before}


async def _rounds(
    servers: Sequence[RunningServer], idle: Mapping[str, Mapping[str, float]], streams: int, count: int
) -> list[dict[str, ServedLoad]]:
    """Measure all servers `count` times, in each order equally often if the count is a multiple of their orders."""
    await warm_up([server.port for server in servers], streams, PROMPT, OUTPUT)
    orders = itertools.cycle(itertools.permutations(servers))
    turns = tqdm(range(count), desc=f"{streams} streams", unit="round")
    return [{s.name: await _measure(s, servers, idle[s.name], streams, turn) for s in next(orders)} for turn in turns]


async def _measure(
    server: RunningServer, servers: Sequence[RunningServer], idle: Mapping[str, float], streams: int, turn: int
) -> ServedLoad:
    before = {s.name: s.cpu_s() for s in servers}
    load = await offer(server.port, MODEL, streams, PROMPT, OUTPUT, f"{streams}/{turn}/{server.name}")
    after = {s.name: s.cpu_s() for s in servers}
    used = {
        name: {figure: (cpu_s - before[name][figure]) / (streams * OUTPUT) for figure, cpu_s in figures.items()}
        for name, figures in after.items()
    }
    return served(load, used.pop(server.name), [u for figures in used.values() for u in figures.values()], idle)


def served(load: Load, own: Mapping[str, float], others: Sequence[float], idle: Mapping[str, float]) -> ServedLoad:
    """A load with CPU times: its server's own and those of the `others` per token, and its own per idle second."""
    added = sum(own.get(name, 0.0) - idle.get(name, 0.0) / load.tokens_per_s for name in ("replica_cpu", "other_cpu"))
    times = {name: own.get(name, 0.0) for name, _, _ in CPU_FIGURES}
    return ServedLoad(**dataclasses.asdict(load), **times | {"added_cpu": added, "idle_cpu": sum(others)})


async def warm_up(ports: Sequence[int], streams: int, prompt: int, output: int) -> None:
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
        print(f"{'':18}{first:>10}{second:>10}   ratio of pairs: median [min, max]")
        for figure in figures:
            print(_row(pairs, *figure))


def _row(pairs: Sequence[tuple[Load, Load]], name: str, unit: str, scale: float) -> str:
    """A line of the table. There is no ratio to figures around 0, as those of processes that the server lacks."""
    ours, theirs = ([getattr(pair[i], name) * scale for pair in pairs] for i in range(2))
    line = f"{name:18}{statistics.median(ours):10.1f}{statistics.median(theirs):10.1f}   "
    if min(theirs) <= 0:
        return line + unit
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return line + f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] {unit}"


if __name__ == "__main__":
    main()

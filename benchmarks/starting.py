"""The start of a replica, from the order to the first token: `python -m benchmarks.starting [--starts 5]`; with
`--asleep`, the wake of one that sleeps.

Mell runs one replica, which is drained and closes, so that Serve starts another one at once. A request that arrives
meanwhile waits for it. Printed are the medians, and the seconds of each start, from the order to drain until

    process       the new replica's process starts
    engine core   the process of vLLM's engine core starts: the replica has imported vLLM and read the configuration
    worker        the worker's process starts: the engine core has vLLM imported
    running       the replica accepts requests
    first token   the waiting client has a token

and the memory of the last replica's processes and of the standby's (PSS). The process of a replica that was a standby
began before the order, so its time is negative. The start of the application itself is not measured: it fills the
caches of files and compiled functions.

With `--asleep`, the only replica of a model of 340 MB is put to sleep by order, and then a request comes. Printed are
the seconds until

    asleep        from the order: parameters and KV pool are dropped
    running       from the request: the replica has loaded, and takes requests
    first token   from the request

and the anonymous memory of the engine's worker, awake and asleep.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass, fields
from typing import Any

import psutil

from app.client.api import ApiClient
from benchmarks.chaos.processes import Processes, memory_mb
from benchmarks.instruments.admin import Admin, OpenedStream
from benchmarks.instruments.models import MODELS
from benchmarks.load import spread
from benchmarks.servers import mell
from deployments.processes.table import identity_of

PORT = 8100
WAIT_S = 120.0
POLL_S = 0.05
IDLE = "ray::IDLE"
"""The title of Ray's workers without an actor."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """The marks of one start, in seconds since the order."""

    process: float
    engine_core: float
    worker: float
    running: float
    first_token: float


@dataclass(frozen=True, slots=True)
class WakeTimes:
    """The marks of one sleep, in seconds since its order, and of the wake behind it, since the request."""

    asleep: float
    running: float
    first_token: float


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="measured starts")
    parser.add_argument("--pause", type=float, default=15.0, help="seconds of rest before each")
    parser.add_argument("--standby", action="store_true", help="with deployment_config.standby")
    parser.add_argument("--asleep", action="store_true", help="measure wakes of a sleeping replica")
    options = parser.parse_args()
    if options.asleep:
        return _measure_wakes(options)
    bounds = {"min_replicas": 1, "max_replicas": 2}  # the only possible replica cannot be drained
    deployment = {"autoscaling_config": bounds, "standby": options.standby}
    waits = {"no_replica_timeout_s": WAIT_S}
    with mell(PORT, 1, deployment_config=deployment, ingress=waits, scheduler={"epoch_s": 0.2}):
        asyncio.run(_measure(options))
    return 0


def _measure_wakes(options: argparse.Namespace) -> int:
    """Measure sleeps and wakes, and print; the exit status."""
    shape = MODELS["middle"]
    settings: dict[str, Any] = {
        "model_loading_config": {"model_source": str(shape.folder())},
        "deployment_config": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 1}},
        # It sleeps by order alone.
        "scheduler": {"mode": "act", "policy": "pack", "epoch_s": 0.2, "linger_s": 1e6},
        "memory": {"budget_mib": 1 << 14},
        "ingress": {"no_replica_timeout_s": WAIT_S},
    }
    with mell(PORT, 1, **settings):
        asyncio.run(_table("wake", WakeTimes, options, _wake))
    return 0


async def _wake(number: int) -> WakeTimes:
    """Have the only replica sleep, and wake by a request."""
    async with ApiClient(f"http://127.0.0.1:{PORT}") as server:
        (replica,) = (await server.state())["replicas"]
        awake, ordered = memory_mb(replica["pids"][-1])["anonymous"], time.monotonic()
        await server.set_asleep("replicas", replica["id"], asleep=True)
        asleep = await _in_state(server, "ASLEEP", "asleep")
        resident = memory_mb(replica["pids"][-1])["anonymous"]
        print(f"anonymous memory of the worker: {awake:.0f} MB awake, {resident:.0f} MB asleep", flush=True)
        began = time.monotonic()
        waiting = OpenedStream(PORT, f"wake-{number}", prompt=32, output=4)
        running = await _in_state(server, "RUNNING", "settled")
        answer = await waiting.whole()
    return WakeTimes(asleep - ordered, running - began, answer.arrivals[0] - began)


async def _in_state(server: ApiClient, state: str, memory: str) -> float:
    """Wait until the only replica has that state; the time."""
    limit = time.monotonic() + WAIT_S
    while time.monotonic() < limit:
        (replica,) = (await server.state())["replicas"]
        if (replica["state"], replica["memory"]["state"]) == (state, memory):
            return time.monotonic()
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"the replica is not {state} after {WAIT_S} s")


async def _table(name: str, kind: type, options: argparse.Namespace, measure: Callable[[int], Awaitable[Any]]) -> None:
    """Measure `options.starts` times, and print each row and the medians."""
    names = [field.name.replace("_", " ") for field in fields(kind)]
    print(f"{name:14s}" + "".join(f"{each:>20s}" for each in names), flush=True)
    times: list[Any] = []
    for number in range(options.starts):
        await asyncio.sleep(options.pause)
        times.append(await measure(number))
        print(f"{number:<14d}" + "".join(f"{at:20.2f}" for at in astuple(times[-1])), flush=True)
    columns = zip(*map(astuple, times), strict=True)
    print(f"{'median [range]':14s}" + "".join(f"{spread(column, 2):>20s}" for column in columns))


async def _measure(options: argparse.Namespace) -> None:
    await _table("start", StartTimes, options, _start)
    await asyncio.sleep(options.pause)
    for owner, process in await _processes():
        print(f"memory of {owner}, {process.name()}: {sum(memory_mb(process.pid).values()):.0f} MB")


async def _processes() -> list[tuple[str, psutil.Process]]:
    """The processes of the replica and, if there is one, of the standby."""
    async with ApiClient(f"http://127.0.0.1:{PORT}") as server:
        (replica,) = (await server.state())["replicas"]
    node = Processes(replica["pids"][0])
    idle = [tree for process in node.titled(IDLE) if len(tree := node.tree(process.pid)) > 1]
    trees = {"the replica": node.tree(replica["pids"][0]), "the standby": [part for tree in idle for part in tree]}
    return [(owner, process) for owner, tree in trees.items() for process in tree]


async def _start(number: int) -> StartTimes:
    """Have the only replica replaced, and wait for its successor's first token."""
    async with Admin(PORT) as admin, ApiClient(f"http://127.0.0.1:{PORT}") as server:
        (old,) = await admin.replicas()
        ordered = time.monotonic()
        await admin.drain(old)
        waiting = OpenedStream(PORT, f"start-{number}", prompt=32, output=4)
        while not (found := await _running(server, old)):
            if time.monotonic() - ordered > WAIT_S:
                raise TimeoutError(f"no replica runs {WAIT_S} s after the order")
            await asyncio.sleep(POLL_S)
        running = time.monotonic()
        answer = await waiting.whole()
    marks = [_started(pid) for pid in found["pids"]] + [running, answer.arrivals[0]]
    return StartTimes(*(mark - ordered for mark in marks))


async def _running(server: ApiClient, old: str) -> dict[str, Any] | None:
    """The successor of `old` in the server's state, None until it runs."""
    replicas = (await server.state())["replicas"]
    return next((r for r in replicas if r["id"] != old and r["state"] == "RUNNING" and r["pids"]), None)


def _started(pid: int) -> float:
    """The start of a process by the monotonic clock, in seconds."""
    ticks = identity_of(pid).started / os.sysconf("SC_CLK_TCK")
    return ticks + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    sys.exit(main())

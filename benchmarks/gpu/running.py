"""Plays a part: starts its servers at once, gives each step its share of the time, and ends everything in time."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path

from tqdm import tqdm

from benchmarks.gpu.bench import BARE_PORT, MELL_PORT, Allotment, Bench, PartStep
from benchmarks.gpu.plan import RunPart, ServerSet
from benchmarks.gpu.record import FailureRow, PartRow, RunRecord, StartRow
from benchmarks.servers import StartLimit, bare_vllm, mell

END_S = 15.0
"""Kept of a part's time for the end of its servers, in seconds."""
GRACE_S = 5.0
"""The time that a step may take beyond its share, before it is cancelled."""
STEPS_S = 15.0
"""Kept of a part's time for its steps: a start that takes longer is given up."""


def play(part: RunPart, record: RunRecord, folder: Path, after_step: Callable[[], None] = lambda: None) -> PartRow:
    """Run a part; its rows, and those of its failures, are added to the record. `after_step` is called after each.

    An interrupt (KeyboardInterrupt) ends the servers, and fails the part in the record, before it is raised.
    """
    began = time.monotonic()
    try:
        with open_servers(part, record, folder):
            ends, whole = began + part.limit_s - END_S, True
            for i, step in enumerate(tqdm(part.steps, desc=part.name, unit="step")):
                time_ = Allotment(share(part.steps[i:], ends - time.monotonic()))
                whole = run_step(step, part, time_, record, folder) and whole
                after_step()
    except (Exception, KeyboardInterrupt) as error:
        record.add(FailureRow(part.name, "servers", f"{type(error).__name__}: {error}"[-3000:]))
        record.add(outcome := PartRow(part.name, "failed", _since(began)))
        if isinstance(error, KeyboardInterrupt):
            raise
        return outcome
    record.add(outcome := PartRow(part.name, "whole" if whole else "cut", _since(began)))
    return outcome


def share(steps: Sequence[PartStep], left_s: float) -> float:
    """The seconds of the first step, by its weight among those that follow."""
    return max(0.0, left_s) * steps[0].weight / sum(step.weight for step in steps)


def run_step(step: PartStep, part: RunPart, time_: Allotment, record: RunRecord, folder: Path) -> bool:
    """Run one step; True if it did all its turns without an error."""
    bench = make_bench(part, time_, record, folder)
    name = type(step).__name__
    try:
        asyncio.run(_within(step, bench, time_.left_s + GRACE_S))
    except Exception as error:
        record.add(FailureRow(part.name, name, f"{type(error).__name__}: {error}"[-3000:]))
        return False
    return not time_.cut


async def _within(step: PartStep, bench: Bench, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        await step.run(bench)


def make_bench(part: RunPart, time_: Allotment, record: RunRecord, folder: Path) -> Bench:
    """The surroundings of a step of the part."""
    servers = part.servers
    if servers is None:
        return Bench(part.name, None, record, folder, time_)
    transport = servers.settings["transport"]
    where = servers.conditions, transport, servers.gpu_slots_mib
    return Bench(part.name, servers.shared_rig, record, folder, time_, *where)


@contextlib.contextmanager
def open_servers(part: RunPart, record: RunRecord, folder: Path) -> Iterator[None]:
    """Start the part's servers, all at once: most of a start is imports. Their output goes to `folder`.

    One that fails, and an interrupt, end the starts of the others.

    Raises:
        RuntimeError: a server does not become healthy.
    """
    if part.servers is None:
        yield
        return
    began, limit = time.monotonic(), StartLimit(max(0.0, part.limit_s - END_S - STEPS_S))
    with ThreadPoolExecutor() as pool:
        starts: list[tuple[AbstractContextManager[int], Future[int]]] = []
        try:
            for server in _servers(part.servers, part.name, folder, limit):
                starts.append((server, pool.submit(server.__enter__)))
            for start in wait([start for _, start in starts], return_when=FIRST_EXCEPTION).done:
                start.result()
            names = "Mell and vLLM's server" if part.servers.bare else "Mell"
            record.add(StartRow(f"{names}, {part.servers.replicas} replica(s)", part.servers.conditions, _since(began)))
            yield
        finally:
            limit.give_up()
            running = [server for server, start in starts if start.exception() is None]
            for end in [pool.submit(server.__exit__, None, None, None) for server in running]:
                end.result()


def _servers(servers: ServerSet, name: str, folder: Path, limit: StartLimit) -> list[AbstractContextManager[int]]:
    rig = servers.shared_rig
    found: list[AbstractContextManager[int]] = [
        mell(MELL_PORT, servers.replicas, rig, folder / f"{name}-mell.log", limit, migration=servers.settings)
    ]
    if servers.bare:
        found.append(bare_vllm(BARE_PORT, rig, folder / f"{name}-vllm.log", limit=limit))
    return found


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)

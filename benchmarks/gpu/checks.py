"""Steps without servers, as processes of their own: the tests for GPUs, the stages of a move, NCCL. And the memory.

A process that has used a GPU keeps a context on it, so the command itself never does.
"""

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from app.client.api import ApiClient
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.record import MemoryRow, NcclRow, Spread, StageRow, SuiteRow
from benchmarks.servers import ROOT
from migration.protocol.sizing import MIB

TESTS = ("tests/gpu", "tests/migration/test_cupy_surface.py")
OWNERS = ("replica", "engine core", "worker")
"""The processes of a replica in the order of its pids; all further ones are workers."""

_SKIPPED = re.compile(r"^SKIPPED (.*)$", re.MULTILINE)


async def run_process(bench: Bench, name: str, command: Sequence[str]) -> tuple[int, str]:
    """Run a command in the project's folder, within the step's time; its exit status and output. Kept as a log, too."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(bench.time.left_s):
            raw, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = raw.decode(errors="replace")
    (bench.folder / f"{name}.log").write_text(text)
    return process.returncode or 0, text


@dataclass(frozen=True, slots=True)
class RunTests:
    """Run the project's tests for GPUs."""

    weight: float = 4.0

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        command = [sys.executable, "-m", "pytest", *TESTS, "-q", "-rs", "-p", "no:cacheprovider"]
        status, text = await run_process(bench, "tests", command)
        summary = text.strip().rpartition("\n")[2].strip("= ")
        bench.record.add(SuiteRow(f"pytest {' '.join(TESTS)}", summary, _SKIPPED.findall(text), status == 0))


@dataclass(frozen=True, slots=True)
class MeasureStages:
    """Run `benchmarks.gpu.stages`."""

    repeat: int = 20
    weight: float = 2.0

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        file = bench.folder / "stages.json"
        command = [sys.executable, "-m", "benchmarks.gpu.stages", "--repeat", str(self.repeat), "--json", str(file)]
        status, text = await run_process(bench, "stages", command)
        if status:
            raise RuntimeError(text[-1000:])
        for row in stage_rows(json.loads(file.read_text())):
            bench.record.add(row)


def stage_rows(measured: Mapping[str, Any]) -> list[StageRow]:
    """The rows of a file of `benchmarks.gpu.stages`."""
    rates: list[tuple[str, int, list[float]]] = [("copy", 0, [measured["copy_1_gib_gb_s"]])]
    for mib, stages in measured["seconds"].items():
        size = int(mib) * MIB / 1e9
        rates += [(stage, int(mib), [size / s for s in took]) for stage, took in stages.items() if stage != "open"]
    spreads = [(stage, mib, Spread.of(values)) for stage, mib, values in rates]
    return [StageRow(stage, mib, spread) for stage, mib, spread in spreads if spread is not None]


@dataclass(frozen=True, slots=True)
class CheckNccl:
    """Run the checks of `benchmarks.gpu.nccl`."""

    weight: float = 1.0

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        _, text = await run_process(bench, "nccl", [sys.executable, "-m", "benchmarks.gpu.nccl"])
        found = [line.split(": ", 1) for line in text.splitlines() if line.startswith("NCCL ")]
        if not found:
            raise RuntimeError(text[-1000:])
        for check, result in found:
            bench.record.add(NcclRow(check.removeprefix("NCCL "), result))


@dataclass(frozen=True, slots=True)
class MeasureMemory:
    """Read the memory of the replicas' processes: that on the GPU, or without a GPU their unshared memory."""

    weight: float = 0.1

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        async with ApiClient(f"http://127.0.0.1:{bench.mell_port}") as server:
            replicas = (await server.state())["replicas"]
        owners = {
            pid: f"{OWNERS[min(i, len(OWNERS) - 1)]} {number}"
            for number, replica in enumerate(replicas)
            for i, pid in enumerate(replica["pids"])
        }
        if bench.rig is None or bench.rig.device == "cpu":
            for pid, owner in owners.items():
                mib = psutil.Process(pid).memory_full_info().uss / MIB
                bench.record.add(MemoryRow(bench.conditions, owner, "unshared memory", round(mib, 1)))
            return
        query = ["nvidia-smi", "--format=csv,noheader,nounits"]
        _, text = await run_process(bench, "memory", [*query, "--query-compute-apps=pid,used_gpu_memory"])
        for owner, mib in by_owner(text, owners):
            slots = bench.slots_mib if owner.startswith("replica") else 0.0
            bench.record.add(MemoryRow(bench.conditions, owner, "GPU memory", mib, slots))
        _, text = await run_process(bench, "memory-total", [*query, "--query-gpu=memory.used"])
        for number, line in enumerate(text.split()):
            bench.record.add(MemoryRow(bench.conditions, f"GPU {number}", "GPU memory in use", float(line)))


def by_owner(text: str, owners: Mapping[int, str]) -> list[tuple[str, float]]:
    """The MiB of each process in a list of nvidia-smi's, of lines `PID, MIB`.

    In a container the ids may be of another namespace, or the memory may be missing (`[N/A]`); such processes have no
    name, or are left out.
    """
    found = []
    for line in text.splitlines():
        pid, _, mib = (word.strip() for word in line.partition(","))
        with contextlib.suppress(ValueError):
            found.append((owners.get(int(pid), "unnamed process"), float(mib)))
    return found

"""The parts of a run: servers, and the steps that measure them, the most important part first; pure.

A part takes at most `PART_S` with the start and the end of its servers. The first `FIRST` parts on one GPU together
take at most `FIRST_S`, the time for which GPUs are lent. A start takes 100 s on an H100, so steps that need the same
servers are one part; no two parts have the same servers. A drain or a kill is the last step of its part: it changes the
replicas, which the other steps count on.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.gpu.bench import PartStep
from benchmarks.gpu.checks import CheckNccl, MeasureMemory, MeasureStages, RunTests
from benchmarks.gpu.equality import CompareMoved, CompareStock
from benchmarks.gpu.faults import Strike
from benchmarks.gpu.moving import MeasureMoves, MeasureNeighbours
from benchmarks.gpu.serving import MeasureServing
from benchmarks.instruments.moved import STOP_AND_COPY
from benchmarks.servers import Rig
from deployments.config import MAPPED, ON_GPU
from migration.protocol.sizing import GPU_CHUNK, HOST_CHUNK, MAPPED_SLOTS, SENT_SLOTS

PART_S = 480
FIRST, FIRST_S = 3, 840
_START_S, _ROUND_S = 100, 50
"""Seconds of a start, and of one round of a part's steps with the end of its servers."""


@dataclass(frozen=True, slots=True)
class ServerSet:
    """The servers of a part, all started at once: Mell with `replicas`, and vLLM's own if `bare`.

    `migration` are settings of Mell. On a CPU, transports of GPUs become `shared`.
    """

    rig: Rig
    replicas: int
    bare: bool = False
    migration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shared_rig(self) -> Rig:
        """The rig, with the number of engines that run at once."""
        return self.rig.sharing(self.replicas + self.bare)

    @property
    def settings(self) -> dict[str, Any]:
        """Mell's settings of migrations."""
        return {**self.shared_rig.mell_settings().get("migration", {"transport": "shared"}), **self.migration}

    @property
    def slots(self) -> tuple[int, int]:
        """The number and the MiB of the staging slots of each worker."""
        chosen = self.settings
        count = MAPPED_SLOTS if chosen["transport"] in MAPPED else SENT_SLOTS
        chunk = GPU_CHUNK if self.rig.device == "cuda" else HOST_CHUNK
        return int(chosen.get("slots", count)), int(chosen.get("slot_mib", chunk >> 20))

    @property
    def gpu_slots_mib(self) -> float:
        """MiB of staging slots on each GPU."""
        count, mib = self.slots
        return float(count * mib) if self.settings["transport"] in ON_GPU else 0.0

    @property
    def conditions(self) -> str:
        """The conditions, for captions."""
        shown = ("transport", "slot_mib", "slots")
        more = "".join(f", {name}: {value}" for name, value in self.migration.items() if name not in shown)
        count, mib = self.slots
        return f"{self.shared_rig}; {self.settings['transport']}, {count} slots of {mib} MiB{more}"


@dataclass(frozen=True, slots=True)
class RunPart:
    """Servers and steps. `purpose` is a sentence for the list of parts; it needs `gpus` GPUs."""

    name: str
    purpose: str
    limit_s: float
    steps: Sequence[PartStep]
    servers: ServerSet | None = None
    gpus: int = 1

    @property
    def least_s(self) -> float:
        """The shortest time, in seconds, in which the part gives rows."""
        return min(self.limit_s, _ROUND_S if self.servers is None else _START_S + _ROUND_S)


def full_plan(rig: Rig) -> list[RunPart]:
    """The parts of a run on the rig's device."""
    parts = _on_gpus(rig) if rig.device == "cuda" else _on_cpu(rig)
    return [part for part in parts if part.gpus <= max(1, rig.gpus)]


def _on_gpus(rig: Rig) -> list[RunPart]:
    small, large = replace(rig, model="small"), replace(rig, model="8b")
    moves = (512, 2048, 8192, 24576)
    return [
        RunPart(
            "serving",
            "throughput and latency beside vLLM's own server at 16, 64 and 256 streams (8B shape)",
            230,
            (MeasureServing((16, 64, 256)),),
            ServerSet(large, 1, bare=True),
        ),
        RunPart(
            "moves",
            "pause and copying against the context, neighbours, memory, a drain (8B shape, cuda_ipc)",
            300,
            (
                MeasureMoves(moves, weight=3.0),
                MeasureNeighbours(8192),
                MeasureMemory(),
                Strike("drain", weight=0.5),
            ),
            ServerSet(large, 2),
        ),
        RunPart(
            "texts-invariant",
            "moved against unmoved texts with controls, batch-invariant kernels; kill -9 of a replica",
            310,
            (CompareMoved(rounds=2), CompareStock(rounds=2), Strike("kill", back_s=80)),
            ServerSet(replace(small, invariant=True), 2, bare=True),
        ),
        RunPart(
            "checks",
            "the tests for GPUs, the stages of a move without an engine, NCCL",
            160,
            (RunTests(), MeasureStages(), CheckNccl()),
        ),
        RunPart(
            "texts",
            "moved against unmoved texts with controls, vLLM's usual kernels",
            200,
            (CompareMoved(rounds=1), CompareStock(rounds=1)),
            ServerSet(small, 2, bare=True),
        ),
        RunPart(
            "shared",
            "pause and copying against the context over `shared`, through host memory",
            150,
            (MeasureMoves((512, 8192, 24576), ("pre-copy",), repeat=3),),
            ServerSet(large, 2, migration={"transport": "shared"}),
        ),
        RunPart(
            "moves-256",
            "pause and copying with slots of 256 MiB",
            170,
            (MeasureMoves((8192, 24576), ("pre-copy",), repeat=3),),
            ServerSet(large, 2, migration={"transport": "cuda_ipc", "slots": 4, "slot_mib": 256}),
        ),
        RunPart(
            "stop-and-copy",
            "the pause without copying beforehand",
            190,
            (MeasureMoves(moves, ("stop-and-copy",), repeat=3),),
            ServerSet(large, 2, migration={"transport": "cuda_ipc", **STOP_AND_COPY}),
        ),
        RunPart(
            "nccl",
            "pause and copying over NCCL between two GPUs, neighbours",
            300,
            (MeasureMoves(moves, weight=3.0), MeasureNeighbours(8192)),
            ServerSet(large, 2, migration={"transport": "nccl"}),
            gpus=2,
        ),
    ]


def _on_cpu(rig: Rig) -> list[RunPart]:
    """The same parts without those that need a GPU's kernels, in sizes for two cores."""
    texts: tuple[PartStep, ...] = (
        CompareMoved(streams=4, prompt=200, output=150, rounds=1),
        CompareStock(streams=4, prompt=200, output=150, rounds=1),
    )
    moves = (
        MeasureMoves((256, 1024, 2048), repeat=3, weight=3.0),
        MeasureNeighbours(1024, rounds=2),
        MeasureMemory(),
        Strike("drain", streams=8, prompt=200, output=300),
    )
    return [
        RunPart(
            "serving",
            "throughput and latency beside vLLM's own server",
            240,
            (MeasureServing((4, 16), pairs=3),),
            ServerSet(rig, 1, bare=True),
        ),
        RunPart(
            "moves", "pause and copying against the context, neighbours, memory, a drain", 300, moves, ServerSet(rig, 2)
        ),
        RunPart(
            "texts",
            "moved against unmoved texts with controls; kill -9 of a replica",
            300,
            (*texts, Strike("kill", streams=8, prompt=200, output=300, back_s=60)),
            ServerSet(rig, 2, bare=True),
        ),
        RunPart("checks", "the tests for GPUs, which are all skipped", 60, (RunTests(),)),
    ]


def short_plan(rig: Rig) -> list[RunPart]:
    """One part with every step that servers are measured by, as small as it can be."""
    steps: tuple[PartStep, ...] = (
        MeasureMemory(),
        MeasureServing((2,), 16, 16, pairs=1),
        MeasureMoves((256,), repeat=1, output=80),
        MeasureNeighbours(256, per_replica=1, rounds=1, output=80),
        CompareMoved(2, 40, 60, rounds=1, kinds=(("kv", "greedy"),)),
        CompareStock(2, 40, 60, rounds=1, alone=1),
        Strike("drain", 2, 40, 200),
    )
    return [RunPart("short", "every step with servers, as small as can be", 300, steps, ServerSet(rig, 2, bare=True))]


def next_part(parts: Iterable[RunPart], done: Collection[str], left_s: float) -> RunPart | None:
    """The first part that is not done, with at most `left_s` seconds; None if that is less than its least time.

    A later part does not overtake: the parts are in the order of their importance.
    """
    part = next((part for part in parts if part.name not in done), None)
    if part is None or left_s < part.least_s:
        return None
    return replace(part, limit_s=min(part.limit_s, left_s))

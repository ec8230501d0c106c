"""The cost of moving KV blocks through GPU memory, stage by stage, as shares of the GPU's own copy bandwidth.

    python -m benchmarks.gpu.stages [--slot-mib 8 64 256] [--repeat 20] [--json FILE]

The cache has the shape of an 8B model's with grouped-query attention: 32 layers, 8 KV heads of 128, bfloat16, 16 tokens
per block (2 MiB), shuffled block tables, in the layout that vLLM prefers (LBNHC). Three processes, as in a replica and
its peer: one owns the staging slots; the source's worker and the target's worker map them through CUDA IPC.

    copy      torch copies one tensor of the slot's size to another
    gather    cache blocks into a slot, at the source's worker
    scatter   the slot into the cache, at the target's worker
    move      gather and scatter in sequence, called by the process that owns the slot: includes the messages
    nccl      with two GPUs: slot to slot through Mell's collective transport, between two Ray actors

Every stage waits for the GPU, as in a migration. Figures are GB/s of the blocks' bytes, medians; shares are relative to
a copy of 1 GiB. Without a GPU it prints the reason and exits with status 2.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.load import spread
from benchmarks.transfer.gpu_ends import CacheShape, NcclReplica, WorkerProcess
from migration.kv.device import DeviceSegment
from migration.kv.staging import HEADER
from migration.protocol.sizing import MIB

STAGES = ("copy", "gather", "scatter", "move")


def measure(
    shape: CacheShape, device: str, slot_bytes: int, repeat: int, prepare: Callable[[], object] | None = None
) -> dict[str, list[float]]:
    """Measure the seconds of every stage for one full slot, and of mapping it ("open").

    Raises:
        RuntimeError: the target's blocks are not the source's.
    """
    count = slot_bytes // shape.block_bytes
    size = count * shape.block_bytes
    segment = DeviceSegment.create(HEADER + size)
    source, target = (WorkerProcess(shape, device, seed, prepare) for seed in (1, 2))
    try:
        source("fill")
        runs: dict[str, list[float]] = {stage: [] for stage in STAGES}
        runs["open"] = [end("open", segment.path) for end in (source, target)]
        for turn in range(repeat + 1):
            began = time.perf_counter()
            gathered, ticket = source("gather", count, segment.path)
            scattered = target("scatter", count, segment.path, ticket)
            took = time.perf_counter() - began, gathered, scattered, source("copy", size)
            if turn:
                for stage, seconds in zip(("move", "gather", "scatter", "copy"), took, strict=True):
                    runs[stage].append(seconds)
            elif source("digest", count) != target("digest", count):
                raise RuntimeError("the target's blocks are not the source's")
        return runs
    finally:
        for end in (source, target):
            end.close()
        segment.close()


async def between_gpus(slot_bytes: int, repeat: int) -> list[float]:
    """Seconds of each transfer after the first one, which also connects the two."""
    import ray

    source, target = (ray.remote(num_cpus=0, num_gpus=1)(NcclReplica).remote(slot_bytes) for _ in range(2))
    channels = await source.channels.remote(repeat + 1)
    _, received = await asyncio.gather(source.send.remote(channels), target.receive.remote(channels))
    for end in (source, target):
        ray.kill(end)
    return list(received[1:])


def machine() -> list[str]:
    """One line per GPU, and one for the versions of the software; without a GPU, one line with the reason."""
    try:
        import cupy
        from cupy.cuda import nccl

        runtime = cupy.cuda.runtime
        count: int = runtime.getDeviceCount()
        gpus = [runtime.getDeviceProperties(i) for i in range(count)]
        versions = f"CUDA driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}"
        lines = [f"GPU {i}: {gpu['name'].decode()}, {gpu['totalGlobalMem'] >> 30} GiB" for i, gpu in enumerate(gpus)]
        return [*lines, f"{versions}; torch {torch.__version__}, CuPy {cupy.__version__}, NCCL {nccl.get_version()}"]
    except Exception as error:
        return [f"no CUDA device: {error}"]


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slot-mib", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lines = machine()
    if len(lines) == 1:
        sys.exit(_not_measured(lines[0]))
    print("\n".join(lines))
    shape = CacheShape()
    results = {mib: measure(shape, "cuda", mib * MIB, options.repeat) for mib in options.slot_mib}
    if len(lines) > 2:
        import ray

        ray.init(num_gpus=2, include_dashboard=False, logging_level="warning")
        for mib, runs in results.items():
            runs["nccl"] = asyncio.run(between_gpus(mib * MIB, options.repeat))
        ray.shutdown()
    reference = _bandwidth(shape, options.repeat)
    _print(results, reference)
    if options.json:
        raw = {"machine": lines, "copy_1_gib_gb_s": reference, "seconds": results}
        options.json.write_text(json.dumps(raw, indent=1))


def _not_measured(reason: str) -> int:
    print(f"{reason}; nothing was measured", file=sys.stderr)
    return 2


def _bandwidth(shape: CacheShape, repeat: int) -> float:
    """GB/s of a copy of 1 GiB, in a worker process."""
    small = CacheShape(shape.layers, 1, shape.heads, shape.tokens, shape.content)
    worker = WorkerProcess(small, "cuda", 1, None)
    took: float = statistics.median(worker("copy", 1 << 30) for _ in range(repeat))
    worker.close()
    return (1 << 30) / took / 1e9


def _print(results: dict[int, dict[str, list[float]]], reference: float) -> None:
    print(f"\ncopy of 1 GiB: {reference:.0f} GB/s; below: GB/s, median [min, max], and the share of this copy")
    print(f"{'':10}" + "".join(f"{f'slot of {mib} MiB':>32}" for mib in results))
    for stage in next(iter(results.values())):
        if stage == "open":
            continue
        rates = [[mib * MIB / seconds / 1e9 for seconds in runs[stage]] for mib, runs in results.items()]
        cells = [f"{spread(rate, 0)} ({statistics.median(rate) / reference:.2f})" for rate in rates]
        print(f"{stage:10}" + "".join(f"{cell:>32}" for cell in cells))
    opens = [seconds * 1e3 for runs in results.values() for seconds in runs["open"]]
    print(f"mapping a segment, once per process, including CuPy's import: {spread(opens, 1)} ms")


if __name__ == "__main__":
    main()

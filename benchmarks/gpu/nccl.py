"""The behaviour of NCCL on this machine: `python -m benchmarks.gpu.nccl` prints one line per check.

With one GPU: the version, the time to make and to abort a communicator of one rank, and the refusal of two ranks on one
GPU. Transfers between two GPUs are in tests/gpu, `benchmarks.gpu.stages` and the part `nccl`.
"""

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

LIMIT_S = 40.0


def single_rank() -> str:
    """Make and abort a communicator of one rank, which nothing uses."""
    from cupy.cuda import nccl

    began = time.perf_counter()
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    made = time.perf_counter()
    communicator.abort()
    return f"made in {made - began:.2f} s, aborted in {time.perf_counter() - made:.2f} s"


def join(pipe: Connection, identity: bytes, rank: int) -> None:
    """Join a communicator of two ranks on the first GPU, and send the result."""
    from cupy.cuda import nccl

    began = time.perf_counter()
    try:
        nccl.NcclCommunicator(2, identity, rank)
        result = "made"
    except Exception as error:
        result = f"refused, {error}"
    pipe.send(f"{result} after {time.perf_counter() - began:.2f} s")


def two_ranks(limit_s: float = LIMIT_S) -> list[str]:
    """The results of two processes that join one communicator on the first GPU, "hung" for one without a result."""
    from cupy.cuda import nccl

    spawn = multiprocessing.get_context("spawn")
    identity, results, ends = nccl.get_unique_id(), [], []
    for rank in range(2):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=join, args=(theirs, identity, rank), daemon=True)
        process.start()
        ends.append((process, ours))
    deadline = time.monotonic() + limit_s
    for process, pipe in ends:
        results.append(str(pipe.recv()) if pipe.poll(max(0.0, deadline - time.monotonic())) else "hung")
        process.kill()
    return results


def main() -> int:
    """Print the checks; exit status 2 without a GPU."""
    try:
        import cupy
        from cupy.cuda import nccl

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        print(f"no CUDA device: {error}", file=sys.stderr)
        return 2
    print(f"NCCL version: {nccl.get_version()}, {count} GPU(s)", flush=True)
    print(f"NCCL single rank: {single_rank()}", flush=True)
    for rank, result in enumerate(two_ranks()):
        print(f"NCCL two ranks on one GPU, rank {rank}: {result}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

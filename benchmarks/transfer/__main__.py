"""The speed of moving KV blocks: bytes per second of each stage, and of the whole pipeline, on this machine.

    python -m benchmarks.transfer [--mib 1 4 16 64 256] [--transport shared collective] [--repeat 7]
                                  [--device cuda] [--slot-mib 8] [--json FILE]

Two Ray actors take the place of two replicas. Each has a KV cache like the tiny model's on a CPU (4 layers of 32 KiB
per block, shuffled block tables), Mell's staging slots and a real transport, but no engine. The single stages:

    memcpy        torch copies a tensor to another one, both warm, in one thread
    tcp           sendall / recv_into over one loopback connection between the actors
    gather        cache blocks into staging slots, at the source
    send          the transport's send and receive, slot to slot (not with mapped slots)
    scatter       staged blocks into the cache, at the target

The pipeline is the code that migrates requests, `SourceRun` with `TargetRun`, from the first gather to the target's
confirmation of the last chunk. Gather and scatter have one thread each, as an engine's worker has one copier. A chunk
has the size of a slot, so stages of a transfer that fits into one slot cannot overlap.

Stages and pipeline are measured in turns. Figures are medians; shares are ratios of medians of the same run.
With `--device cuda` the caches are in GPU memory, and so are the slots of `cuda_ipc` and `nccl`.
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import ray

from benchmarks.load import spread
from benchmarks.servers import ENV, ROOT, transports_of
from benchmarks.transfer.pair import PIPELINE, EndPair, StageTiming
from migration.protocol.sizing import MIB

YARDSTICKS = ("memcpy", "tcp")


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    transports = transports_of("cuda")
    parser.add_argument("--transport", nargs="+", choices=transports, default=["shared", "collective"])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the caches are")
    parser.add_argument("--gpus", type=int, default=1, help="with cuda: the GPUs that both ends share")
    parser.add_argument("--slot-mib", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not set(options.transport) <= set(transports_of(options.device)):
        parser.error(f"--transport {' '.join(options.transport)} needs --device cuda")
    os.environ.update(ENV | {"PYTHONPATH": str(ROOT)})
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning")
    results: dict[str, dict[int, dict[str, list[StageTiming]]]] = {}
    for transport in options.transport:
        pair = EndPair(transport, max(options.mib) * MIB, options.device, options.slot_mib, options.gpus)
        results[transport] = {mib: pair.measure(mib * MIB, options.repeat) for mib in options.mib}
        pair.close()
    ray.shutdown()
    for transport, by_size in results.items():
        _print(transport, by_size)
    if options.json:
        raw = {
            t: {m: {s: [asdict(r) for r in v] for s, v in x.items()} for m, x in b.items()} for t, b in results.items()
        }
        options.json.write_text(json.dumps(raw, indent=1))


def _print(transport: str, by_size: Mapping[int, Mapping[str, Sequence[StageTiming]]]) -> None:
    cores = len(os.sched_getaffinity(0))
    print(f"\n{transport}, {cores} cores: GB/s, median [min, max]; cores busy at the largest size")
    names = list(next(iter(by_size.values())))
    print(f"{'':10}" + "".join(f"{f'{mib} MiB':>21}" for mib in by_size) + f"{'cores':>8}")
    for name in names:
        rates = [[mib * MIB / run.took_s / 1e9 for run in runs[name]] for mib, runs in by_size.items()]
        busy = statistics.median(run.cpu_s / run.took_s for run in by_size[max(by_size)][name])
        print(f"{name:10}" + "".join(f"{spread(rate, 2):>21}" for rate in rates) + f"{busy:8.1f}")
    print(f"{PIPELINE} as a share of")
    shares = {mib: _shares(runs, cores) for mib, runs in by_size.items()}
    for share in next(iter(shares.values())):
        print(f"  {share:28}" + "  ".join(f"{mib} MiB {shares[mib][share]:.2f}" for mib in by_size))


def _shares(runs: Mapping[str, Sequence[StageTiming]], cores: int) -> dict[str, float]:
    """The pipeline's rate over the rate of each possible bound."""
    took = {name: statistics.median(run.took_s for run in all_) for name, all_ in runs.items()}
    cpu = {name: statistics.median(run.cpu_s for run in all_) for name, all_ in runs.items()}
    stages = [name for name in runs if name not in (*YARDSTICKS, PIPELINE)]
    slowest = max(took[name] for name in stages)
    return {
        "the slowest stage alone": slowest / took[PIPELINE],
        f"stages on {cores} cores": max(slowest, sum(cpu[name] for name in stages) / cores) / took[PIPELINE],
        "stages one after another": sum(took[name] for name in stages) / took[PIPELINE],
        **{name: took[name] / took[PIPELINE] for name in YARDSTICKS},
    }


if __name__ == "__main__":
    main()

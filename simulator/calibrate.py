"""Fits a cost file to measured profiles: `python -m simulator.calibrate --profiles DIR ... --out FILE`.

Profiles are CSV files of step times and of transfer times:

    vidur_linear_<gpu>_<model>.csv   tensor_parallel,num_tokens,model_ms: a step without its attention over the context
    splitwise_perf.csv               model,hardware,tensor_parallel,prompt_size,batch_size,prompt_ms,token_ms
    vidur_sendrecv_<link>.csv        devices_per_node,bytes,median_ms (2 devices: within a node, 1: between nodes)
    apex_sendrecv_<link>.csv         num_nodes,size(kb),time(us)

For a model or a GPU without a profile, another one's profile is scaled: the time to read the weights by their size and
the memory bandwidth, the time to compute by the number of parameters and the GPU's arithmetic speed. The costs without
any profile (reading the KV cache, attention) follow from the shape of the model and the data sheet of the GPU. The cost
file gives the provenance of each figure.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from policies.cost.steps import Knots
from simulator.costs.costs import ComputeCosts, Costs, LinkCosts, MigrationCosts, write_costs
from simulator.costs.fits import brief, fit_knots, fit_link
from simulator.costs.hardware import GPUS, MODELS, STATED_LINKS, Gpu, Model
from simulator.costs.profiles import Profiles
from simulator.errors import BadInput, require_not_negative

Hardware = TypeVar("Hardware", Model, Gpu)

SIZES = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Step sizes, in tokens, at which the fitted line has its corners."""
READS = 0.8
"""Share of the memory bandwidth that reading the KV cache reaches. Assumed."""
ATTENDS = 0.5
"""Speed of attention's arithmetic relative to the matrix products in the same prefill. Assumed."""
OVERHEAD_S = 0.002
"""Seconds of every step beyond the profiled parts: scheduling, sampling, launching. Assumed."""
HANDOVER_S = 0.01
"""Seconds of a hand-over: a few messages between two replicas. Assumed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the cost file. Returns exit status 0, or 2 for bad input, with the reason on stderr."""
    given = _parser().parse_args(argv)
    try:
        write_costs(calibrate(given), given.out)
    except (BadInput, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def calibrate(given: argparse.Namespace) -> Costs:
    """The costs for a parsed command line."""
    require_not_negative("start-up time", given.startup_s)
    model, gpu = _hardware(given.model, MODELS, "model"), _hardware(given.gpu, GPUS, "GPU")
    profiles = Profiles(given.profiles)
    compute, provenance = _compute(given, profiles, model, gpu)
    intra, intra_from = _link(profiles, given.link, within_node=True)
    inter, inter_from = _link(profiles, given.uplink or given.link, within_node=False)
    provenance |= {
        "migration.intra": intra_from,
        "migration.inter": inter_from,
        "migration.kv_bytes": f"shape of {given.model}, 16 bits",
        "migration.handover_s": "assumed",
        "startup_s": "assumed",
    }
    migration = MigrationCosts(intra, inter, model.kv_bytes, handover_s=HANDOVER_S)
    name = given.name or given.out.stem
    return Costs(name, provenance, slots=False, startup_s=given.startup_s, compute=compute, migration=migration)


def _compute(
    given: argparse.Namespace, profiles: Profiles, model: Model, gpu: Gpu
) -> tuple[ComputeCosts, dict[str, str]]:
    """Step times, measured or scaled, and their provenance."""
    measured_model, measured_gpu = given.measured_model or given.model, given.measured_gpu or given.gpu
    timings, whole = profiles.steps(measured_model, measured_gpu, given.tensor_parallel)
    bigger = model.parameters / _hardware(measured_model, MODELS, "model").parameters
    measured_on = _hardware(measured_gpu, GPUS, "GPU")
    reading = bigger * measured_on.bytes_per_s / gpu.bytes_per_s
    computing = bigger * measured_on.flops_per_s / gpu.flops_per_s
    fitted = fit_knots(timings, SIZES)
    if len(fitted) < 2:
        raise BadInput(f"The profile of {measured_model} on {measured_gpu} has too few step times near {SIZES} tokens.")
    knots = scaled(fitted, reading, computing)
    source = f"measured: {measured_model} on {measured_gpu}, tensor parallel {given.tensor_parallel}"
    if (measured_model, measured_gpu) != (given.model, given.gpu):
        source += f"; scaled by {reading:.3f} for reading weights, by {computing:.3f} for computing"
    per_token = slope_of(knots)
    costs = ComputeCosts(
        linear=knots,
        overhead_s=0.0 if whole else OVERHEAD_S,
        context_s=brief(model.kv_bytes / (given.tensor_parallel * gpu.bytes_per_s * READS)),
        attention_s=0.0 if whole else brief(per_token * model.attention_share / ATTENDS),
    )
    return costs, {
        "compute.linear": source,
        "compute.overhead_s": "contained in linear" if whole else "assumed",
        "compute.context_s": f"KV bytes over {READS:.0%} of the memory bandwidth in the GPU's data sheet",
        "compute.attention_s": "contained in linear" if whole else "arithmetic at half the speed of matrix products",
        "compute.chunk_tokens": "default of vLLM",
        "compute.watermark": "default of vLLM",
    }


def scaled(knots: Knots, reading: float, computing: float) -> Knots:
    """Scale the least time of a step by `reading`, and the time that tokens add to it by `computing`."""
    base = knots[0][1]
    return tuple((tokens, brief(base * reading + (seconds - base) * computing)) for tokens, seconds in knots)


def slope_of(knots: Knots) -> float:
    """Seconds per token in large steps: the slope between the last two corners."""
    (n0, t0), (n1, t1) = knots[-2:]
    return (t1 - t0) / (n1 - n0)


def _link(profiles: Profiles, name: str, within_node: bool) -> tuple[LinkCosts, str]:
    if name in STATED_LINKS:
        return STATED_LINKS[name], f"assumed: {name}"
    try:
        return fit_link(profiles.transfers(name, within_node)), f"measured: {name}"
    except ValueError as error:
        raise BadInput(f"The profile of {name} cannot be used: {error}.") from None


def _hardware(name: str, table: Mapping[str, Hardware], kind: str) -> Hardware:
    if name not in table:
        raise BadInput(f"There is no {kind} {name}, only {', '.join(table)}.")
    return table[name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator.calibrate", description="Fit a cost file to profiles.")
    add = parser.add_argument
    add("--profiles", type=Path, required=True, metavar="DIR", help="folder of the profiles")
    add("--model", required=True, help=f"the served model: {', '.join(MODELS)}")
    add("--gpu", required=True, help=f"the GPU: {', '.join(GPUS)}")
    add("--measured-model", metavar="MODEL", help="model of the profile, scaled to --model (default: --model)")
    add("--measured-gpu", metavar="GPU", help="GPU of the profile, scaled to --gpu (default: --gpu)")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs per replica (default: 1)")
    links = f"a profile, or one of {', '.join(STATED_LINKS)}"
    add("--link", required=True, metavar="NAME", help=f"link between replicas of a node: {links}")
    add("--uplink", metavar="NAME", help=f"link between nodes: {links} (default: that of --link)")
    add("--startup-s", type=float, default=30.0, metavar="S", help="start-up time of a replica (default: 30)")
    add("--name", help="name of the costs (default: name of the file)")
    add("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The command-line options of the simulator. `simulator.command.order` checks their values."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from policies.decision.limits import Sizes
from policies.precedence import OVERTAKE_S
from policies.prefix.routing import Routing
from simulator.costs.costs import shipped_costs
from simulator.traces.formats import TRACE_HELP
from simulator.workload.lengths import SHIPPED
from simulator.workload.sessions import SHAPES

CAPACITY = 13698
"""KV cache of Llama 2 13B on a GPU with 40 GB, in tokens: the paper's."""
WARMUP_S = 600.0
PLAN_COSTS = "a100-40g-13b-pcie"
"""The costs of a plan without others: those of that model on that GPU."""

WORKLOAD_HELP = """Arrival times and lengths of the requests. Prompts are cut to half of the capacity, prompt and output
together to the capacity."""


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    whole = argparse.ArgumentParser(
        prog="python -m simulator",
        description="Play a workload through placement policies in virtual time.",
    )
    whole.add_argument("--list-policies", action="store_true", help="list the policies and exit")
    whole.add_argument(
        "--recording",
        type=Path,
        metavar="FILE",
        help="decide the recorded epochs of a live scheduler again, compare the plans and exit",
    )
    whole.add_argument(
        "--plan",
        action="store_true",
        help="the answer of `mell plan`: the GPUs that a service level takes, with Mell and with other autoscalers",
    )
    _add_models(whole)
    workload = whole.add_argument_group("workload", WORKLOAD_HELP)
    workload.add_argument("--trace", type=Path, metavar="FILE", help=TRACE_HELP)
    workload.add_argument(
        "--poisson", type=float, metavar="RATE", help="instead of a trace: random arrivals, RATE requests per second"
    )
    workload.add_argument(
        "--sessions",
        choices=list(SHAPES),
        help="with --poisson: RATE sessions per second, of several requests with prompts that begin alike",
    )
    _add_requests(workload)
    policies = whole.add_argument_group("policies", "The limits apply to every policy.")
    _add_policies(policies)
    _add_level(policies)
    _add_classes(policies)
    cluster = whole.add_argument_group("cluster and time")
    _add_cluster(cluster)
    _add_epochs(cluster)
    _add_caches(cluster)
    output = whole.add_argument_group("runs and output")
    _add_output(output)
    output.add_argument("--series", action="store_true", help="write time series of every run to the JSON file, too")
    return whole


def _plan_parser() -> argparse.ArgumentParser:
    """The options of `mell plan`: those of the simulator that concern a plan, with the trace as an argument."""
    whole = argparse.ArgumentParser(
        prog="mell plan",
        description="The GPUs that a service level takes, with Mell, with other autoscalers, and at least.",
        epilog="Exit status: 0 success, 2 wrong usage or input, 130 interrupted.",
    )
    whole.add_argument(
        "trace", type=Path, metavar="TRACE|RECORDING", help=f"{TRACE_HELP}, or a recording of a scheduler"
    )
    _add_models(whole)
    _add_level(whole.add_argument_group("service level", "At least one of the two."))
    _add_classes(whole.add_argument_group("service classes", "A recording has its own."))
    _add_requests(whole.add_argument_group("workload", WORKLOAD_HELP))
    _add_cluster(whole.add_argument_group("cluster"))
    _add_output(whole.add_argument_group("runs and output"))
    return whole


def plan_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line of `mell plan`, and the defaults of the simulator's other ones."""
    return _plan_parser().parse_args(argv, parser().parse_args(["--plan"]))


def _add_models(whole: argparse.ArgumentParser) -> None:
    whole.add_argument(
        "--models",
        type=Path,
        metavar="FILE",
        help="YAML with several models that share devices, for a plan of a trace with a column model: the devices that "
        "their levels take with Mell, with devices of their own, with static shares, and with swapping",
    )


def _add_requests(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--start",
        type=float,
        default=0.0,
        metavar="S",
        help="leave out the first S seconds after the first request (default: %(default)g)",
    )
    add(
        "--lengths",
        metavar=f"FILE|{SHIPPED}",
        help="lengths in place of the trace's own, drawn from a csv with percentile,tail_prompt_tokens,"
        f"tail_output_tokens or from the rows of a trace; {SHIPPED} is a shipped, invented table of chat lengths",
    )
    add("--length-scale", type=float, default=1.0, metavar="X", help="factor on token counts (default: %(default)g)")
    add(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="factor on arrival times; 0.5 is twice as fast (default: %(default)g)",
    )
    add("--no-cap", action="store_true", help="refuse requests that exceed the capacity instead of cutting them")
    add("--horizon", type=float, metavar="S", help="seconds to simulate (default: to the trace's end, else 3600)")
    add(
        "--warmup",
        type=float,
        metavar="S",
        help=f"seconds at the start that are left out of all metrics (default: {WARMUP_S:g}; in a plan at most a "
        "quarter of the horizon)",
    )
    add(
        "--seed",
        type=int,
        action="append",
        metavar="N",
        help="seed of the random numbers; may be repeated (default: 0)",
    )
    add("--seeds", type=int, metavar="N", help="number of seeds, from --seed on")


def _add_policies(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="a policy, with options as in pack:headroom_s=4; may be repeated",
    )
    add("--moves-per-epoch", type=int, metavar="N", help="maximum number of moves in one epoch (default: no limit)")
    add(
        "--cooldown",
        type=float,
        default=0.0,
        metavar="S",
        help="minimum seconds between two moves of a request (default: %(default)g)",
    )
    add(
        "--headroom",
        type=float,
        default=0.0,
        metavar="S",
        help="minimum seconds of growth kept free per request (default: %(default)g)",
    )
    add(
        "--lead",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds until a decision takes effect, and by which overloads are cured ahead (default: as measured)",
    )
    add(
        "--linger",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds for which an empty GPU stays open (default: %(default)g)",
    )
    add(
        "--slack",
        type=float,
        default=0.0,
        metavar="GPUS",
        help="KV cache of the whole cluster to keep free, as a number of GPUs (default: %(default)g)",
    )
    add(
        "--foresight",
        type=float,
        default=0.0,
        metavar="S",
        help="keep the largest recent rise in demand over S seconds free, as a rule a GPU's start-up time (default: 0)",
    )
    add("--unbatched", action="store_true", help="decide an epoch's changes one by one instead of together")


def _add_level(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--ttft-p99",
        type=float,
        metavar="S",
        help="service level: 99 %% of the first tokens within S seconds; needs --costs with step times",
    )
    add(
        "--itl-p99",
        type=float,
        metavar="MS",
        help="service level: 99 %% of later tokens within MS milliseconds each",
    )


def _add_classes(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=[],
        metavar="NAME[:rank=N,share=X]",
        help="a service class, with its rank (default: 0), its share of the requests, and ttft_p99=S and itl_p99=MS as "
        "its level; a trace may have the classes in a column, class. May be repeated",
    )
    group.add_argument(
        "--overtake",
        type=float,
        default=OVERTAKE_S,
        metavar="S",
        help="seconds that a request may arrive later than a waiting one, for each step that its rank is higher, to be "
        "served before it (default: %(default)g)",
    )


def _add_cluster(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--capacity-tokens",
        type=int,
        metavar="C",
        help=f"KV cache of one GPU, in tokens (default: that of a recording, else {CAPACITY:,})",
    )
    nodes = group.add_mutually_exclusive_group().add_argument
    nodes(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="N",
        help="GPUs per node; links within a node are fast (default: %(default)g)",
    )
    nodes(
        "--gpus-per-machine",
        type=int,
        metavar="N",
        help="as --gpus-per-node, and a node is a machine that costs money until its last GPU is free: GPUs open on "
        "machines in use first, decisions empty machine by machine, and machine-seconds are counted",
    )
    add("--max-gpus", type=int, metavar="N", help="maximum number of GPUs; beyond it requests wait (default: no limit)")
    shipped = ", ".join(shipped_costs())
    add(
        "--costs",
        metavar="ideal|FILE",
        help=f"costs of computing, moving and starting; shipped are {shipped} (default: ideal; in a plan {PLAN_COSTS}, "
        "with what a recording contains instead)",
    )
    add("--startup", type=float, metavar="S", help="start-up time of a GPU in seconds (default: that of the costs)")
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="json with measurements of a live system, to correct the costs",
    )


def _add_caches(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--min-gpus", type=int, default=0, metavar="N", help="GPUs that are always open (default: %(default)g)")
    add(
        "--block-tokens",
        type=int,
        metavar="N",
        help="simulate prefix caches: tokens of a block; of a trace with hash_ids, those that an id stands for, 512 in "
        "Mooncake's, 16 in Qwen-Bailian's",
    )
    add(
        "--routing",
        choices=[str(kind) for kind in Routing],
        default=str(Routing.TREE),
        help="placement by the contents of prefix caches, by session, or by load alone (default: %(default)s)",
    )
    add(
        "--sizes",
        choices=[str(kind) for kind in Sizes],
        default=str(Sizes.MARGINAL),
        help="the room that decisions want for a request: without the blocks that it shares with running requests of a "
        "GPU, or for all of its tokens (default: %(default)s)",
    )
    add(
        "--copies",
        action="store_true",
        help="GPUs copy cached prefixes from each other, before requests run, if that pays, and before they close; "
        "needs costs with migrations",
    )
    add(
        "--prefill-gpus",
        type=int,
        default=0,
        metavar="N",
        help="GPUs for prefills alone: requests move by KV to the others, which decode; needs costs with migrations "
        "(default: %(default)g, every GPU does both)",
    )
    add(
        "--auto-prefills",
        action="store_true",
        help="--prefill-gpus is a maximum: as many GPUs are for prefills as make jobs shortest by prediction, and get "
        "the prompts whose prefill costs less there",
    )


def _add_epochs(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--decode-rate",
        type=float,
        default=25.0,
        metavar="R",
        help="tokens per second and request, unless the costs have step times (default: %(default)g)",
    )
    add("--epoch", type=float, default=1.0, metavar="S", help="seconds between decisions (default: %(default)g)")


def _add_output(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", help="file for all metrics (default: only a table is printed)")
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="PNG or SVG file: the frontiers of a plan, or of several models the memory of devices",
    )
    add("--processes", type=int, metavar="N", help="number of parallel runs (default: one per processor)")
    add("--quiet", action="store_true", help="show no progress")

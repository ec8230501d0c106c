"""The command-line options of the simulator. `app.simulator.command.order` checks their values."""

import argparse
from pathlib import Path

from app.simulator.costs.costs import shipped_costs
from app.simulator.workload.lengths import SHIPPED

WORKLOAD_HELP = """Arrival times and lengths of the requests. Prompts are cut to half of the capacity, prompt and output
together to the capacity."""


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    whole = argparse.ArgumentParser(
        prog="python -m app.simulator",
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
        help="compare the service level with fixed reserves, and report the fewest GPUs; needs no --policy",
    )
    _add_workload(whole.add_argument_group("workload", WORKLOAD_HELP))
    _add_policies(whole.add_argument_group("policies", "The limits apply to every policy."))
    _add_cluster(whole.add_argument_group("cluster and time"))
    _add_output(whole.add_argument_group("runs and output"))
    return whole


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE", help="csv or csv.gz with arrival_s,prompt_tokens,output_tokens")
    add("--poisson", type=float, metavar="RATE", help="instead of a trace: random arrivals, RATE requests per second")
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
        default=600.0,
        metavar="S",
        help="seconds at the start that are left out of all metrics (default: %(default)g)",
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
    add("--unbatched", action="store_true", help="decide an epoch's changes one by one instead of together")


def _add_cluster(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--capacity-tokens",
        type=int,
        default=13698,
        metavar="C",
        help="KV cache of one GPU, in tokens (default: %(default)g)",
    )
    add(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="N",
        help="GPUs per node; links within a node are fast (default: %(default)g)",
    )
    add("--max-gpus", type=int, metavar="N", help="maximum number of GPUs; beyond it requests wait (default: no limit)")
    add(
        "--decode-rate",
        type=float,
        default=25.0,
        metavar="R",
        help="tokens per second and request, unless the costs have step times (default: %(default)g)",
    )
    add("--epoch", type=float, default=1.0, metavar="S", help="seconds between decisions (default: %(default)g)")
    shipped = ", ".join(shipped_costs())
    add(
        "--costs",
        default="ideal",
        metavar="ideal|FILE",
        help=f"costs of computing, moving and starting; shipped are {shipped} (default: ideal)",
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="json with measurements of a live system, to correct the costs",
    )


def _add_output(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", help="file for all metrics (default: only a table is printed)")
    add("--series", action="store_true", help="write time series of every run to the JSON file, too")
    add("--processes", type=int, metavar="N", help="number of parallel runs (default: one per processor)")
    add("--quiet", action="store_true", help="show no progress")

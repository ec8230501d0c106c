"""The command line of the simulator. What it asks for is checked in `app.simulator.command.order`."""

import argparse
from pathlib import Path

from app.simulator.costs.costs import shipped_costs
from app.simulator.workload.lengths import SHIPPED

WORKLOAD_HELP = """What arrives when, and how long it is. Prompts are cut to half of the capacity, prompt and output
together to the capacity."""


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    whole = argparse.ArgumentParser(
        prog="python -m app.simulator",
        description="Play a workload through placement policies in virtual time.",
    )
    whole.add_argument("--list-policies", action="store_true", help="say what policies there are, and end")
    whole.add_argument(
        "--recording",
        type=Path,
        metavar="FILE",
        help="decide the recorded epochs of a live scheduler again, compare the plans, and end",
    )
    _add_workload(whole.add_argument_group("workload", WORKLOAD_HELP))
    _add_policies(whole.add_argument_group("policies", "Bounds on what a policy may do hold for all of them."))
    _add_cluster(whole.add_argument_group("cluster and time"))
    _add_output(whole.add_argument_group("runs and output"))
    return whole


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE", help="csv or csv.gz with arrival_s,prompt_tokens,output_tokens")
    add("--poisson", type=float, metavar="RATE", help="instead of a trace: so many requests per second, at random")
    add(
        "--lengths",
        metavar=f"FILE|{SHIPPED}",
        help="lengths, in place of the trace's own: a csv with percentile,tail_prompt_tokens,tail_output_tokens to "
        "draw from, or a trace to take rows from at random; the word stands for a made-up table of chat lengths",
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
        help="seconds at the start that no figure counts (default: %(default)g)",
    )
    add("--seed", type=int, action="append", metavar="N", help="seed of what is drawn; may be repeated (default: 0)")
    add("--seeds", type=int, metavar="N", help="so many seeds, from --seed on")


def _add_policies(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="a policy, with options as in pack:headroom_s=4; may be repeated",
    )
    add("--moves-per-epoch", type=int, metavar="N", help="most requests that one epoch moves (default: any number)")
    add(
        "--cooldown",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds for which a moved request stays (default: %(default)g)",
    )
    add(
        "--headroom",
        type=float,
        default=0.0,
        metavar="S",
        help="least seconds of growth kept free per request (default: %(default)g)",
    )
    add(
        "--lead",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds until a decision takes effect: an overload is cured so much ahead (default: as measured)",
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
        help="GPUs' worth of KV cache that stays free in all (default: %(default)g)",
    )
    add(
        "--foresight",
        type=float,
        default=0.0,
        metavar="S",
        help="keep free by how much demand lately rose within S seconds, a GPU's start-up time (default: do not)",
    )
    add("--unbatched", action="store_true", help="decide each epoch's changes one by one, not all together")


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
        help="GPUs that share the fast links of a node (default: %(default)g)",
    )
    add("--max-gpus", type=int, metavar="N", help="no more GPUs than that; requests wait (default: any number)")
    add(
        "--decode-rate",
        type=float,
        default=25.0,
        metavar="R",
        help="tokens per second and request, unless costs say otherwise (default: %(default)g)",
    )
    add("--epoch", type=float, default=1.0, metavar="S", help="seconds between decisions (default: %(default)g)")
    shipped = ", ".join(shipped_costs())
    add(
        "--costs",
        default="ideal",
        metavar="ideal|FILE",
        help=f"what takes time and links; shipped are {shipped} (default: ideal)",
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="json with what a live system measured of itself, to correct the costs",
    )


def _add_output(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", help="where the whole outcome goes (default: it is only printed)")
    add("--series", action="store_true", help="have the course of every run in the JSON file, too")
    add("--processes", type=int, metavar="N", help="runs at a time (default: one per processor)")
    add("--quiet", action="store_true", help="show no progress")

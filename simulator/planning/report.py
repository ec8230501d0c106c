"""A whole plan: its runs, with a progress bar, its files and its text."""

import json

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from simulator.command.document import Document
from simulator.command.estimate import require_affordable
from simulator.command.order import SimulationOrder
from simulator.errors import BadInput
from simulator.outcome.service import PlannedLevels
from simulator.planning.document import plan_document
from simulator.planning.perform import ROUGH_RUNS, PlanRuns, perform_plan, sample_runs, simulated_seconds
from simulator.planning.picture import draw_plan
from simulator.planning.text import render_plan
from simulator.workload.workload import draw


def report(order: SimulationOrder, quiet: bool) -> None:
    """Perform the plan of an order, write its files and print it. Raises `BadInput` without a service level."""
    outcome = plan(order, quiet)
    if order.json is not None:
        order.json.write_text(json.dumps(outcome, indent=1) + "\n")
    if order.picture is not None:
        draw_plan(order.picture, outcome)
    print(render_plan(outcome))


def plan(order: SimulationOrder, quiet: bool) -> Document:
    """Perform all runs of a plan, with a progress bar unless `quiet`. Raises `BadInput` without a service level."""
    if order.setup.service is None:
        raise BadInput("A plan needs a service level: give --ttft-p99 or --itl-p99.")
    require_affordable(order, ROUGH_RUNS * len(order.seeds), sample_runs)
    workloads = [draw(order.recipe, seed) for seed in order.seeds]
    total_s = round(simulated_seconds(order, workloads[0].jobs))
    levels = PlannedLevels(order.setup.service, order.setup.classes.levels)
    with tqdm(total=total_s, unit=" virtual s", desc="planned", disable=quiet) as bar:

        def show(done_s: float) -> None:
            bar.update(round(done_s) - bar.n)

        runs = PlanRuns(workloads, order.window, order.processes, show)
        candidates = perform_plan((order.setup, order.costs), levels, runs)
        bar.total = bar.n
        bar.refresh()
    return plan_document(order, levels, runs, candidates)

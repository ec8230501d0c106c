"""A whole plan of several models: the command line as checked values, the runs, the files and the text."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from policies.model import PoolId, Tokens
from simulator.command.document import Document
from simulator.command.options import WARMUP_S
from simulator.command.order import require_writable
from simulator.errors import BadInput, require_not_negative, require_positive
from simulator.models.cases import SharingCase, SharingContender, SharingPlan, perform_case, sharing_cases
from simulator.models.files import ModelsFile, planned_models, read_models, require_room
from simulator.models.outcome import SharedOutcome
from simulator.models.picture import draw_sharing, require_drawable
from simulator.models.search import FoundDevices, best_cases
from simulator.models.text import render_sharing
from simulator.outcome.metrics import Window
from simulator.traces.rows import ReadWindow
from simulator.workload.workload import ArrivalTrace, Job, Recipe, Recorded, draw, read_trace

_NOT_WITH_MODELS = {
    "costs": "--costs",
    "capacity_tokens": "--capacity-tokens",
    "startup": "--startup",
    "calibration": "--calibration",
    "itl_p99": "--itl-p99",
    "lengths": "--lengths",
    "gpus_per_machine": "--gpus-per-machine",
    "classes": "--class",
    "seed": "--seed",
    "seeds": "--seeds",
    "poisson": "--poisson",
    "sessions": "--sessions",
    "no_cap": "--no-cap",
}
"""Options of other plans, which have no meaning here."""


def report_sharing(given: argparse.Namespace) -> None:
    """Perform the plan of a parsed command line with --models, write its file and print it.

    Raises `BadInput` for impossible values, before any simulation.
    """
    for name, option in _NOT_WITH_MODELS.items():
        if getattr(given, name) not in (None, [], False):
            raise BadInput(f"{option} does not go with --models FILE, which has the facts of each model.")
    if given.trace is None:
        raise BadInput("Give a --trace FILE with a column model.")
    if given.ttft_p99 is not None:
        require_positive("--ttft-p99", given.ttft_p99)
    for path in (given.json, given.picture):
        require_writable(path)
    file = read_models(given.models)
    plan, workload = read_sharing(given, file)
    most = len(plan.models) if given.max_gpus is None else given.max_gpus
    if most < 1:
        raise BadInput(f"The number of GPUs must be 1 or more, got {most}.")
    require_room(file, plan.models, most)
    if given.picture is not None:
        require_drawable(plan)
    found = performed(plan, most, given.quiet)
    outcome = sharing_document(plan, most, workload, found)
    if given.json is not None:
        given.json.write_text(json.dumps(outcome, indent=1) + "\n")
    if given.picture is not None:
        mell = next((each for each in found if each.case.contender is SharingContender.MELL), None)
        if mell is None:
            raise BadInput(f"With Mell the models do not fit into {most} devices, so there is no picture.")
        draw_sharing(given.picture, plan, mell.devices, int(mell.case.setting))
    print(render_sharing(outcome))


def read_sharing(given: argparse.Namespace, file: ModelsFile) -> tuple[SharingPlan, Document]:
    """The plan's input, and the facts about its workload.

    Raises `BadInput` for a trace without models or with unknown ones, and for impossible values.
    """
    require_positive("time scale", given.time_scale)
    require_positive("length scale", given.length_scale)
    require_not_negative("start", given.start)
    if given.horizon is not None:
        require_positive("horizon", given.horizon)
    end_s = math.inf if given.horizon is None else given.start + given.horizon / given.time_scale
    trace = read_trace(given.trace, ReadWindow(given.start, end_s), with_names=False, with_models=True)
    horizon_s = given.horizon or math.floor(trace.rows[-1].at_s * given.time_scale) + 1.0
    warmup_s = min(WARMUP_S, horizon_s // 4) if given.warmup is None else given.warmup
    require_not_negative("warm-up", warmup_s)
    if warmup_s >= horizon_s:
        raise BadInput(f"A warm-up of {warmup_s:g} s leaves nothing to measure of {horizon_s:g} s.")
    models = planned_models(file, given.ttft_p99)
    rows = _by_model(trace, {model.entry.name for model in models}, given.trace, given.models)
    jobs: dict[PoolId, tuple[Job, ...]] = {}
    cut = 0
    for model in models:
        jobs[model.pool] = ()
        if own := rows[model.entry.name]:
            most = Tokens(model.entry.max_model_len)
            recipe = Recipe(ArrivalTrace(tuple(own)), None, horizon_s, most, given.time_scale, given.length_scale)
            workload = draw(recipe, 0)
            jobs[model.pool], cut = workload.jobs, cut + workload.capped
    facts = {
        "trace": Path(given.trace).name,
        "requests": sum(map(len, jobs.values())),
        "cut": cut,
        "horizon_s": horizon_s,
        "warmup_s": warmup_s,
        "account": None if trace.account is None else asdict(trace.account),
    }
    return SharingPlan(file, tuple(models), jobs, Window(warmup_s, horizon_s)), facts


def performed(plan: SharingPlan, most: int, quiet: bool = True) -> list[FoundDevices]:
    """Perform all runs, on `most` devices at most, with a count of them unless `quiet`; the best of each contender."""
    with tqdm(unit=" runs", desc="planned", disable=quiet) as bar:

        def perform(case: SharingCase, devices: int) -> SharedOutcome | None:
            outcome = perform_case(plan, case, devices, lambda now: None)
            bar.update(1)
            return outcome

        return best_cases(sharing_cases(), most, perform, lambda outcome: outcome.keeps_level)


def sharing_document(plan: SharingPlan, most: int, workload: Document, found: Sequence[FoundDevices]) -> Document:
    """The JSON document of the best runs."""
    there = {each.case.contender for each in found}
    return {
        "workload": workload,
        "budget_mib": plan.file.budget_mib,
        "max_gpus": most,
        "models": {model.entry.name: asdict(model.entry) for model in plan.models},
        "contenders": [_contender(each) for each in found],
        "impossible": [str(contender) for contender in SharingContender if contender not in there],
    }


def _contender(found: FoundDevices) -> Document:
    return {
        "name": found.case.name,
        "contender": str(found.case.contender),
        "kept": found.kept,
        **asdict(found.outcome),
    }


def _by_model(trace: ArrivalTrace, known: set[str], path: Path, models: Path) -> Mapping[str, list[Recorded]]:
    rows: dict[str, list[Recorded]] = {name: [] for name in known}
    for row in trace.rows:
        if not row.model:
            raise BadInput(f"{path} has a request without a model: a plan with --models needs a column model.")
        if row.model not in known:
            raise BadInput(f"{path} has requests for {row.model}, which is no model in {models}.")
        rows[row.model].append(row)
    return rows

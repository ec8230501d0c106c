"""A small file of models, its costs, and a trace, in a folder; and the plan of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from policies.model import PoolId
from simulator.costs.costs import Costs, write_costs
from simulator.models.cases import SharingPlan
from simulator.models.files import planned_models, read_models
from simulator.outcome.metrics import Window
from simulator.workload.workload import Job
from tests.simulator.physics import COMPUTE, MIGRATION

WAKE_S, START_S = 1.0, 20.0
COSTS = Costs("small", slots=False, preemption=True, startup_s=START_S, compute=COMPUTE, migration=MIGRATION)
"""A byte per token of KV; a request of 100 tokens for each side takes a second."""


def write_models(folder: Path, models: Mapping[str, Mapping[str, Any]], **top: Any) -> Path:
    """Write a file of models: two fit into a device while they are awake, four of five MiB while they sleep."""
    write_costs(COSTS, folder / "small.json")
    common = {"costs": str(folder / "small.json"), "parameters_mib": 10, "max_model_len": 1000, "wake_s": WAKE_S}
    entries = [{"name": name, **common, **own} for name, own in models.items()]
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"budget_mib": 25, **top, "models": entries}))
    return path


def write_trace(folder: Path, rows: Iterable[tuple[float, str]]) -> Path:
    """Write requests of 100 tokens for each side, at these seconds, for these models."""
    path = folder / "trace.csv"
    lines = (f"{at_s},100,100,{model}\n" for at_s, model in rows)
    path.write_text("arrival_s,prompt_tokens,output_tokens,model\n" + "".join(lines))
    return path


def small_plan(folder: Path, jobs: Mapping[str, tuple[Job, ...]], **own: Any) -> SharingPlan:
    """A plan of models with these requests."""
    file = read_models(write_models(folder, {name: own for name in jobs}))
    models = planned_models(file, 2.0)
    return SharingPlan(file, tuple(models), {PoolId(name): each for name, each in jobs.items()}, Window(0.0, 300.0))


def options(trace: Path, models: Path, *others: str) -> list[str]:
    """A command line of a plan."""
    return [str(trace), "--models", str(models), "--quiet", "--warmup", "0", *others]

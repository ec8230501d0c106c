"""The JSON document of a simulation: the input, the lower bound on the GPUs, and the metrics of every run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from simulator.caches.oracles import oracles
from simulator.command.order import SimulationOrder
from simulator.outcome.metrics import Metrics
from simulator.outcome.statistics import interval, mean
from simulator.workload.workload import Poisson, Workload

Document = dict[str, Any]


def document(
    order: SimulationOrder, workloads: Sequence[Workload], bounds: Sequence[Metrics], runs: Sequence[Metrics]
) -> Document:
    """The whole document; it has a `summary` if there is more than one seed."""
    whole = {
        **given(order, workloads),
        "bound": _bound(bounds, order.setup.slotted_rate),
        "runs": list(runs),
    }
    return {**whole, "summary": summary(runs)} if len(workloads) > 1 else whole


def given(order: SimulationOrder, workloads: Sequence[Workload]) -> Document:
    """The input part of a document."""
    return {"workload": _workload(order, workloads), "setup": _setup(order)}


def summary(runs: Sequence[Metrics]) -> list[Metrics]:
    """Every numeric metric per policy: the mean over the seeds and the half-width of the 95 % confidence interval."""
    by_policy: dict[str, list[Metrics]] = {}
    for run in runs:
        by_policy.setdefault(run["policy"], []).append(run)
    return [
        {"policy": policy, "seeds": len(members), **_intervals([_flat(member) for member in members])}
        for policy, members in by_policy.items()
    ]


def _intervals(members: Sequence[Mapping[str, float]]) -> Metrics:
    """The intervals of the metrics that every seed has: a run without the events of a metric lacks that metric."""
    names = [name for name in members[0] if all(name in member for member in members)]
    return {name: asdict(interval([member[name] for member in members])) for name in names}


def _flat(run: Metrics) -> dict[str, float]:
    """The numbers of a run by metric; those of a distribution are named `<metric>.<quantile>`."""
    numbers: dict[str, float] = {}
    for name, value in run.items():
        if isinstance(value, int | float) and name != "seed":
            numbers[name] = value
        elif isinstance(value, dict) and "p99" in value:
            numbers |= {f"{name}.{part}": number for part, number in value.items()}
    return numbers


def _bound(bounds: Sequence[Metrics], rate: float) -> Metrics:
    """The bounds as means over the seeds and by seed, in the idealised model, where all requests decode at one rate."""
    names = ("peak", "mean", "repack_mean")
    means = {name: mean([bound[name] for bound in bounds]) for name in names}
    return {**means, "decode_rate": rate, "by_seed": list(bounds)}


def _workload(order: SimulationOrder, workloads: Sequence[Workload]) -> Metrics:
    recipe = order.recipe
    rate, account = None, None
    if isinstance(recipe.arrivals, Poisson):
        rate = recipe.arrivals.rate
    else:
        account = recipe.arrivals.account
    return {
        "arrivals": "trace" if rate is None else "poisson",
        "rate_per_s": rate,
        "sessions": order.names.sessions,
        "trace": order.names.trace,
        "account": None if account is None else asdict(account),
        "lengths": order.names.lengths,
        "length_scale": recipe.length_scale,
        "time_scale": recipe.time_scale,
        "horizon_s": recipe.horizon_s,
        "warmup_s": order.window.warmup_s,
        "seeds": list(order.seeds),
        "by_seed": [{**_drawn(workload), **_hit_rates(order, workload)} for workload in workloads],
    }


def _drawn(workload: Workload) -> Metrics:
    return {
        "seed": workload.seed,
        "requests": len(workload.jobs),
        "capped": workload.capped,
        "cut_tokens": workload.cut_tokens,
        "prompt_tokens_mean": mean([job.prompt for job in workload.jobs]),
        "output_tokens_mean": mean([job.output for job in workload.jobs]),
    }


def _hit_rates(order: SimulationOrder, workload: Workload) -> Metrics:
    """The hit rates of one cache for all GPUs, if caches are simulated; warm-up included."""
    setup = order.setup
    if not setup.block_tokens:
        return {}
    total = None if setup.max_gpus is None else setup.max_gpus * setup.capacity
    return {"hit_rates": asdict(oracles(workload.jobs, setup.block_tokens, total))}


def _setup(order: SimulationOrder) -> Metrics:
    setup = order.setup
    return {
        "capacity_tokens": setup.capacity,
        "decode_rate": order.decode_rate,
        "epoch_s": setup.epoch_s,
        "gpus_per_node": setup.gpus_per_node,
        **({"gpus_per_machine": setup.gpus_per_node} if setup.by_machine else {}),
        "min_gpus": setup.min_replicas,
        "max_gpus": setup.max_gpus,
        "block_tokens": setup.block_tokens,
        "routing": str(setup.routing),
        "copies": setup.copies,
        "prefill_gpus": setup.prefill_gpus,
        "auto_prefills": setup.auto_prefills,
        "sizes": str(setup.sizes),
        "batched": setup.batched,
        "moves_per_epoch": setup.limits.moves_per_epoch,
        "cooldown_s": setup.limits.cooldown_s,
        "headroom_s": setup.limits.headroom_s,
        "lead_s": setup.limits.lead_s,
        "linger_s": setup.limits.linger_s,
        "slack_gpus": setup.limits.slack,
        "foresight_s": setup.limits.foresight_s,
        "ttft_p99_s": None if setup.service is None else setup.service.ttft_p99_s,
        "itl_p99_s": None if setup.service is None else setup.service.itl_p99_s,
        "classes": {name: asdict(each) for name, each in setup.classes.by_name.items()},
        "overtake_s": setup.classes.overtake_s,
        "startup_s": order.costs.startup_s,
        "costs": order.names.costs,
        "costs_from": dict(order.costs.provenance),
        "calibration": order.names.calibration,
    }

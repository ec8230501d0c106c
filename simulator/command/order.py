"""The order for a simulation: the command line as checked values."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from policies.cost.service import ServiceLevel, unreachable
from policies.decision.limits import Limits, Sizes, Terms
from policies.model import Tokens
from policies.precedence import ServiceClasses
from policies.prefix.routing import Routing
from policies.rules.registry import policy
from simulator.command.classes import SimulatedClass, read_classes, recorded_classes, require_known
from simulator.command.options import CAPACITY, PLAN_COSTS, WARMUP_S
from simulator.command.runs import SimulationRun, available_processors
from simulator.costs.costs import ComputeCosts, Costs, read_costs
from simulator.costs.measurements import calibrated
from simulator.errors import BadInput, require_not_negative, require_positive
from simulator.outcome.metrics import Window
from simulator.traces.rows import ReadWindow
from simulator.workload.lengths import read_lengths
from simulator.workload.recording import RecordedReplicas, is_recording, read_traffic
from simulator.workload.sessions import SHAPES
from simulator.workload.workload import ArrivalTrace, Poisson, Recipe, Workload, read_trace
from simulator.world.setup import Setup
from simulator.world.terms import speed_of

POISSON_HORIZON_S = 3600.0
LIVE_COOLDOWN_S = 5.0
"""The live scheduler's default, and that of plans."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the input files as the user gave them; None for a file that was not given."""

    trace: str | None
    lengths: str | None
    costs: str
    calibration: str | None
    sessions: str | None = None
    """The name of made-up sessions."""


@dataclass(frozen=True, slots=True)
class SimulationOrder:
    """The runs to simulate, the number of processes, and the output.

    `start_s` is the beginning of the simulated part of the trace; `is_whole` if that has no end by an option.
    """

    recipe: Recipe
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    setup: Setup
    window: Window
    costs: Costs
    names: Names
    processes: int
    json: Path | None
    picture: Path | None
    with_series: bool
    start_s: float = 0.0
    is_whole: bool = True

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second and request; None if the rate depends on a replica's batch."""
        if self.costs.compute is not None and self.costs.compute.decode:
            return None
        return self.setup.slotted_rate if self.costs.slots else self.setup.decode_rate

    def runs(self, workloads: Sequence[Workload]) -> list[SimulationRun]:
        """One run without a policy per workload, then every policy with every workload."""
        return [
            SimulationRun(name, workload.seed, workload.jobs, self.setup, self.window, self.costs, self.with_series)
            for name in (None, *self.policies)
            for workload in workloads
        ]


def read_order(given: argparse.Namespace) -> SimulationOrder:
    """Check a parsed command line. Raises `BadInput` for impossible values, before any simulation."""
    require_positive("epoch", given.epoch)
    require_positive("time scale", given.time_scale)
    if given.horizon is not None:
        require_positive("horizon", given.horizon)
    arrivals, recorded = _arrivals(given)
    horizon_s = _horizon_s(given, arrivals)
    capacity = Tokens(given.capacity_tokens or recorded.capacity or CAPACITY)
    costs = _costs(given, recorded)
    classes = read_classes(given.classes, speed_of(costs)) or recorded_classes(recorded.classes)
    if isinstance(arrivals, ArrivalTrace):
        require_known(arrivals.classes, classes)
    recipe = Recipe(
        arrivals,
        None if given.lengths is None else read_lengths(given.lengths),
        horizon_s,
        capacity,
        given.time_scale,
        given.length_scale,
        not given.no_cap,
        _block_tokens(given, arrivals),
        {each.name: each.share for each in classes},
    )
    for path in (given.json, given.picture):
        require_writable(path)
    if recipe.block_tokens and (costs.compute is None or not costs.compute.prefill):
        raise BadInput("--block-tokens needs --costs with the times of prefills, which caches save.")
    return SimulationOrder(
        recipe,
        _policies(["pack"] if given.plan else given.policy),
        _seeds(given.seed, given.seeds),
        replace(_setup(given, horizon_s, capacity, _service(given, costs)), classes=_ordered(given, classes)),
        _window(given, horizon_s),
        costs,
        _names(given),
        available_processors() if given.processes is None else _at_least_one("number of processes", given.processes),
        given.json,
        given.picture,
        given.series,
        given.start,
        given.horizon is None,
    )


def _ordered(given: argparse.Namespace, classes: Sequence[SimulatedClass]) -> ServiceClasses:
    require_not_negative("overtaking time", given.overtake)
    return ServiceClasses({each.name: each.service_class for each in classes}, given.overtake)


def _arrivals(given: argparse.Namespace) -> tuple[Poisson | ArrivalTrace, RecordedReplicas]:
    """The arrivals and, from a recording, its replicas' measurements."""
    if (given.trace is None) == (given.poisson is None):
        raise BadInput("Give either --trace FILE or --poisson RATE.")
    require_not_negative("start", given.start)
    if given.trace is None:
        return Poisson(given.poisson, SHAPES.get(given.sessions)), RecordedReplicas()
    if given.sessions is not None:
        raise BadInput("--sessions are made up, and need --poisson RATE instead of --trace.")
    if not is_recording(given.trace):
        end_s = math.inf if given.horizon is None else given.start + given.horizon / given.time_scale
        window = ReadWindow(given.start, end_s)
        return read_trace(given.trace, window, with_names=given.block_tokens is not None), RecordedReplicas()
    traffic = read_traffic(given.trace)
    return _from(traffic.trace, given.start), traffic.replicas


def _from(trace: ArrivalTrace, start_s: float) -> ArrivalTrace:
    """The trace from a time on. Raises `BadInput` if no request arrives then."""
    rows = [replace(row, at_s=row.at_s - start_s) for row in trace.rows if row.at_s >= start_s]
    if not rows:
        raise BadInput(f"No request arrives after {start_s:g} s.")
    return ArrivalTrace(tuple(rows), trace.account)


def _block_tokens(given: argparse.Namespace, arrivals: Poisson | ArrivalTrace) -> int:
    """The tokens of a block in prefix caches; 0 without caches."""
    if given.block_tokens is None:
        return 0
    named = arrivals.shape is not None if isinstance(arrivals, Poisson) else arrivals.has_names
    if not named:
        raise BadInput("--block-tokens needs a --trace with hash_ids, or --sessions.")
    return _at_least_one("number of tokens of a block", given.block_tokens)


def _min_gpus(given: argparse.Namespace) -> int:
    require_not_negative("minimum number of GPUs", given.min_gpus)
    if given.max_gpus is not None and given.min_gpus > given.max_gpus:
        raise BadInput(f"--min-gpus {given.min_gpus} is above --max-gpus {given.max_gpus}.")
    return int(given.min_gpus)


def _horizon_s(given: argparse.Namespace, arrivals: Poisson | ArrivalTrace) -> float:
    if given.horizon is not None:
        return float(given.horizon)
    if isinstance(arrivals, Poisson):
        return POISSON_HORIZON_S
    last_s = arrivals.rows[-1].at_s * given.time_scale
    return float((math.floor(last_s / given.epoch) + 1) * given.epoch)


def _window(given: argparse.Namespace, horizon_s: float) -> Window:
    warmup_s = given.warmup
    if warmup_s is None:
        warmup_s = min(WARMUP_S, horizon_s // 4) if given.plan else WARMUP_S
    require_not_negative("warm-up", warmup_s)
    if warmup_s >= horizon_s:
        raise BadInput(
            f"A warm-up of {warmup_s:g} s leaves nothing to measure of {horizon_s:g} s: "
            "give a shorter --warmup or a longer --horizon."
        )
    return Window(warmup_s, horizon_s)


def _service(given: argparse.Namespace, costs: Costs) -> ServiceLevel | None:
    """The service level. Raises `BadInput` if no replica meets it, even with one request alone."""
    if given.ttft_p99 is None and given.itl_p99 is None:
        return None
    for name, value in (("--ttft-p99", given.ttft_p99), ("--itl-p99", given.itl_p99)):
        if value is not None:
            require_positive(name, value)
    speed = speed_of(costs)
    if speed is None:
        raise BadInput("A service level needs --costs with the times of decoding and of prefills.")
    level = ServiceLevel(given.ttft_p99, None if given.itl_p99 is None else given.itl_p99 / 1e3)
    if reasons := unreachable(level, speed):
        raise BadInput(f"The service level cannot be met: {'; '.join(reasons)}.")
    return level


def _setup(given: argparse.Namespace, horizon_s: float, capacity: Tokens, service: ServiceLevel | None) -> Setup:
    """The cluster. In a plan one GPU is always there, as under an autoscaler, and moves have the live limits."""
    if horizon_s < given.epoch:
        raise BadInput(f"The horizon of {horizon_s:g} s ends before the first epoch of {given.epoch:g} s.")
    if given.auto_prefills and not given.prefill_gpus:
        raise BadInput("--auto-prefills needs --prefill-gpus N, the most GPUs that are for prefills.")
    require_positive("decode rate", given.decode_rate)
    if given.decode_rate * given.epoch < 1:
        raise BadInput(f"At {given.decode_rate:g} tokens/s a request gets no token in an epoch of {given.epoch:g} s.")
    require_not_negative("cooldown", given.cooldown)
    require_not_negative("headroom", given.headroom)
    require_not_negative("lead", given.lead)
    require_not_negative("linger", given.linger)
    require_not_negative("slack", given.slack)
    require_not_negative("foresight", given.foresight)
    if given.moves_per_epoch is not None:
        require_not_negative("number of moves per epoch", given.moves_per_epoch)
    per_machine = 0
    if given.gpus_per_machine is not None:
        per_machine = _at_least_one("number of GPUs per machine", given.gpus_per_machine)
    return Setup(
        capacity=capacity,
        decode_rate=given.decode_rate,
        epoch_s=given.epoch,
        gpus_per_node=per_machine or _at_least_one("number of GPUs per node", given.gpus_per_node),
        by_machine=per_machine > 1,
        horizon_s=horizon_s,
        min_replicas=max(int(given.plan), _min_gpus(given)),
        max_gpus=None if given.max_gpus is None else _at_least_one("number of GPUs", given.max_gpus),
        batched=not given.unbatched,
        limits=Limits(
            given.moves_per_epoch,
            given.cooldown or (LIVE_COOLDOWN_S if given.plan else 0.0),
            given.headroom,
            lead_s=given.lead,
            slack=given.slack,
            foresight_s=given.foresight,
            linger_s=given.linger,
        ),
        moves_at_once=Terms().moves_at_once if given.plan else None,
        moves_per_replica=Terms().moves_per_replica if given.plan else None,
        service=service,
        block_tokens=given.block_tokens or 0,
        routing=Routing(given.routing),
        copies=given.copies,
        prefill_gpus=given.prefill_gpus,
        auto_prefills=given.auto_prefills,
        sizes=Sizes(given.sizes),
    )


def _policies(specs: Sequence[str]) -> tuple[str, ...]:
    if not specs:
        raise BadInput("Give a --policy; --list-policies lists them.")
    for spec in specs:
        try:
            policy(spec)
        except ValueError as error:
            raise BadInput(f"--policy {spec}: {error}.") from None
    return tuple(dict.fromkeys(specs))


def _seeds(given: Sequence[int] | None, count: int | None) -> tuple[int, ...]:
    seeds = tuple(dict.fromkeys(given or (0,)))
    if count is None:
        return seeds
    if len(seeds) > 1:
        raise BadInput("--seeds N counts from one --seed, not from several.")
    return tuple(range(seeds[0], seeds[0] + _at_least_one("number of seeds", count)))


def _costs(given: argparse.Namespace, recorded: RecordedReplicas) -> Costs:
    """The given costs, else the recorded ones on top of the default; `--startup` replaces the time of a start."""
    costs = read_costs(_cost_source(given))
    if given.costs is None and given.plan:
        costs = as_recorded(costs, recorded)
    if given.startup is not None:
        require_not_negative("start-up time", given.startup)
        costs = replace(costs, startup_s=given.startup)
    return costs if given.calibration is None else calibrated(costs, given.calibration)


def _cost_source(given: argparse.Namespace) -> str:
    return str(given.costs or (PLAN_COSTS if given.plan else "ideal"))


def as_recorded(costs: Costs, recorded: RecordedReplicas) -> Costs:
    """The costs with a recording's step times, start-up time and KV size, as far as it contains them."""
    if recorded.startup_s is not None:
        costs = replace(costs, startup_s=recorded.startup_s)
    if recorded.token_bytes and costs.migration is not None:
        costs = replace(costs, migration=replace(costs.migration, kv_bytes=max(1, round(recorded.token_bytes))))
    if recorded.steps is None:
        return costs
    steps = recorded.steps
    compute = ComputeCosts(
        linear=steps.linear,
        overhead_s=steps.overhead_s,
        sequence_s=steps.sequence_s,
        context_s=steps.context_s,
        attention_s=steps.attention_s,
        chunk_tokens=recorded.step_tokens or ComputeCosts(steps.linear).chunk_tokens,
    )
    return replace(costs, name="as recorded", compute=compute)


def _names(given: argparse.Namespace) -> Names:
    paths = (given.trace, given.lengths, given.calibration)
    trace, lengths, calibration = (None if path is None else Path(path).name for path in paths)
    return Names(trace, lengths, Path(_cost_source(given)).name, calibration, given.sessions)


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise BadInput(f"The {name} must be 1 or more, got {value}.")
    return value


def require_writable(path: Path | None) -> None:
    """Check the path before the simulation, which may take an hour."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise BadInput(f"{path} cannot be written: there is no directory {path.parent}, or it is one itself.")

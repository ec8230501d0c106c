"""The contenders of a plan of several models, and one run of each on a number of devices.

a GPU per model    each model has a device of its own, always
autoscalers        each model has an autoscaler of Ray Serve's kind and devices of its own: at least one, or none
static shares      every model is always awake on one of the shared devices (`baselines`)
swapping           a device has one model at a time (`baselines`): whole engines stop and start, or sleep and wake
Mell               shared devices: memory by demand, idle models asleep
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from policies.decision.limits import Limits, Terms
from policies.model import Bytes, PoolId
from policies.rules.registry import policy
from simulator.autoscaling.fleet import SimulatedFleet, requests_per_replica
from simulator.autoscaling.rule import ScalingRule
from simulator.command.runs import Tick
from simulator.models.baselines import SwappingDevices, play_static, static_devices
from simulator.models.files import BLOCK_TOKENS, MIB, ModelsFile, PlannedModel
from simulator.models.outcome import SharedOutcome, measured
from simulator.outcome.metrics import Window
from simulator.outcome.service import ServiceRecorder, served
from simulator.workload.workload import Job
from simulator.world.pool import PoolSpec
from simulator.world.setup import Setup
from simulator.world.shared import SharedModel, SharedSetup
from simulator.world.world import World

TAIL_S = 600.0
"""Seconds after the window in which its requests may end."""
LINGER_S = 3600.0
"""Seconds for which an idle replica of Mell stays awake if nobody needs its memory: sleep saves nothing else."""
COOLDOWN_S = 5.0
"""Minimum seconds between two moves of a request, as live."""
FULL = 0.6
"""The target of autoscalers: ongoing requests as a share of those that fill a KV cache."""
HOMES = (1, 2, 3)
"""Numbers of devices on which each model sleeps."""
DOWNS_S = (30.0, 120.0, 600.0)
"""Delays of autoscalers for closing replicas, in seconds; the last is Ray Serve's default."""


class SharingContender(StrEnum):
    """The parties of a comparison of several models."""

    OWN = "a GPU per model"
    SCALED = "an autoscaler per model"
    TO_ZERO = "an autoscaler per model, to zero"
    STATIC = "static shares"
    SWAP = "swapping whole engines"
    SWAP_ASLEEP = "swapping by sleep and wake"
    MELL = "Mell"


ON_OWN_DEVICES = (SharingContender.OWN, SharingContender.SCALED, SharingContender.TO_ZERO)
"""The contenders whose number of devices follows from the workload."""


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """The input of all runs."""

    file: ModelsFile
    models: tuple[PlannedModel, ...]
    jobs: Mapping[PoolId, tuple[Job, ...]]
    window: Window

    @property
    def budget(self) -> Bytes:
        """The bytes of a device."""
        return Bytes(round(self.file.budget_mib * MIB))

    @property
    def work(self) -> dict[PoolId, float]:
        """The tokens of each model's requests."""
        return {pool: float(sum(job.prompt + job.output for job in jobs)) for pool, jobs in self.jobs.items()}


@dataclass(frozen=True, slots=True)
class SharingCase:
    """A contender with its setting. `setting` are the homes of a sleeper, or seconds before a replica closes."""

    contender: SharingContender
    setting: float = 0.0

    @property
    def name(self) -> str:
        """The contender with its setting."""
        match self.contender:
            case SharingContender.MELL:
                return f"{self.contender}, sleepers on {self.setting:g}"
            case SharingContender.SCALED | SharingContender.TO_ZERO:
                return f"{self.contender}, down after {self.setting:g} s"
            case _:
                return str(self.contender)


def sharing_cases() -> list[SharingCase]:
    """The contenders with all of their settings."""
    return [
        SharingCase(SharingContender.OWN),
        *(SharingCase(SharingContender.SCALED, down_s) for down_s in DOWNS_S),
        *(SharingCase(SharingContender.TO_ZERO, down_s) for down_s in DOWNS_S),
        SharingCase(SharingContender.STATIC),
        SharingCase(SharingContender.SWAP),
        SharingCase(SharingContender.SWAP_ASLEEP),
        *(SharingCase(SharingContender.MELL, homes) for homes in HOMES),
    ]


def perform_case(plan: SharingPlan, case: SharingCase, devices: int, tick: Tick) -> SharedOutcome | None:
    """One run on a number of devices, which contenders with devices of their own do not need.

    None if the models do not fit. `tick` is called with the virtual time of a run.
    """
    recorders = {model.pool: ServiceRecorder(tick) for model in plan.models}
    until_s = plan.window.horizon_s + TAIL_S
    shared_s = devices * plan.window.seconds
    match case.contender:
        case SharingContender.OWN | SharingContender.SCALED | SharingContender.TO_ZERO:
            used = sum(_own_devices(plan, case, model, recorders[model.pool], until_s) for model in plan.models)
            return measured(plan.models, plan.jobs, recorders, plan.window, used)
        case SharingContender.STATIC:
            placed = static_devices(plan.models, plan.work, devices, plan.budget)
            if placed is None:
                return None
            play_static(placed, plan.budget, plan.jobs, recorders, until_s)
            return measured(plan.models, plan.jobs, recorders, plan.window, shared_s)
        case SharingContender.SWAP | SharingContender.SWAP_ASLEEP:
            asleep = case.contender is SharingContender.SWAP_ASLEEP
            residue = sum(model.memory.asleep for model in plan.models)
            if asleep and any(m.memory.least - m.memory.asleep + residue > plan.budget for m in plan.models):
                return None
            swapping = SwappingDevices(plan.models, devices, asleep, recorders)
            swapping.run(plan.jobs, plan.budget, until_s)
            return measured(plan.models, plan.jobs, recorders, plan.window, shared_s, starts=swapping.swaps)
        case SharingContender.MELL:
            return _mell(plan, devices, int(case.setting), recorders, until_s)


def _own_devices(
    plan: SharingPlan, case: SharingCase, model: PlannedModel, recorder: ServiceRecorder, until_s: float
) -> float:
    """Serve a model on devices of its own. Returns its GPU-seconds in the window."""
    jobs = plan.jobs[model.pool]
    setup = _setup(model, until_s)
    if case.contender is SharingContender.OWN:
        rule, setup = ScalingRule(), replace(setup, min_replicas=1, max_gpus=1)
    else:
        target = max(1.0, round(FULL * requests_per_replica(jobs, model.capacity)))
        rule = ScalingRule(
            target=target, upscale_delay_s=2.0, downscale_delay_s=case.setting, look_back_s=10.0, push_s=2.0
        )
    to_zero = case.contender is SharingContender.TO_ZERO
    SimulatedFleet(rule, setup, model.costs, recorder, recorder.tick, to_zero=to_zero).run(jobs)
    return served(recorder, jobs, plan.window, until_s).gpu_seconds


def _mell(
    plan: SharingPlan, devices: int, homes: int, recorders: Mapping[PoolId, ServiceRecorder], until_s: float
) -> SharedOutcome | None:
    world = mell_world(plan, devices, homes, recorders, until_s)
    if world is None:
        return None
    world.run(*(plan.jobs[model.pool] for model in plan.models))
    assert world.shared is not None
    seconds, found = devices * plan.window.seconds, world.shared
    return measured(plan.models, plan.jobs, recorders, plan.window, seconds, found.wakes, found.starts)


def mell_world(
    plan: SharingPlan, devices: int, homes: int, recorders: Mapping[PoolId, ServiceRecorder], until_s: float
) -> World | None:
    """The world of a run of Mell, in which each model sleeps on `homes` devices at first; None if they do not fit."""
    if homes > devices:
        return None
    specs = [
        PoolSpec(
            model.pool,
            policy("pack"),
            replace(_setup(model, until_s), max_gpus=model.entry.max_replicas or devices),
            model.costs,
            recorders[model.pool],
        )
        for model in plan.models
    ]
    shared = {
        model.pool: SharedModel(
            model.memory,
            BLOCK_TOKENS,
            model.entry.wake_s,
            model.startup_s,
            model.entry.weight,
            model.entry.min_replicas,
            homes,
        )
        for model in plan.models
    }
    try:
        return World(specs, shared=SharedSetup(devices, plan.budget, sleep_s=plan.file.sleep_s), models=shared)
    except ValueError:
        return None


def _setup(model: PlannedModel, until_s: float) -> Setup:
    terms = Terms()
    return Setup(
        model.capacity,
        horizon_s=until_s,
        min_replicas=model.entry.min_replicas,
        limits=Limits(linger_s=LINGER_S, cooldown_s=COOLDOWN_S),
        moves_at_once=terms.moves_at_once,
        moves_per_replica=terms.moves_per_replica,
    )

"""The service of several models in a run: first tokens by model and over all, lost and late requests, GPU-seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.cost.service import TAIL
from policies.model import PoolId
from simulator.models.files import PlannedModel
from simulator.outcome.metrics import Window
from simulator.outcome.service import ServiceRecorder, inter_token_p99
from simulator.outcome.statistics import quantile
from simulator.workload.workload import Job

REFUSED_S = 120.0
"""Seconds after which a request without a first token is refused: the default of `ingress.no_replica_timeout_s`."""


@dataclass(frozen=True, slots=True)
class ModelService:
    """The requests of a model in the window: their number, TTFT (None without requests), and those with a first token
    after the level (`late`), and with none in time to be served at all (`lost`), which are late, too.
    """

    requests: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    late: int
    lost: int


@dataclass(frozen=True, slots=True)
class SharedOutcome:
    """The service of all models in the window, and its cost. `itl_p99_s` is None without a second token."""

    gpu_seconds: float
    gpus_mean: float
    whole: ModelService
    models: Mapping[str, ModelService]
    itl_p99_s: float | None
    wakes: int = 0
    starts: int = 0

    @property
    def keeps_level(self) -> bool:
        """True if 99 % of all requests have their first token within the level of their model."""
        return self.whole.late <= TAIL * self.whole.requests


def measured(
    models: Sequence[PlannedModel],
    jobs: Mapping[PoolId, Sequence[Job]],
    recorders: Mapping[PoolId, ServiceRecorder],
    window: Window,
    gpu_seconds: float,
    wakes: int = 0,
    starts: int = 0,
) -> SharedOutcome:
    """The outcome of a run that has gone on long enough after the window for its requests to end."""
    waits: list[float] = []
    lates, losts = 0, 0
    found = {}
    for model in models:
        firsts = recorders[model.pool].firsts
        inside = [job for job in jobs[model.pool] if window.warmup_s <= job.arrival_s < window.horizon_s]
        own = sorted(firsts.get(job.id, job.arrival_s + REFUSED_S) - job.arrival_s for job in inside)
        service = _service(own, sum(wait_s > model.ttft_p99_s for wait_s in own))
        found[model.entry.name] = service
        waits, lates, losts = waits + own, lates + service.late, losts + service.lost
    steps: dict[tuple[int, int], float] = {}
    for recorder in recorders.values():
        for key, tokens in recorder.steps.items():
            steps[key] = steps.get(key, 0.0) + tokens
    return SharedOutcome(
        gpu_seconds,
        gpu_seconds / window.seconds,
        _service(sorted(waits), lates),
        found,
        inter_token_p99(steps, window),
        wakes,
        starts,
    )


def _service(waits: Sequence[float], late: int) -> ModelService:
    lost = sum(wait_s >= REFUSED_S for wait_s in waits)
    if not waits:
        return ModelService(0, None, None, 0, 0)
    return ModelService(len(waits), quantile(waits, 0.5), quantile(waits, 1 - TAIL), late, lost)

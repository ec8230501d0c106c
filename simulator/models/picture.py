"""The picture of a plan of several models: what arrives, and who holds the memory of each of Mell's devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from policies.model import Bytes, PoolId
from simulator.errors import BadInput
from simulator.models.cases import TAIL_S, SharingPlan, mell_world
from simulator.outcome.service import ServiceRecorder
from simulator.world.shared import HeldMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = 150
"""The most points in time of a picture."""
MOST_DEVICES, MOST_MODELS = 8, 10
"""The most devices of a picture, one panel each, and the most models, one colour each."""
_MINUTE_S, _GIB = 60.0, 1 << 30


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The memory that replicas hold at a time, in seconds."""

    at_s: float
    held: Sequence[HeldMemory]


def require_drawable(plan: SharingPlan) -> None:
    """Raise `BadInput` for more models than a picture has colours for."""
    if len(plan.models) > MOST_MODELS:
        raise BadInput(f"--picture has colours for {MOST_MODELS} models, and the plan has {len(plan.models)}.")


def draw_sharing(path: Path, plan: SharingPlan, devices: int, homes: int) -> None:
    """Perform a run of Mell, and write its picture: SVG with that suffix, else PNG.

    Raises `BadInput` for more devices than a picture shows, and if the models do not fit.
    """
    if devices > MOST_DEVICES:
        raise BadInput(f"--picture shows {MOST_DEVICES} devices, and Mell takes {devices}.")
    samples = memory_samples(plan, devices, homes)
    # Imported here: the import is slow, and a plan works without matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "mell"
    figure, panels = plt.subplots(
        1 + devices, 1, figsize=(10, 2.2 + 2.6 * devices), sharex=True, layout="constrained", squeeze=False
    )
    demand, *shown = panels[:, 0]
    _draw_demand(demand, plan)
    for number, axes in enumerate(shown):
        _draw_device(axes, plan, number, samples)
    shown[-1].set_xlabel("minutes")
    handles, labels = shown[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    is_svg = path.suffix == ".svg"
    figure.savefig(path, dpi=120, format="svg" if is_svg else "png", metadata={"Date": None} if is_svg else None)
    plt.close(figure)


def memory_samples(plan: SharingPlan, devices: int, homes: int) -> list[MemorySample]:
    """The memory of Mell's devices at the beginning, and in epochs of the window, evenly where pools decide.

    Raises `BadInput` if the models do not fit.
    """
    recorders = {model.pool: ServiceRecorder(lambda now: sample(now)) for model in plan.models}
    world = mell_world(plan, devices, homes, recorders, plan.window.horizon_s + TAIL_S)
    if world is None or world.shared is None:
        raise BadInput(f"The models do not fit into {devices} devices.")
    shared = world.shared
    samples = [MemorySample(plan.window.warmup_s, shared.held)]

    def sample(now: float) -> None:
        if samples[-1].at_s + plan.window.seconds / SAMPLES <= now < plan.window.horizon_s:
            samples.append(MemorySample(now, shared.held))

    world.run(*(plan.jobs[model.pool] for model in plan.models))
    return samples


def _draw_demand(axes: "Axes", plan: SharingPlan) -> None:
    """Tokens of prompts and answers that arrive, by model."""
    window, parts = plan.window, 60
    width_s = window.seconds / parts
    minutes = [(window.warmup_s + (index + 0.5) * width_s) / _MINUTE_S for index in range(parts)]
    for number, model in enumerate(plan.models):
        tokens = [0.0] * parts
        for job in plan.jobs[model.pool]:
            if window.warmup_s <= job.arrival_s < window.horizon_s:
                tokens[int((job.arrival_s - window.warmup_s) / width_s)] += (job.prompt + job.output) / width_s
        axes.plot(minutes, tokens, color=f"C{number}")
    axes.set_ylabel("tokens/s\nthat arrive")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_device(axes: "Axes", plan: SharingPlan, device: int, samples: Sequence[MemorySample]) -> None:
    """The memory of a device: of each model the rest (parameters and processes), and above it the KV blocks."""
    layers: list[list[float]] = []
    colors: list[tuple[str, float]] = []
    labels: list[str] = []
    for number, model in enumerate(plan.models):
        held = [_of_model(sample.held, model.pool, device) for sample in samples]
        layers += [[rest / _GIB for _, rest in held], [kv / _GIB for kv, _ in held]]
        colors += [(f"C{number}", 0.9), (f"C{number}", 0.4)]
        labels += [f"{model.entry.name}: parameters and rest", f"{model.entry.name}: KV"]
    minutes = [sample.at_s / _MINUTE_S for sample in samples]
    axes.stackplot(minutes, *layers, colors=colors, labels=labels, linewidth=0, step="post")
    axes.axhline(plan.budget / _GIB, color="black", linestyle="--", linewidth=1, label="budget")
    axes.set_ylabel(f"device {device}\nGiB held")


def _of_model(held: Sequence[HeldMemory], pool: PoolId, device: int) -> tuple[Bytes, Bytes]:
    """The bytes of KV and of the rest that a model's replicas hold on a device."""
    own = [each for each in held if each.pool == pool and each.device == device]
    return Bytes(sum(each.kv for each in own)), Bytes(sum(each.rest for each in own))

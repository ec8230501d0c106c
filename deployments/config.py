"""What the deployments are configured with: plain values, made by the application from its validated settings."""

from dataclasses import dataclass, field
from typing import Any

from migration.world import Limits
from policies.decision.planner import LiveLimits, Mode

ON_HOST, ON_GPU = ("shared", "collective"), ("cuda_ipc", "nccl")
"""Transports of slots in host memory and in GPU memory; `deployments.transports` makes them."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: its name in the API, the model (a folder or a hub name), and the engine's own arguments.

    `kind` is "vllm", or "paced" for one without a model that keeps the pace of a GPU.
    """

    model_id: str
    model_source: str
    kwargs: dict[str, Any]
    kind: str = "vllm"


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """How requests move; times in seconds.

    `slot_bytes` is the payload of one staging slot, `slots` how many there are (at least two, so that one is
    filled while another is sent). `transport` is one of `ON_HOST` and `ON_GPU`,
    or "module:attribute" of a factory that takes a `MigrationConfig`.
    """

    transport: str = "shared"
    slot_bytes: int = 8 << 20
    slots: int = 4
    transfer_timeout_s: float = 5.0
    lease_s: float = 10.0
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The epoch loop; times in seconds.

    `bounds` are the fewest and the most replicas, `moves_at_once` how many migrations may be under way.
    `link_time_s` and `slowdown` are the boundaries of `migration.estimates.Boundaries`. `record` is a folder for
    recordings of epochs.
    """

    policy: str = "pack"
    mode: Mode = Mode.ACT
    epoch_s: float = 1.0
    limits: LiveLimits = field(default_factory=LiveLimits)
    bounds: tuple[int, int] = (1, 1)
    moves_at_once: int = 32
    link_time_s: float = 10.0
    slowdown: float = 0.2
    placement_ttl_s: float = 2.0
    report_timeout_s: float = 1.0
    record: str | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """The names by which deployments find each other, and what they agree on (seconds): how long an ingress may be
    silent before its requests end, how long an engine may be that has requests before it is given up.
    """

    app: str
    ingress_lease_s: float = 10.0
    engine_silence_s: float = 30.0

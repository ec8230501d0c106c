"""What the deployments are configured with: plain values, made by the application from its validated settings."""

from dataclasses import dataclass, field
from typing import Any

from migration.world import Limits
from policies.model import Tokens


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: its name in the API, the model (a folder or a hub name), and vLLM's own arguments."""

    model_id: str
    model_source: str
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """How requests move; times in seconds.

    `slot_bytes` is the payload of one staging slot, `slots` how many there are (at least two, so that one is
    filled while another is sent). `transport` is "shared" (replicas of one node), "collective", or
    "module:attribute" of a factory that takes a `MigrationConfig`.
    """

    transport: str = "shared"
    slot_bytes: int = 8 << 20
    slots: int = 4
    transfer_timeout_s: float = 5.0
    lease_s: float = 10.0
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The epoch loop; times in seconds."""

    policy: str = "best_fit"
    epoch_s: float = 1.0
    headroom: Tokens = Tokens(64)
    placement_ttl_s: float = 2.0
    report_timeout_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Topology:
    """The names by which deployments find each other."""

    app: str
    ingress_lease_s: float = 10.0

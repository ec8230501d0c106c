"""The configuration of the deployments: sections of the application's settings, and values that it derives."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from migration.protocol.core_messages import Adapter
from migration.protocol.rounds import CopyLimits
from migration.protocol.sizing import time_limit_s
from migration.run.world import MigrationLimits
from policies.cost.service import ServiceLevel
from policies.decision.limits import Limits, LiveLimits, Mode, Sizes, Terms
from policies.memory.pairing import PairingTerms
from policies.model import PoolId
from policies.paths.estimates import Boundaries
from policies.precedence import DEFAULT_CLASS, OVERTAKE_S, ServiceClass, ServiceClasses
from policies.prefix.routing import Routing
from policies.rules.registry import policy

ON_HOST, ON_GPU = ("shared", "collective"), ("cuda_ipc", "nccl")
"""Transports of slots in host memory and in GPU memory; `deployments.replica.transports` makes them."""

MAPPED = ("shared", "cuda_ipc")
"""The transports that send nothing: the target maps the source's slots."""

Auto = Literal["auto"]
"""The value of a setting that follows from others, or from measurements."""
AUTO: Auto = "auto"

MAX_CLASSES = 16
"""Each class has a time series of its own in several metrics."""
_CLASS_NAME = re.compile(r"[a-z0-9_-]{1,32}")

TRANSFER_FLOOR_S = 3.0
"""The least time limit of a transfer: a pair's first one also connects its two ends."""


class SettingsSection(BaseModel):
    """A section of the settings: unknown keys are errors, and values are not converted between types."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    former: ClassVar[Mapping[str, str]] = {}
    """Keys that the section had once, each with what to do instead."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_keys(cls, values: object) -> object:
        if isinstance(values, Mapping) and (found := sorted(cls.former.keys() & values.keys())):
            raise ValueError("; ".join(f"{name}: {cls.former[name]}" for name in found))
        return values


class NodePlacement(SettingsSection):
    """The nodes on which a process may run."""

    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="Custom resources of Ray that the node must have, with the amount that each process takes.",
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels of Ray that the node must have, with a value or an expression of Ray's label selectors: "
        "`front`, `!spot`, `in(a, b)`, `!in(a, b)`.",
    )


class MigrationSettings(SettingsSection):
    """Transport, memory and time limits of migrations."""

    transport: str = Field(
        "shared",
        description='Transport of KV blocks: "shared" (replicas of one node map each other\'s staging slots), '
        '"collective" (Ray collective groups over gloo), "cuda_ipc" and "nccl" on GPUs, or a custom "module:factory".',
    )
    slot_mib: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        AUTO,
        description="Payload of one staging slot of each worker, in MiB; auto: 8 MiB, on GPUs 64 MiB, rounded up to "
        "whole KV blocks, at least two, and no more than the longest context.",
    )
    slots: Auto | Annotated[int, Field(ge=2, le=64)] = Field(
        AUTO,
        description="Staging slots of each worker, shared by all migrations of its replica; auto: 4, and 6 if blocks "
        "are sent (collective, nccl, custom transports).",
    )
    transfer_timeout_s: Auto | Annotated[float, Field(gt=0)] = Field(
        AUTO,
        description="Longest wait for the peer in one transfer, of a full slot at most; auto: 3 s, and 4 times as long "
        "as a slot takes at 100 MB/s.",
    )
    lease_s: float = Field(
        10.0, gt=0, description="Time after which a target drops a request or memory that its source has not confirmed."
    )
    prepare_timeout_s: float = Field(2.0, gt=0, description="Longest wait for the target to reserve room.")
    copy_timeout_s: Auto | Annotated[float, Field(gt=0)] = Field(
        AUTO,
        description="Longest pre-copy round; auto: 10 s, and 4 times as long as its bytes are expected to take "
        "(100 MB/s or more).",
    )
    final_copy_timeout_s: Auto | Annotated[float, Field(gt=0)] = Field(
        AUTO, description="Longest final copy, during the pause; auto: 2 s, and 4 times as long as expected likewise."
    )
    prefill_timeout_s: Auto | Annotated[float, Field(gt=0)] = Field(
        AUTO,
        description="Longest wait for more blocks of a request that its replica still prefills; auto: 10 s, and as "
        "long as its remaining tokens take at 100 per second.",
    )
    adopt_timeout_s: float = Field(5.0, gt=0, description="Longest wait for the target to start the request.")
    max_rounds: int = Field(
        4, ge=0, description="Maximum number of pre-copy rounds; 0: everything is copied during the pause."
    )
    final_blocks: int = Field(
        1,
        ge=0,
        description="Number of last full blocks that are sent as the tail, before the pause, not in another round.",
    )

    @field_validator("transport")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in (*ON_HOST, *ON_GPU) or re.fullmatch(r"[\w.]+:\w+", value):
            return value
        raise ValueError(f"{value!r} is not a transport: write {', '.join((*ON_HOST, *ON_GPU))} or module:factory")

    def transfer_s(self, slot_bytes: int) -> float:
        """The longest wait for the peer in a transfer of a slot, whatever the link is expected to do."""
        if self.transfer_timeout_s != AUTO:
            return self.transfer_timeout_s
        return time_limit_s(slot_bytes, None, TRANSFER_FLOOR_S)

    @property
    def limits(self) -> MigrationLimits:
        """The limits of one migration."""
        return MigrationLimits(
            prepare_s=self.prepare_timeout_s,
            copy_s=None if self.copy_timeout_s == AUTO else self.copy_timeout_s,
            final_s=None if self.final_copy_timeout_s == AUTO else self.final_copy_timeout_s,
            adopt_s=self.adopt_timeout_s,
            prefill_s=None if self.prefill_timeout_s == AUTO else self.prefill_timeout_s,
            copy=CopyLimits(self.max_rounds, self.final_blocks),
        )


class Isolation(StrEnum):
    """The clients whose requests share cached blocks."""

    SHARED = "shared"
    KEY = "key"


class CopyMode(StrEnum):
    """Copies of cached prefixes between replicas that nobody has ordered."""

    AUTO = "auto"
    OFF = "off"


class MemorySettings(SettingsSection):
    """Memory that replicas on a node share by demand: KV pools change their sizes, see memory.md."""

    budget_mib: int | None = Field(
        None,
        ge=1,
        description="Memory of a node for all replicas on it, of all models, in MiB: their processes with parameters "
        "and KV pools. null: KV pools keep the sizes of their start.",
    )
    declared: float = Field(
        3.0, ge=1, description="Largest size of a KV pool, as a multiple of its size without `budget_mib`."
    )
    shrink_s: float = Field(
        5.0,
        ge=0,
        description="Time for requests to move away from a KV pool that shrinks below what they use; then they "
        "continue on other replicas from their tokens.",
    )
    asleep: int = Field(
        1,
        ge=0,
        description="Replicas of a model that may sleep on a node with `budget_mib`, without parameters and KV pool; "
        "others that close stop.",
    )


class PairingSettings(SettingsSection):
    """Pairs of replicas that give each other layers in a burst, for KV, see memory.md#pairs."""

    mode: Mode = Field(
        Mode.OFF,
        strict=False,
        description='"act": the scheduler forms pairs where demand exceeds all KV pools, and undoes them; "observe": '
        'it only proposes to; "off": pairs form and end by order alone. Less, if `scheduler.mode` is less.',
    )
    trigger_s: float = Field(1.0, ge=0, le=60, description="Demand counts with its rise in this time.")
    restore_below: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Share of the KV of whole replicas that demand may have for a pair to end.",
    )
    restore_after_s: float = Field(
        5.0, ge=0, description="Time for which demand has been below `restore_below` when a pair ends."
    )

    @property
    def terms(self) -> PairingTerms:
        """The terms of the policy."""
        return PairingTerms(self.trigger_s, self.restore_below, self.restore_after_s)


class CacheSettings(SettingsSection):
    """The KV caches of the replicas."""

    dram_gib: float = Field(
        0.0,
        ge=0,
        description="Host memory of one replica for KV that its engine's own memory has lost, in GiB; 0: none.",
    )

    isolation: Isolation = Field(
        Isolation.SHARED,
        strict=False,
        description="Clients whose requests share the cached KV of equal prompts: `shared`, all; `key`, those with the "
        "same API key.",
    )

    copies: CopyMode = Field(
        CopyMode.AUTO,
        strict=False,
        description="Copies of cached prefixes between replicas: `auto`, when the prediction is that they save at "
        "least 20 % of a request's time to its first token, and from a replica that is about to stop; `off`, only "
        "those that operators order.",
    )

    pin_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Largest share of a replica's host memory for KV that pins keep from eviction.",
    )

    audit_s: float = Field(
        60.0,
        gt=0,
        description="Seconds between two comparisons of the cached blocks that a replica knows of with those of its "
        "engine.",
    )

    recompute_s: float = Field(
        0.0,
        ge=0,
        description="Seconds between two recomputations of a cached context by an idle replica, which compares the "
        "next token with that of the cache; 0: none.",
    )


class ServiceLevelSettings(SettingsSection):
    """The level of service that the scheduler keeps with as few replicas as possible; null: no level."""

    ttft_p99_s: float | None = Field(
        None, gt=0, description="Longest time to the first token of 99 % of the requests, in seconds."
    )
    itl_p99_ms: float | None = Field(
        None, gt=0, description="Longest time between two tokens of a stream, for 99 % of them, in milliseconds."
    )

    @property
    def level(self) -> ServiceLevel | None:
        """The level; None if it has no part."""
        if self.ttft_p99_s is None and self.itl_p99_ms is None:
            return None
        return ServiceLevel(self.ttft_p99_s, None if self.itl_p99_ms is None else self.itl_p99_ms / 1e3)


class ServiceClassSettings(ServiceLevelSettings):
    """A class of requests, under its name: 1 to 32 of a-z, 0-9, _ and -. Requests without a class are of `default`.

    A level of its own counts while the class has requests, and for ten minutes after them.
    """

    rank: int = Field(
        0,
        ge=-10,
        le=10,
        description="Where room is scarce, a request of a higher rank is served first; lower ones wait, or are moved.",
    )

    @property
    def service_class(self) -> ServiceClass:
        """The class."""
        return ServiceClass(self.rank, self.level)


class SchedulerSettings(SettingsSection):
    """The epoch loop and the placement of arriving requests."""

    policy: str = Field("pack", description="Name of the policy, with its options if any: `pack:headroom_s=2`.")
    mode: Mode = Field(
        Mode.ACT,
        strict=False,
        description="Mode of the epochs: `act` carries decisions out; `observe` makes and shows them, and does as "
        "`off`, which makes none and places arrivals where they fit. Stopping replicas are evacuated in every mode. "
        "`mell mode` changes it at run time.",
    )
    placement: NodePlacement = Field(
        default_factory=NodePlacement,
        description="Nodes for the scheduler; without one, nodes without GPUs are preferred.",
    )
    routing: Routing = Field(
        Routing.TREE,
        strict=False,
        description="Routing of arrivals: `tree`, by the contents of prefix caches and by load; `session`, to the "
        "replica of the session's last request; `least_load`, by the policy alone.",
    )
    sizes: Sizes = Field(
        Sizes.MARGINAL,
        strict=False,
        description="Room that a request needs: `marginal`, without the blocks of its prompt that other running "
        "requests of the replica have; `blind`, for all of its tokens.",
    )
    epoch_s: float = Field(1.0, ge=0.2, le=60, description="Seconds between epochs.")
    headroom_s: float = Field(
        0.0,
        ge=0,
        description="Minimum headroom: seconds of each request's growth that placements keep free, if the policy "
        "keeps less; with `slo` the policy's default does not count.",
    )
    moves_per_epoch: int | None = Field(None, ge=0, description="Maximum number of moves in one epoch; null: no limit.")
    moves_at_once: int = Field(32, ge=1, description="Maximum number of concurrent migrations.")
    link_time_s: float = Field(
        10.0, gt=0, description="Longest time that the queued transfers of one link may take; further moves wait."
    )
    slowdown: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Maximum share of an epoch that prefills of moved requests may take from decoding ones on a "
        "replica.",
    )
    cooldown_s: float = Field(5.0, ge=0, description="Minimum time between two moves of a request by the policy.")
    manual_cooldown_s: float = Field(
        60.0, ge=0, description="Time for which the policy does not move a request after an operator has moved it."
    )
    slack: float | None = Field(
        None,
        ge=0,
        description="KV capacity of the whole pool to keep free, as a number of replicas; null: none or, with `slo`, "
        "the forecast.",
    )
    foresight_s: float | None = Field(
        None,
        ge=0,
        description="Time over which the largest recent rise in demand is kept free; null: the measured start-up "
        "time of a replica or, with `slo`, a forecast instead.",
    )
    linger_s: float | None = Field(
        None,
        ge=0,
        description="Time that an empty replica stays open; null: the measured start-up time of a replica or, with the "
        "forecast of `slo`, none.",
    )
    slo: ServiceLevelSettings = Field(
        default_factory=ServiceLevelSettings,
        description="Service level that decides when a replica is full, and what is kept free. `mell level` "
        "changes it at run time.",
    )
    classes: dict[str, ServiceClassSettings] = Field(
        default_factory=dict,
        max_length=MAX_CLASSES,
        description="Service classes by name, see policies.md; none: all requests are equal.",
    )
    overtake_s: float = Field(
        OVERTAKE_S,
        ge=0,
        description="Longest time by which a request may arrive after a waiting one, for each step that its rank is "
        "higher, and still be served before it.",
    )
    report_timeout_s: float = Field(1.0, gt=0, description="Longest wait for a replica's report.")
    record: str | None = Field(
        None,
        min_length=1,
        description="Folder for recordings of all epochs, one file per scheduler start; null: no recordings.",
    )

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        policy(value)
        return value

    @field_validator("classes")
    @classmethod
    def _are_classes(cls, value: dict[str, ServiceClassSettings]) -> dict[str, ServiceClassSettings]:
        for name, settings in value.items():
            if not _CLASS_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a class: write 1 to 32 of a-z, 0-9, _ and -")
            if name == DEFAULT_CLASS and settings.level is not None:
                raise ValueError(f"the level of {DEFAULT_CLASS} is scheduler.slo: write it there")
        return value

    @property
    def service_classes(self) -> ServiceClasses:
        """The classes; that of the default class only with its rank, since the pool has its level."""
        return ServiceClasses({name: each.service_class for name, each in self.classes.items()}, self.overtake_s)


class Disaggregation(StrEnum):
    """Prefill and decoding on replicas of their own."""

    OFF = "off"
    STATIC = "static"
    AUTO = "auto"


class Caching(StrEnum):
    """The replicas on which requests find the KV of earlier ones, where prefills have replicas of their own.

    MemServe's PD-Basic, PD-Caching-1, PD-Caching-2 and PD-Caching-3.
    """

    NONE = "none"
    PREFILL = "prefill"
    DECODE = "decode"
    FULL = "full"


class DisaggregationSettings(SettingsSection):
    """Prefill and decoding on different replicas."""

    mode: Disaggregation = Field(
        Disaggregation.OFF,
        strict=False,
        description='"static": requests are prefilled on `prefill_replicas` replicas, and move by KV to the others, '
        'which decode; "auto": Mell decides how many replicas prefill, none included, and which requests they get; '
        '"off": every replica does both. "static" and "auto" need `scheduler.mode` "act".',
    )
    prefill_replicas: int | None = Field(
        None,
        ge=1,
        description='Number of replicas for prefills, fewer than the minimum (default: 1). With mode "auto" their '
        "maximum (default: all of the minimum but one).",
    )
    caching: Caching = Field(
        Caching.FULL,
        strict=False,
        description="Replicas on which a request finds the KV of earlier ones: `none`; `prefill`, those for prefills; "
        "`decode`, all, so that a move sends only the blocks that its target lacks; `full`, all, and what a replica "
        "decodes is copied back to that of the prefill where another turn is likely.",
    )


class SchedulerConfig(SchedulerSettings):
    """The scheduler's settings with the bounds of the pool, minimum and maximum number of replicas, copies, memory and
    pairing.

    Divisions of memory give a pool's replicas parts by their `weight`.

    `prefill_replicas` of them are for prefills alone, with `auto_prefills` at most; 0: none. What the others compute
    `returns` to these. Unless the scheduler `scales` the pool in mode `act`, Serve's own rule decides on the number.
    `pools` are the configurations of several pools, each with the members of its own, `slo` among them.
    """

    bounds: tuple[int, int] = (1, 1)
    scales: bool = True
    prefill_replicas: int = 0
    auto_prefills: bool = False
    returns: bool = True
    copies: CopyMode = CopyMode.OFF
    memory: MemorySettings = MemorySettings()
    pairing: PairingSettings = PairingSettings()
    weight: float = 1.0
    pools: Mapping[PoolId, "SchedulerConfig"] = {}

    def of(self, pool: PoolId) -> "SchedulerConfig":
        """The configuration of a pool."""
        return self.pools.get(pool, self)

    @property
    def evacuates(self) -> bool:
        """True if replicas copy their caches to others before they stop: arrivals are routed there only by content."""
        return self.copies is CopyMode.AUTO and self.routing is Routing.TREE

    @property
    def terms(self) -> Terms:
        """The limits of decisions."""
        limits = Limits(
            moves_per_epoch=self.moves_per_epoch,
            cooldown_s=self.cooldown_s,
            headroom_s=self.headroom_s,
        )
        return Terms(
            self.policy,
            LiveLimits(limits, self.linger_s, self.foresight_s, self.manual_cooldown_s, slack=self.slack),
            self.epoch_s,
            self.mode,
            Boundaries(self.link_time_s, self.slowdown),
            self.moves_at_once,
            # Replicas report requests as soon as these are submitted, so two epochs suffice.
            placement_ttl_s=max(1.0, 2 * self.epoch_s),
            by_machine=True,
            service=self.slo.level,
            routing=self.routing,
            sizes=self.sizes,
            copies=self.copies is CopyMode.AUTO,
            classes=self.service_classes,
            prefill_replicas=self.prefill_replicas,
            returns=self.returns and self.prefill_replicas > 0,
            auto_prefills=self.auto_prefills,
            pairing=self.pairing.mode,
            pairing_terms=self.pairing.terms,
            pools={pool: config.terms for pool, config in self.pools.items()},
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: its name in the API, the model (a folder or a hub name), and the engine's own arguments.

    `kind` is "vllm", or "paced" for one without a model that keeps the pace of a GPU. `on_gpu` is the place of its KV
    cache, which is audited every `audit_s` seconds, and has a tier of `dram_gib` GiB of host memory, of which pins hold
    at most `pin_share`. With `standby`, each node keeps a process that has imported vLLM, for the next replica. A
    replica starts only if its engine can load all `adapters`. If it `evacuates`, it remembers the contexts in its
    cache, to copy them before it stops. It recomputes one every `recompute_s` seconds while it is idle; 0: none.
    If it `hides_handed_over`, requests that it has prefilled leave nothing for others where they decode. Its KV pool
    can have `declared` times the size that it would have without a budget of memory; None: there is no budget, and the
    pool keeps its size.
    """

    model_id: str
    model_source: str
    kwargs: dict[str, Any]
    kind: str = "vllm"
    on_gpu: bool = False
    standby: bool = False
    adapters: tuple[Adapter, ...] = ()
    audit_s: float = 60.0
    dram_gib: float = 0.0
    pin_share: float = 0.25
    evacuates: bool = False
    recompute_s: float = 0.0
    hides_handed_over: bool = False
    declared: float | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """The common time limits of the deployments, in seconds, and the pool of each model, by the model's id in the API.

    `ingress_lease_s` is the silence of an ingress after which its requests end, `engine_silence_s` the silence of an
    engine with requests after which it is given up. Serve kills a replica `grace_s` after it has begun to stop it.
    """

    pools: Mapping[str, PoolId]
    ingress_lease_s: float = 10.0
    engine_silence_s: float = 30.0
    grace_s: float = 60.0

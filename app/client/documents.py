"""The documents at `/mell/state`, `/mell/migrations` and below `/mell/cache` as values; pure.

The documents come from another process, maybe of another version: unknown members are ignored, and a missing or
ill-typed one raises KeyError, TypeError or ValueError.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from migration.protocol.record import MigrationRecord, Outcome
from policies.causes import Cause
from policies.model import Phase, ReplicaState, Role
from policies.plan import Path, Reason
from policies.precedence import DEFAULT_CLASS

Records = tuple[MigrationRecord, ...]
_FIELDS = frozenset(each.name for each in fields(MigrationRecord))


@dataclass(frozen=True, slots=True)
class RequestDocument:
    """A request on a replica; `tokens` is the length of its context, prompt included."""

    id: str
    label: str
    tokens: int
    phase: str
    hop: int
    movable: bool
    service_class: str = DEFAULT_CLASS

    @property
    def name(self) -> str:
        """The client's label, else the id: `mell move` takes either."""
        return self.label or self.id


@dataclass(frozen=True, slots=True)
class PairDocument:
    """A replica's half of a pair that is not over: its state, and the other replica."""

    state: str
    buddy: str


@dataclass(frozen=True, slots=True)
class WholePairDocument:
    """A pair of replicas that is not over. Layers from `boundary` on are those of the `upper` one."""

    lower: str
    upper: str
    boundary: int
    phase: str
    state: str
    state_s: float
    by_hand: bool
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class PairingDocument:
    """The pairs of a model's replicas, and those that the policy proposes to form now, where it only does that.

    `unpairable` are the replicas that cannot be in a pair, with the reasons.
    """

    mode: str
    pairs: tuple[WholePairDocument, ...]
    proposed: tuple[tuple[str, str], ...] = ()
    unpairable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryDocument:
    """The elastic KV pool of a replica, in blocks, and the memory that the replica may have.

    The replica fell asleep at `asleep_at`, in seconds since 1970; None while it is awake.
    """

    state: str
    blocks: int
    ordered_blocks: int
    declared_blocks: int
    least_blocks: int
    used_blocks: int
    parameters_mib: int
    kv_mib: int
    rest_mib: int
    asleep_at: float | None = None
    cause: str | None = None
    pair: PairDocument | None = None

    @property
    def mib(self) -> int:
        """All of its memory."""
        return self.parameters_mib + self.kv_mib + self.rest_mib


@dataclass(frozen=True, slots=True)
class SeatDocument:
    """A replica's part of a node's memory; `by` is the origin of its size, and `why` the reason."""

    replica: str
    by: str
    mib: int
    why: str
    model: str | None = None


@dataclass(frozen=True, slots=True)
class NodeDocument:
    """The memory of a node: its budget, what its replicas hold and may hold by their orders, and their parts."""

    id: str
    budget_mib: int
    ordered_mib: int
    held_mib: int
    seats: tuple[SeatDocument, ...]


@dataclass(frozen=True, slots=True)
class ReplicaDocument:
    """A replica; tokens count KV cache entries, 0 while it starts. `role_by_hand` is what an operator has set."""

    id: str
    state: str
    node: str
    used_tokens: int
    capacity_tokens: int
    preemptions: int
    requests: tuple[RequestDocument, ...]
    role: str = Role.BOTH
    role_by_hand: str | None = None
    model: str | None = None
    memory: MemoryDocument | None = None

    @property
    def waiting(self) -> int:
        """Requests queued without KV blocks."""
        return sum(request.phase == Phase.WAITING for request in self.requests)

    @property
    def used_share(self) -> float:
        """Share of the KV cache in use, 0 to 1; 0 while its size is unknown."""
        return min(1.0, self.used_tokens / self.capacity_tokens) if self.capacity_tokens else 0.0


def requests_on(replicas: Iterable[ReplicaDocument]) -> Mapping[str, RequestDocument]:
    """All requests on these replicas by id; of a request in hand-over, the run with the higher hop."""
    found: dict[str, RequestDocument] = {}
    for request in (request for replica in replicas for request in replica.requests):
        if request.id not in found or found[request.id].hop < request.hop:
            found[request.id] = request
    return found


@dataclass(frozen=True, slots=True)
class TimesDocument:
    """The 99th percentiles of both times of a service level; None for an unbounded or unmeasured one."""

    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class ServiceDocument:
    """The service level in `/mell/state`. Times and numbers of replicas are None before step times are known."""

    state: str
    target: TimesDocument
    predicted: TimesDocument
    reached: TimesDocument
    why: tuple[str, ...]
    slowest_step_s: float | None
    step_limit_s: float | None
    late_replicas: int
    free_replicas: float | None
    reserve_replicas: float | None


@dataclass(frozen=True, slots=True)
class ScalingDocument:
    """The reasons for the number of replicas in `/mell/state`, with their numbers."""

    up: str | None
    kept: str | None
    opened: int
    closed: int
    min_replicas: int
    level_replicas: int
    waiting_requests: int
    free_replicas: float
    reserve_replicas: float
    linger_left_s: float | None


@dataclass(frozen=True, slots=True)
class PrefillsDocument:
    """The number of replicas for prefills in `/mell/state`, with its reason and the predictions for other numbers."""

    prefill_replicas: int
    at_most: int
    reason: str
    apart_share: float
    predicted_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class ModelDocument:
    """One of several models in `/mell/state`; `StateDocument` has the members of a sole one.

    `names` are those that calls give.
    """

    model: str
    names: tuple[str, ...]
    wanted: int | None
    service: ServiceDocument | None
    scaling: ScalingDocument | None
    prefills: PrefillsDocument | None
    pairing: PairingDocument | None = None


@dataclass(frozen=True, slots=True)
class StateDocument:
    """`/mell/state`. `as_of` is in seconds since 1970, 0 before the first report of a scheduler.

    `dry_run` is the estimated effect of acting, in mode `observe`; `service` the service level, if there is one,
    and `scaling` the reasons for the number of replicas, in mode `act`. `prefills` is None unless Mell decides on the
    number of replicas for prefills, and `pairing` without `memory.budget_mib`. `configured_mode` is the mode without an
    operator's order. Of several models, each has its own of these in `models`.
    """

    as_of: float
    mode: str
    policy: str | None
    wanted: int | None
    dry_run: str | None
    resting: tuple[tuple[str, str], ...]
    replicas: tuple[ReplicaDocument, ...]
    names: tuple[str, ...] = ()
    service: ServiceDocument | None = None
    scaling: ScalingDocument | None = None
    prefills: PrefillsDocument | None = None
    configured_mode: str | None = None
    models: tuple[ModelDocument, ...] = ()
    nodes: tuple[NodeDocument, ...] = ()
    pairing: PairingDocument | None = None

    @property
    def running(self) -> tuple[ReplicaDocument, ...]:
        """The replicas in state RUNNING."""
        return tuple(r for r in self.replicas if r.state == ReplicaState.RUNNING)

    def requests(self) -> Mapping[str, RequestDocument]:
        """All requests by id; of a request in hand-over, the run with the higher hop."""
        return requests_on(self.replicas)

    def replica(self, id: str) -> ReplicaDocument | None:
        """The replica with this id, None without one."""
        return next((replica for replica in self.replicas if replica.id == id), None)


@dataclass(frozen=True, slots=True)
class MatchedReplicaDocument:
    """A running replica for a prompt, of which it has `hbm` and `dram` tokens; times in seconds.

    It would copy a part of the prompt from the replica `copies_from` first.
    """

    id: str
    hbm: int
    dram: int
    fits: bool
    favoured: bool
    wait_s: float
    first_token_s: float
    score_s: float
    copies_from: str | None = None


@dataclass(frozen=True, slots=True)
class MatchDocument:
    """`/mell/cache/match`: the placement that a prompt would get. `replica` and `by` are None if no replica runs.

    `off` is the reason why the prompt is not routed by content.
    """

    prompt_tokens: int
    full_blocks: int
    block_size: int
    replica: str | None
    queues: bool
    by: str | None
    off: str | None
    replicas: tuple[MatchedReplicaDocument, ...]


@dataclass(frozen=True, slots=True)
class BlocksDocument:
    """The answer to an order: the number of blocks by replica, and the reasons of the replicas that failed."""

    blocks: Mapping[str, int]
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CopyDocument:
    """The answer of `/mell/cache/copy`: the blocks that the donor had, those of them that were sent, and the time."""

    held: int
    blocks: int
    bytes: int
    duration_s: float


def parse_copy(document: Any) -> CopyDocument:
    """Read the answer of `/mell/cache/copy`."""
    held, blocks, size = (int(document[name]) for name in ("held", "blocks", "bytes"))
    return CopyDocument(held, blocks, size, float(document["duration_s"]))


def parse_blocks(document: Any) -> BlocksDocument:
    """Read the answer of DELETE `/mell/cache`, or of `/mell/cache/pin`."""
    blocks = {str(replica): int(count) for replica, count in document["blocks"].items()}
    return BlocksDocument(blocks, {str(replica): str(reason) for replica, reason in document["failed"].items()})


def parse_match(document: Any) -> MatchDocument:
    """Read `/mell/cache/match`."""
    return MatchDocument(
        prompt_tokens=int(document["prompt_tokens"]),
        full_blocks=int(document["full_blocks"]),
        block_size=int(document["block_size"]),
        replica=document["replica"],
        queues=bool(document["queues"]),
        by=document["by"],
        off=document["routing"]["off"],
        replicas=tuple(_matched_replica(item) for item in document["replicas"]),
    )


def _matched_replica(item: Mapping[str, Any]) -> MatchedReplicaDocument:
    return MatchedReplicaDocument(
        id=str(item["id"]),
        hbm=int(item["tokens"]["hbm"]),
        dram=int(item["tokens"]["dram"]),
        fits=bool(item["fits"]),
        favoured=bool(item["favoured"]),
        wait_s=float(item["wait_s"]),
        first_token_s=float(item["first_token_s"]),
        score_s=float(item["score_s"]),
        copies_from=str(copy["from"]) if (copy := item.get("copy")) is not None else None,
    )


def parse_state(document: Any) -> StateDocument:
    """Read `/mell/state`."""
    return StateDocument(
        as_of=float(document["as_of"]),
        mode=str(document["mode"]),
        # Absent before the first report of a scheduler.
        policy=document.get("policy"),
        wanted=document.get("wanted_replicas"),
        dry_run=document.get("dry_run", {}).get("said"),
        resting=tuple((str(source), str(target)) for source, target in document.get("resting_pairs", ())),
        replicas=tuple(_replica(item) for item in document["replicas"]),
        names=tuple(map(str, document.get("names", ()))),
        service=_service(document["service"]) if document.get("service") else None,
        scaling=_scaling(document["scaling"]) if document.get("scaling") else None,
        prefills=_prefills(document["disaggregation"]) if document.get("disaggregation") else None,
        configured_mode=document.get("configured_mode"),
        models=tuple(_model(item) for item in document.get("models", ())),
        nodes=tuple(_node(item) for item in document.get("devices", ())),
        pairing=_pairing(document["pairing"]) if document.get("pairing") else None,
    )


def _node(item: Mapping[str, Any]) -> NodeDocument:
    seats = tuple(
        SeatDocument(str(seat["replica"]), str(seat["by"]), int(seat["held_mib"]), str(seat["why"]), seat.get("model"))
        for seat in item["seats"]
    )
    budget, ordered, held = (int(item[f"{name}_mib"]) for name in ("budget", "ordered", "held"))
    return NodeDocument(str(item["id"]), budget, ordered, held, seats)


def _model(item: Mapping[str, Any]) -> ModelDocument:
    return ModelDocument(
        model=str(item["model"]),
        names=tuple(map(str, item.get("names", ()))),
        wanted=item.get("wanted_replicas"),
        service=_service(item["service"]) if item.get("service") else None,
        scaling=_scaling(item["scaling"]) if item.get("scaling") else None,
        prefills=_prefills(item["disaggregation"]) if item.get("disaggregation") else None,
        pairing=_pairing(item["pairing"]) if item.get("pairing") else None,
    )


def _pairing(item: Mapping[str, Any]) -> PairingDocument:
    proposed = item.get("proposed", {}).get("now", ())
    return PairingDocument(
        mode=str(item["mode"]),
        pairs=tuple(
            WholePairDocument(
                lower=str(pair["lower"]),
                upper=str(pair["upper"]),
                boundary=int(pair["boundary"]),
                phase=str(pair["phase"]),
                state=str(pair["state"]),
                state_s=float(pair["state_s"]),
                by_hand=bool(pair["by_hand"]),
                cause=pair.get("cause"),
            )
            for pair in item["pairs"]
        ),
        proposed=tuple((str(pair["lower"]), str(pair["upper"])) for pair in proposed if pair["forms"]),
        unpairable=item.get("unpairable", {}),
    )


def _service(item: Mapping[str, Any]) -> ServiceDocument:
    return ServiceDocument(
        state=str(item["state"]),
        target=_times(item.get("target", {})),
        predicted=_times(item.get("predicted", {})),
        reached=_times(item.get("reached", {})),
        why=tuple(map(str, item.get("why", ()))),
        slowest_step_s=item.get("slowest_step_s"),
        step_limit_s=item.get("step_limit_s"),
        late_replicas=int(item.get("late_replicas", 0)),
        free_replicas=item.get("free_replicas"),
        reserve_replicas=item.get("reserve_replicas"),
    )


def _times(item: Mapping[str, Any]) -> TimesDocument:
    itl_ms = item.get("itl_p99_ms")
    return TimesDocument(item.get("ttft_p99_s"), None if itl_ms is None else itl_ms / 1e3)


def _scaling(item: Mapping[str, Any]) -> ScalingDocument:
    return ScalingDocument(
        up=item["up"],
        kept=item["kept"],
        opened=int(item["opened"]),
        closed=int(item["closed"]),
        min_replicas=int(item["min_replicas"]),
        level_replicas=int(item.get("level_replicas", 0)),
        waiting_requests=int(item["waiting_requests"]),
        free_replicas=float(item["free_replicas"]),
        reserve_replicas=float(item["reserve_replicas"]),
        linger_left_s=item["linger_left_s"],
    )


def _prefills(item: Mapping[str, Any]) -> PrefillsDocument:
    return PrefillsDocument(
        prefill_replicas=int(item["prefill_replicas"]),
        at_most=int(item["at_most"]),
        reason=str(item["reason"]),
        apart_share=float(item["apart_share"]),
        predicted_s={int(number): float(seconds) for number, seconds in item["predicted_s"].items()},
    )


def parse_records(items: Iterable[Mapping[str, Any]]) -> Records:
    """Read the records at `/mell/migrations`, in their order."""
    return tuple(_record(item) for item in items)


def _replica(item: Mapping[str, Any]) -> ReplicaDocument:
    return ReplicaDocument(
        id=str(item["id"]),
        state=str(item["state"]),
        node=str(item["node"]),
        used_tokens=int(item["used_tokens"] or 0),
        capacity_tokens=int(item["capacity_tokens"] or 0),
        preemptions=int(item["preemptions"]),
        requests=tuple(_request(request) for request in item["requests"]),
        role=str(item.get("role", Role.BOTH)),
        role_by_hand=item.get("role_by_hand"),
        model=item.get("model"),
        memory=_memory(item["memory"]) if item.get("memory") else None,
    )


def _memory(item: Mapping[str, Any]) -> MemoryDocument:
    return MemoryDocument(
        state=str(item["state"]),
        blocks=int(item["blocks"]),
        ordered_blocks=int(item["ordered_blocks"]),
        declared_blocks=int(item["declared_blocks"]),
        least_blocks=int(item["least_blocks"]),
        used_blocks=int(item["used_blocks"]),
        parameters_mib=int(item["parameters_mib"]),
        kv_mib=int(item["kv_mib"]),
        rest_mib=int(item["rest_mib"]),
        asleep_at=item.get("asleep_at"),
        cause=item.get("cause"),
        pair=_pair(item.get("pair")),
    )


def _pair(item: Mapping[str, Any] | None) -> PairDocument | None:
    return None if item is None or item["state"] == "over" else PairDocument(str(item["state"]), str(item["buddy"]))


def _request(item: Mapping[str, Any]) -> RequestDocument:
    return RequestDocument(
        id=str(item["id"]),
        label=str(item["label"]),
        tokens=int(item["tokens"]),
        phase=str(item["phase"]),
        hop=int(item["hop"]),
        movable=bool(item["movable"]),
        service_class=str(item.get("class", DEFAULT_CLASS)),
    )


def _record(item: Mapping[str, Any]) -> MigrationRecord:
    known = {name: value for name, value in item.items() if name in _FIELDS}
    outcome, cause = known.get("outcome"), known.get("cause")
    known |= {
        "path": Path(known["path"]),
        "trigger": Reason(known["trigger"]),
        "outcome": Outcome(outcome) if outcome else None,
        "cause": Cause(cause) if cause else None,
    }
    return MigrationRecord(**known)

"""Response bodies as models.

Some only describe a body that is made elsewhere, and is not validated again: tests compare the two.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from migration.protocol.record import MigrationRecord
from policies.decision.limits import Mode
from policies.model import Blocks, Phase, ReplicaId, ReplicaState, Role


class Described(BaseModel):
    """A response body or a part of one. More members may be added to it in later versions."""

    model_config = ConfigDict(defer_build=True)


class ErrorDetail(Described):
    """The details of an error. Some errors have members beside these, such as `candidates`."""

    message: str = Field(description="In words.")
    type: str = Field(description="OpenAI's name for the kind of error; it follows from the status.")
    param: str | None = Field(description="The parameter that is wrong: `messages[0].content`.")
    code: str | None = Field(description="For programs; null where the status is enough.")


class Error(Described):
    """An error, in OpenAI's form."""

    error: ErrorDetail


class Versions(Described):
    """Versions of Mell and of its dependencies."""

    version: str
    vllm: str
    ray: str
    torch: str


class ServerLoad(Described):
    """The load of an ingress process."""

    server_load: int = Field(description="Admitted calls that have not ended.")


class RunningRequest(Described):
    """A request on a replica."""

    id: str
    label: str = Field(description="Its `X-Request-Id`, or its id.")
    service_class: str = Field(alias="class", description="Its service class.")
    tokens: int = Field(description="Prompt and output so far.")
    phase: Phase
    age_s: float
    movable: bool
    immovable_reason: str | None
    hop: int = Field(description="Rises with each move and each resubmission.")


class CacheBlocks(Described):
    """The blocks of a tier of memory by their use."""

    active: int = Field(description="Blocks of requests.")
    historical: int = Field(description="Free blocks whose content requests can still use.")
    blank: int = Field(description="Free blocks without such a content.")
    pinned: int = Field(description="Blocks of no request that are not evicted; in host memory only.")


class CachedPrompts(Described):
    """Tokens of all prompts of requests that began on the replica, since its start."""

    all: int
    hbm: int = Field(description="Those that it had in its cache and did not compute.")
    dram: int = Field(description="Those that it had in host memory and did not compute.")


class CacheState(Described):
    """The prefix cache of a replica, see caching.md."""

    hbm: CacheBlocks | None = Field(description="`null` if `off`.")
    dram: CacheBlocks | None = Field(description="Those in host memory; `null` without `cache.dram_gib`.")
    version: int = Field(description="Number of the engine's newest event.")
    exact: bool = Field(description="The replica knows its contents exactly; false for moments after a loss of events.")
    off: str | None = Field(description="The reason why they are not known.")
    prompt_tokens: CachedPrompts


class PairHalf(Described):
    """A replica's half of a pair, see memory.md."""

    epoch: int = Field(description="The number of the pair.")
    buddy: str = Field(description="The other replica.")
    state: str = Field(
        description="`paired`; before that `asking`, `linking`, `fitting`, `giving`; behind it `shrinking`, `loading`, "
        "`returning`, `home`, and `over`; `restoring` once the buddy is lost."
    )
    layers: list[int] = Field(description="The first layer that it keeps, and the one behind the last.")
    remote_layers: int = Field(description="Number of layers that the buddy runs now.")
    guest_layers: int = Field(description="Number of the buddy's layers that run here now.")
    hops: int = Field(description="Steps of its requests that have been at the buddy.")
    hop_ms: float | None = Field(description="Mean time for which these steps waited for the buddy.")
    served: int = Field(description="Steps of the buddy's requests that have been here.")
    state_s: float = Field(description="Seconds since the state began.")
    by_hand: bool = Field(description="An operator has ordered the pair; otherwise the policy has.")
    cause: str | None = Field(description="The reason why the pair ends, or ended.")


class MemoryState(Described):
    """The elastic KV pool of a replica, see memory.md."""

    device: str = Field(description="The node whose memory it has.")
    state: str = Field(description="`settled`, or what the pool does: `fitting`, `waiting`, `releasing`, `growing`.")
    blocks: int = Field(description="The blocks that the engine hands out.")
    ordered_blocks: int
    held_blocks: int = Field(description="The blocks whose memory the replica may have.")
    declared_blocks: int = Field(description="The most that it can have.")
    least_blocks: int = Field(
        description="The fewest that it can have: those of a request of `max_model_len`; in a pair also room for the "
        "parameters that come back."
    )
    used_blocks: int = Field(description="Blocks of requests.")
    parameters_mib: int
    kv_mib: int = Field(description="The memory of `held_blocks`.")
    rest_mib: int = Field(description="The most that its processes were seen to hold beside parameters and KV.")
    by_hand: bool = Field(description="An operator has ordered its size; divisions leave it.")
    asleep_at: float | None = Field(
        description="When it fell asleep, in seconds since the epoch; `null` while it is awake."
    )
    cause: str | None = Field(description="The reason why it holds more than it was ordered to.")
    pair: PairHalf | None = Field(description="The pair that it is in, or was in last; `null` without one.")


class SeatPart(Described):
    """A replica's part of the memory of a node."""

    replica: str
    pool: str = Field(description="The deployment of its model.")
    model: str | None = Field(None, description="The id of its model; absent if there is only one.")
    by: str = Field(
        description="The origin of its size: `demand`, `hand` (an operator's order), `start`, `pair`. Or `starts`, "
        "`waits` (for memory, to start or to wake), `asleep`, `silent`."
    )
    held_mib: int = Field(description="What it holds, by its newest report.")
    ordered_mib: int = Field(description="The most that it may hold, by its orders and its report.")
    want_mib: int | None = Field(None, description="What its requests want for KV, by the newest division.")
    target_mib: int | None = Field(None, description="What the newest division gives it for KV.")
    why: str


class NodeMemoryState(Described):
    """The memory of a node, see memory.md."""

    id: str = Field(description="The node.")
    budget_mib: int
    ordered_mib: int = Field(description="The most that its replicas may hold, by their orders and reports.")
    held_mib: int = Field(description="What they hold, by their reports.")
    seats: list[SeatPart] = Field(description="The parts of the replicas on it.")


class ReplicaDetails(Described):
    """A replica with its requests."""

    id: str
    model: str | None = Field(None, description="The id of its model; absent if there is only one.")
    state: ReplicaState
    role: Role = Field(description="Its part in prefill and decoding; `both` without `disaggregation`.")
    role_by_hand: Role | None = Field(
        description="The role that an operator has set. Without a replica for the other part, `role` is `both`."
    )
    node: str
    pids: list[int] = Field(description="Replica, EngineCore and all workers; empty if the replica does not report.")
    capacity_tokens: int
    free_blocks: int
    used_tokens: int
    preemptions: int
    kv_blocks_loaded: int
    staging_slots_in_use: int
    cache: CacheState | None = Field(description="`null` if the replica does not report.")
    requests: list[RunningRequest]
    memory: MemoryState | None = Field(None, description="Only with `memory.budget_mib`.")


class State(Described):
    """The cluster as the scheduler sees it; before the first answer of a scheduler only the first, second and last.

    With several models, the replicas of all stand at the top, numbers of replicas there are sums, and what is of one
    model is in `models`.
    """

    as_of: float = Field(description="Unix time in seconds.")
    mode: Literal["act", "observe", "off"]
    configured_mode: Literal["act", "observe", "off"] = Field(
        "act", description="`scheduler.mode`, which `mode` differs from after an order at `/mell/mode`."
    )
    policy: str = ""
    fence: int = Field(0, description="Rises with every scheduler that starts.")
    wanted_replicas: int = 0
    min_replicas: int = 0
    max_replicas: int = 0
    least_replicas: int = Field(
        0,
        description="The fewest replicas that could hold the KV caches of all requests now, where blocks that requests "
        "share count once. Only with `scheduler.sizes` `marginal`.",
    )
    names: list[str] = Field(
        default_factory=list, description="The names of the model in calls, without those of its adapters."
    )
    estimates: dict[str, Any] = Field(
        default_factory=dict, description="Estimates of links, hand-overs and engine steps."
    )
    resting_pairs: list[list[str]] = Field(
        default_factory=list, description="Source and target between which moves fail."
    )
    service: dict[str, Any] = Field(
        default_factory=dict,
        description="The service level, the times that clients `reached` and those `predicted` (of the last "
        "`window_s`), the limits that follow from the level, and its state: `measuring`, `held`, `slow` or "
        "`unreachable`, with the reasons. Only with `scheduler.slo`.",
    )
    scaling: dict[str, Any] = Field(
        default_factory=dict,
        description="The reason for opening replicas (`up`) and for closing none (`kept`), with the numbers that "
        "decide. Only in the mode `act`.",
    )
    disaggregation: dict[str, Any] = Field(
        default_factory=dict,
        description="The number of replicas for prefills, at most `at_most`, and its reason: `measuring`, `room` (with "
        "more, the others would lack it), `overload` (no number keeps up with the arrivals) or `times`; the predicted "
        "times of a job by that number (`predicted_s`), and the share of the newest prompts that are prefilled there. "
        "Only with `disaggregation.mode` `auto`.",
    )
    routing: dict[str, Any] = Field(
        default_factory=dict,
        description="The routing of arrivals: its `kind`, the engines' `names` for KV blocks or the reason for none "
        "(`off`), and the `mirrors`, `distinct_blocks` and `copies_per_block` of the replicas' caches.",
    )
    dry_run: dict[str, Any] = Field(
        default_factory=dict,
        description="What the mode `act` would do: `replicas_needed` beside `replicas_now`, and its `moves` in "
        "`since_s` seconds, each counted once until its request leaves its replica; `said` is a sentence. Only in the "
        "mode `observe`.",
    )
    models: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Only with several models: each with its id as `model`, and the members that are its own, such as "
        "`names`, `wanted_replicas`, `routing`, `service` and `scaling`.",
    )
    devices: list[NodeMemoryState] = Field(
        default_factory=list, description="The memory of nodes. Only with `memory.budget_mib`."
    )
    pairing: dict[str, Any] = Field(
        default_factory=dict,
        description="The `pairs` of replicas that are not over: which is `lower` and `upper`, the first layer of the "
        "upper one (`boundary`), the `phase` (`forming`, `paired` or `undoing`), the `state` that began `state_s` "
        "seconds ago, and whether an operator has ordered it (`by_hand`). `unpairable` are the replicas that cannot be "
        "in a pair, with the reasons. `mode` is the policy's; in `observe`, `proposed` counts the pairs that it would "
        "have `formed` and `undone`, and has those of `now`. Only with `memory.budget_mib`.",
    )
    replicas: list[ReplicaDetails]


class MatchedTokens(Described):
    """The tokens of a prompt that a replica has, or will have computed for another prompt."""

    hbm: int
    dram: int = Field(description="Those after them in its DRAM.")


class MatchedCopy(Described):
    """A copy of a part of the prompt, before its request runs."""

    donor: str = Field(alias="from")
    tokens: int = Field(description="The prompt's first tokens that the replica has behind the copy.")
    copy_s: float = Field(description="Its seconds, by prediction.")


class ReplicaMatch(Described):
    """A running replica for a prompt."""

    id: str
    tokens: MatchedTokens
    fits: bool = Field(description="It accepts requests, and has room for the prompt.")
    favoured: bool = Field(
        description="The policy chooses among these: near the best score, or the session's replica. If none is, it "
        "chooses among all."
    )
    copied: MatchedCopy | None = Field(
        alias="copy", description="A part of the prompt would be copied from another replica first; `null`: nothing."
    )
    wait_s: float = Field(description="Until the prefills that wait there are over, by prediction.")
    prefill_s: float = Field(description="The prompt's own prefill, of the tokens that the replica lacks.")
    first_token_s: float = Field(description="These and the copy together.")
    score_s: float = Field(description="The same with the price of the prefill; the lowest is the best.")


class MatchRouting(Described):
    """The rule of routing, and its state for one prompt."""

    kind: Literal["tree", "session", "least_load"]
    off: str | None = Field(description="The reason why the prompt is not routed by content.")


class Match(Described):
    """The placement that a prompt would get now."""

    routing: MatchRouting
    prompt_tokens: int
    full_blocks: int = Field(description="Full blocks of the prompt. The last token is always computed.")
    block_size: int = Field(description="Tokens of a block; 0 before it is known.")
    replica: str | None = Field(description="The replica of the placement; `null` if none runs.")
    queues: bool = Field(description="The prompt fits nowhere: it would wait on the replica.")
    by: Literal["content", "session", "policy"] | None = Field(
        description="The policy chose among the replicas near the best score; the session's replica; the policy alone."
    )
    replicas: list[ReplicaMatch]


class Migrations(Described):
    """Migrations, newest first."""

    migrations: list[MigrationRecord]


class MoveStarted(Described):
    """The migration has begun."""

    id: str = Field(description="Its id in `/mell/migrations`, which has its outcome.")


class CarriedOut(Described):
    """The outcome of an order to all running replicas."""

    success: bool = Field(description="All have carried it out.")
    failed: Mapping[ReplicaId, str] = Field(description="The reasons of the others, by replica.")


class Dropped(CarriedOut):
    """Blocks that have been deleted from prefix caches."""

    blocks: Mapping[ReplicaId, Blocks] = Field(description="The number of deleted blocks, by replica.")


class PinnedPrefix(CarriedOut):
    """Blocks of a prompt that stay in host memory."""

    blocks: Mapping[ReplicaId, Blocks] = Field(description="The number of pinned blocks, by replica.")
    ttl_s: float


class Copied(Described):
    """A copy of a prompt's cached blocks."""

    id: str
    source: str
    target: str
    reason: Literal["manual"]
    state: str
    outcome: Literal["done"]
    held: int = Field(description="The prompt's first full blocks that the donor had.")
    present: int = Field(description="Those of them that the target had before.")
    tokens: int = Field(description="The tokens that the target lacked.")
    blocks: int = Field(description="Those that were sent.")
    bytes: int = Field(description="Bytes sent.")
    copy_s: float = Field(description="Seconds spent on sending.")
    duration_s: float = Field(description="Seconds from the order to the end.")
    started_at: float = Field(description="Seconds since the epoch.")
    pool: str = Field(description="The pool of both replicas, by the name of their deployment.")
    error: None
    cause: None


class BoundsSet(Described):
    """The bounds on the number of replicas."""

    min_replicas: int
    max_replicas: int


class LevelSet(Described):
    """The order for a service level."""

    service_class: str = Field(alias="class", description="The service class.")
    ttft_p99_s: float | None = Field(description="Seconds; `null`: as before.")
    itl_p99_ms: float | None = Field(description="Milliseconds; `null`: as before.")


class RoleSet(Described):
    """The role that an operator has set for a replica."""

    id: str = Field(description="The replica.")
    role: Role | None = Field(description="`null`: the role that Mell assigns.")


class MemorySet(Described):
    """The size of a KV pool that an operator has ordered."""

    id: str = Field(description="The replica.")
    blocks: int | None = Field(description="`null`: Mell sizes the pool.")


class SleepSet(Described):
    """An operator's order to sleep or to wake."""

    id: str = Field(description="The replica, or the pool of the model.")
    asleep: bool = Field(description="`true`: to sleep.")


class PairBegun(Described):
    """A pair that begins, or its end."""

    id: str = Field(description="The replica that leads: the lower one. For an end: the one that was named.")


class Modes(Described):
    """The scheduler's mode."""

    mode: Mode
    configured_mode: Mode = Field(description="`scheduler.mode` in the settings.")


class ModeSet(Described):
    """The mode that an operator has set."""

    mode: Mode


class IngressDrain(Described):
    """The ingress process that has answered."""

    id: str = Field(description="The id of its replica in Serve.")
    state: Literal["DRAINING", "RUNNING"]
    running_calls: int = Field(description="Calls that still run. Draining and without any, it may be ended.")


class HandOverState(Described):
    """A hand-over, and what the two Mells compare before it."""

    protocol: int = Field(description="The version of hand-overs: both Mells must have the same.")
    id: str = Field(description="The application's id, another one after each start of Serve.")
    model: str | None = Field(
        description="The fingerprint of the model, its files and vLLM; `null`: no replica answers."
    )
    tied: list[str] = Field(description="Properties of requests that no other engine continues exactly.")
    to: str | None = Field(description="The Mell that takes the requests over; `null` without a hand-over.")
    here: int = Field(description="Requests that run here, in all ingress processes, also those taken over.")
    there: int = Field(description="Requests that run at another Mell.")
    staying: dict[str, int] = Field(description="Those that run here to their ends, by reason.")
    taken: int = Field(description="Requests of another Mell's clients, here or there.")
    silent: list[str] = Field(
        description="Ingress processes that do not answer: their requests are not counted. They get the order later."
    )


class NodeDrain(Described):
    """Nodes that are being emptied."""

    nodes: list[str] = Field(description="Their ids in Ray; none if they have ended.")
    replicas: list[str] = Field(description="The replicas on them, as in `/mell/state`.")


class DrainStarted(Described):
    """The replica is being emptied."""

    id: str
    state: Literal["DRAINING"]

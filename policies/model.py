"""The vocabulary of policies: replicas, the requests on them, and the units in which both are measured.

Everything here is a value. The live scheduler and the simulator report the same values to the same decision.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from policies.cost.fit import NO_STEPS, StepTotals
from policies.precedence import DEFAULT_PRECEDENCE, Precedence

RequestId = NewType("RequestId", str)
ReplicaId = NewType("ReplicaId", str)
PoolId = NewType("PoolId", str)
"""A pool of interchangeable replicas: the name of their deployment."""

SOLE_POOL = PoolId("Engine")
"""The pool of an application with one model. Values of recordings that name no pool belong to it."""

AdapterId = NewType("AdapterId", int)
"""A LoRA adapter: the same number on all replicas."""
Tokens = NewType("Tokens", int)
Blocks = NewType("Blocks", int)
Bytes = NewType("Bytes", int)

RETRY_S = 2.0
"""The longest time between two tries of a request that no replica accepts, in seconds."""


class ReplicaState(StrEnum):
    """The stages of a replica's life. Only RUNNING replicas take new requests.

    A replica that is ASLEEP has neither parameters nor KV blocks. No policy counts it: it is closed for its pool. One
    that is WAKING is STARTING for policies, and only its time is learned apart.
    """

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    ASLEEP = "ASLEEP"
    WAKING = "WAKING"
    STOPPED = "STOPPED"


UP = (ReplicaState.STARTING, ReplicaState.WAKING, ReplicaState.RUNNING)
"""The states of a replica that takes requests, now or once it has started or woken."""


class Role(StrEnum):
    """A replica's part where prefill and decoding are disaggregated; without disaggregation all have both.

    Requests begin on PREFILL replicas, and move to DECODE replicas for their first tokens.
    """

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Phase(StrEnum):
    """The phases of a request. A WAITING request is queued without KV blocks; a MOVING one is being handed over."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    MOVING = "moving"


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """One request on one replica. `immovable` holds the reason why it must stay, None if it may move.

    `adapter` is None for a request of the model alone.
    """

    id: RequestId
    label: str
    tokens: Tokens
    phase: Phase
    age_s: float
    hop: int
    immovable: str | None = None
    precedence: Precedence = DEFAULT_PRECEDENCE
    adapter: AdapterId | None = None


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica as the engine reports it. `free_blocks` is the engine's own count, the truth about room: below zero
    if the engine has become smaller than what is used. `capacity_tokens` may change at any time, `nominal_tokens` is
    that of a new replica (0: it is the capacity).

    A request can continue only on a replica with the same `model`. `steps` are the engine's steps since its start,
    `step_tokens` the most tokens that one of them computes (0: unknown), `max_adapters` the most adapters in one.
    """

    id: ReplicaId
    state: ReplicaState
    node: str
    capacity_tokens: Tokens
    block_size: int
    free_blocks: Blocks
    max_requests: int
    requests: tuple[RequestLoad, ...] = ()
    model: str = ""
    steps: StepTotals = NO_STEPS
    step_tokens: int = 0
    max_adapters: int = 0
    nominal_tokens: Tokens = Tokens(0)

    @property
    def free_tokens(self) -> Tokens:
        """Tokens that fit into the free blocks, below zero as these are."""
        return Tokens(self.free_blocks * self.block_size)

    @property
    def used_tokens(self) -> Tokens:
        """Tokens in blocks that are not free."""
        return Tokens(max(0, self.capacity_tokens - self.free_tokens))

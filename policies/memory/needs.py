"""The KV memory that a replica needs, by the requests on it."""

from dataclasses import dataclass

from policies.memory.division import SeatNeed
from policies.memory.plan import ModelMemory
from policies.model import Blocks, Bytes, ReplicaId

GROWTH_S = 2.0
"""Seconds of growth of its requests that a replica wants: two epochs."""


@dataclass(frozen=True, slots=True)
class ReplicaDemand:
    """The demand of a replica: the tokens of KV that it has in use, those that its waiting requests will take, and the
    number of its requests, waiting ones included. Each grows by `rate` tokens per second.
    """

    used: float
    waiting: float
    requests: int
    rate: float


def seat_need(
    replica: ReplicaId,
    model: ModelMemory,
    block_tokens: int,
    weight: float,
    declared: Blocks,
    blocks: Blocks,
    demand: ReplicaDemand,
    shrunk_at: float | None,
) -> SeatNeed:
    """The need of a replica that has `blocks` blocks of `block_tokens` tokens.

    It wants the memory of its running requests, of their growth, and of its queue.
    """
    block, token = model.block, model.block / block_tokens
    growth = GROWTH_S * demand.rate * demand.requests
    return SeatNeed(
        replica,
        weight,
        Bytes(model.floor * block),
        Bytes(round(demand.used * token)),
        Bytes(round((demand.used + demand.waiting + growth) * token)),
        Bytes(declared * block),
        Bytes(blocks * block),
        shrunk_at,
    )

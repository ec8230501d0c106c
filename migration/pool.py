"""MemPool: the KV memory of one replica, as a port with the calls of MemServe (Hu et al., 2024, Table 1).

The paper's pool owns all memory and hands out addresses. Here vLLM owns its blocks, and a block is named by its
content: by the tokens up to its end, the salt and the adapter. So a context takes the place of the paper's lists of
tokens and addresses, and an address that went stale is a block that is missing, never the block of another prompt.

    memory     alloc_mem, free_mem   room of the engine, under a lease
    index      insert, match,        blocks of the prefix cache, by context
               delete                and by name
    tiers      swap_in, swap_out     blocks between the accelerator's memory and that of the host
               pin                   blocks that stay in the host's (ours)
    transfer   transfer              the KV of a running request, for the replica that goes on with it
               transfer_with_insert  a prefix, for another replica's prefix cache

Nothing but `transfer_with_insert` waits for another replica. All of a replica's memory that is held for somebody else
is under a lease: it becomes free again if that one dies. docs/caching.md has the deviations from the paper.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from migration.protocol.messages import SlotRef
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from migration.run.source import Order
from policies.model import Blocks, ReplicaId, Tokens
from policies.prefix.tree import HeldPrefix


class PinRefusal(StrEnum):
    """The reason why nothing was pinned."""

    NO_TIER = "no_tier"
    UNKNOWN = "unknown"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class PinAnswer:
    """The number of pinned blocks, or the reason why there are none, and its text."""

    blocks: Blocks = Blocks(0)
    refusal: PinRefusal | None = None
    why: str = ""


class MemPool(Protocol):
    """The pool of one replica. A context is the prompt of a request and its output so far."""

    def alloc_mem(self, name: str, tokens: Tokens) -> None:
        """Keep room for the KV of that many tokens under `name`, until `free_mem` or the end of a lease.

        Raises:
            Refused: there is no room, or there is memory of that name; nothing has changed.
        """
        ...

    def free_mem(self, name: str) -> None:
        """Give room back. An unknown name is no error: the lease may have ended."""
        ...

    async def insert(
        self,
        name: str,
        spec: RequestSpec,
        outputs: tuple[int, ...],
        first: Blocks,
        staged: Sequence[SlotRef],
        count: Blocks,
    ) -> None:
        """Copy `count` staged blocks into the prefix cache, as those of the context from block `first` on.

        `staged` has a slot per worker, in the order of their ranks. `name` is never reused. The blocks that the engine
        computes by itself need no call.

        Raises:
            TransferFailed: the engine could not take them, or a slot has another content by now.
        """
        ...

    def match(self, spec: RequestSpec, outputs: tuple[int, ...] = ()) -> HeldPrefix:
        """The number of the context's first full blocks that the replica has, by tier, as far as is known."""
        ...

    async def delete(self, names: Collection[int] | None) -> Blocks:
        """Delete the blocks of these names from the prefix cache, None: all; their number.

        No later request finds them. What uses some of them keeps those.

        Raises:
            TransferFailed: the blocks have no names, or the engine could not.
        """
        ...

    async def swap_in(self, name: str, spec: RequestSpec, outputs: tuple[int, ...] = ()) -> None:
        """Have the blocks of a context that the host has copied into the accelerator's memory.

        The engine runs a request of one token for it. `name` is never reused. The mirror follows a moment later.

        Raises:
            TransferFailed: the engine could not take them.
        """
        ...

    async def swap_out(self, count: Blocks) -> Blocks:
        """Free up to `count` blocks of the accelerator's memory that the host has, too; their number.

        Raises:
            TransferFailed: there is no tier of host memory, or the engine could not.
        """
        ...

    async def pin(self, names: Sequence[int], ttl_s: float) -> PinAnswer:
        """Keep a prefix in the host's memory for that many seconds; 0 ends its pin.

        The pin is of as many of the prefix's first blocks as the host has, and a later one of the same blocks replaces
        it. Pins are under a budget.

        Raises:
            TransferFailed: the engine could not.
        """
        ...

    def transfer(self, order: Order, to: ReplicaId) -> MigrationRecord:
        """Begin to send the KV of a running request to the replica that will go on with it; the record so far.

        The other replica keeps it under a lease until it runs the request.

        Raises:
            RequestGone: the request is not here.
            Refused: the request moves already or must stay, or `to` is this replica.
        """
        ...

    async def transfer_with_insert(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        """Copy a prefix into another replica's prefix cache; the record of the copy's end, also of a failure.

        Both replicas keep what they need for it under leases.

        Raises:
            Refused: `to` is this replica, the copy is under way already, or too many are.
        """
        ...

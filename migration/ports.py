"""What the migration shells need from the world around them, as ports.

The real parts and the fakes of the tests are siblings behind these protocols.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from migration.messages import Adopt, Chunk, Fingerprint, Prepare, Prepared, SlotRef
from migration.request import Moved, Moving, RequestSpec
from policies.model import Blocks, Bytes, ReplicaId, RequestId

Clock = Callable[[], float]
"""Seconds of a monotonic clock."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One staging slot of this replica; `memory` is the whole of it, header included."""

    segment: str
    offset: int
    memory: memoryview


@dataclass(frozen=True, slots=True)
class Hosted:
    """A running request as of now: everything that another replica needs to continue it.

    `key` names its run in the engine; it changes with every hop.
    """

    spec: RequestSpec
    hop: int
    key: str
    outputs: tuple[int, ...]

    @property
    def context(self) -> int:
        """Prompt and output tokens."""
        return len(self.spec.prompt) + len(self.outputs)


class SourceHost(Protocol):
    """The requests of the replica that a migration leaves. All calls take effect at once.

    Every call but `unmute` raises RequestGone once the request has ended.
    """

    def snapshot(self, request: RequestId) -> Hosted:
        """The request as of now."""
        ...

    def next_hop(self, request: RequestId) -> int:
        """A hop that no attempt to move this request has used."""
        ...

    def mute(self, request: RequestId) -> Hosted:
        """Stop publishing tokens (the engine computes on); return the request as it is frozen."""
        ...

    def unmute(self, request: RequestId) -> None:
        """Publish what was held back, and go on. For a request that is not muted this does nothing."""
        ...

    def announce(self, event: Moving | Moved) -> None:
        """Tell the request's reader."""
        ...

    def drop(self, request: RequestId) -> None:
        """Abort the request in the engine without a word to its reader."""
        ...


class TargetHost(Protocol):
    """The requests of the replica that a migration enters."""

    def accept(self, message: Prepare) -> None:
        """Raises Refused if the request cannot come here; nothing has changed either way."""
        ...

    def reserve(self, migration: str, context: int) -> None:
        """Keep room for a context of that many tokens, until `release`."""
        ...

    def release(self, migration: str) -> None:
        """Give the room back; an unknown migration is no error."""
        ...

    async def add(self, spec: RequestSpec, hop: int, outputs: tuple[int, ...]) -> None:
        """Run the request under `hop`, after `outputs`. Raises Refused if the engine will not."""
        ...

    def abort(self, request: RequestId, hop: int) -> None:
        """Abort the request if it runs under that very hop."""
        ...


class BlockStore(Protocol):
    """The engine's KV blocks, by way of staging slots."""

    fingerprint: Fingerprint

    async def gather(self, key: str, first: Blocks, last: Blocks, segment: str, offset: int) -> tuple[SlotRef, Bytes]:
        """Copy blocks [first, last) of the running request `key` into a slot; return it, and bytes to send.

        Raises:
            TransferFailed: the blocks are not all there (the request ended, or was preempted).
        """
        ...

    async def load(self, tokens: tuple[int, ...], first: Blocks, last: Blocks, slot: SlotRef) -> None:
        """Put staged blocks [first, last) of the context `tokens` into the prefix cache.

        Raises:
            TransferFailed: the engine could not take them.
        """
        ...


class Peer(Protocol):
    """The target replica, as the source sees it.

    Every call may raise Refused, TransferFailed, or PeerLost when the replica is dead or stopping.
    """

    id: ReplicaId

    async def prepare(self, message: Prepare) -> Prepared:
        """Ask it to make room."""
        ...

    async def receive(self, message: Chunk) -> None:
        """Have it take a chunk into its cache."""
        ...

    async def adopt(self, message: Adopt) -> None:
        """Have it run the request; returns once it does."""
        ...

    async def commit(self, migration: str) -> None:
        """Tell it that the request is its own for good."""
        ...

    async def cancel(self, migration: str) -> None:
        """Tell it to forget the migration and whatever it runs for it."""
        ...

    async def resumed(self, migration: str) -> float | None:
        """Wait for the adopted request's first new token: seconds from its adoption; None if there was none."""
        ...


class Transport(Protocol):
    """Carries the bytes of a staging slot to another replica."""

    name: str

    @property
    def shares_slots(self) -> bool:
        """Whether the target reads the source's slot itself: then it is free only once the blocks are loaded."""
        ...

    def channel(self, source: ReplicaId, target: ReplicaId) -> str:
        """Name of the next transfer from source to target; both ends make transfers in the order of these calls."""
        ...

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        """Send the first `size` bytes of a slot; returns when they have been taken over.

        Cancelled, it returns only once the slot is no longer read.

        Raises:
            TransferFailed: the peer did not take them (TransferTimeout: not in time). The channel is closed.
        """
        ...

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        """Make the bytes that the peer staged readable here, in `slot` if there is one; return where they are.

        Raises:
            As `send` does.
        """
        ...

    def drop(self, channel: str) -> None:
        """Give up what a transfer goes through, after a failure; the next one gets another."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...

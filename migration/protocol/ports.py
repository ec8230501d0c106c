"""The ports of the migration shells to the rest of Mell.

The real parts and the fakes of the tests are siblings behind these protocols.
"""

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from migration.protocol.core_messages import Prefilled
from migration.protocol.layouts import Resharding
from migration.protocol.messages import Adopt, Chunk, CopyRound, Fingerprint, Prepare, Prepared, Shard, SlotRef, Tail
from migration.protocol.reading import Output, Reader, SegmentOrigin
from migration.protocol.request import Doubt, Moved, Moving, RequestSpec
from policies.model import Blocks, Bytes, ReplicaId, RequestId, Tokens
from policies.prefix.tree import HeldPrefix

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

    `key` names its run in the engine; it changes with every hop. It `decodes` once this run has generated a token.
    """

    spec: RequestSpec
    hop: int
    key: str
    outputs: tuple[int, ...]
    decodes: bool

    @property
    def context(self) -> int:
        """Prompt and output tokens."""
        return self.spec.prompt_tokens + len(self.outputs)


class SourceHost(Protocol):
    """The requests of the replica that a migration leaves. All calls take effect at once.

    A request is named with the hop under which it runs: the same request under another hop is another run. Every call
    but `unmute` raises RequestGone once the run has ended.
    """

    def snapshot(self, request: RequestId, hop: int | None = None) -> Hosted:
        """The current state of the request under `hop`; None: under any hop."""
        ...

    def next_hop(self, request: RequestId) -> int:
        """A hop that no attempt to move this request has used."""
        ...

    async def next_output(self, request: RequestId, hop: int) -> None:
        """Wait until the request has published another token, or has ended."""
        ...

    async def halt_behind_token(self, request: RequestId, hop: int) -> None:
        """Have the engine end the request's run with one of its next tokens; return once that is published.

        The request stays here until `drop` or `unmute`, as after `halt`. Also returns if the request has ended.
        """
        ...

    def mute(self, request: RequestId, hop: int) -> Hosted:
        """Stop publishing tokens (the engine computes on); return the request as it is frozen."""
        ...

    def halt(self, request: RequestId, hop: int) -> None:
        """Take a muted request out of the engine, which frees its blocks. It stays here until `drop` or `unmute`.

        Does nothing for a run that has been halted behind a token.
        """
        ...

    def unmute(self, request: RequestId, hop: int) -> None:
        """Publish the withheld output, and go on, in the engine anew if the request was halted, or is about to be.

        Does nothing for a run that is neither muted nor halted, or not here.
        """
        ...

    def announce(self, event: Moving | Moved | Doubt) -> None:
        """Publish an event to the request's reader, behind all that was published before."""
        ...

    def drop(self, request: RequestId, hop: int) -> None:
        """Abort the request in the engine without an event for its reader."""
        ...


class TargetHost(Protocol):
    """The requests of the replica that a migration enters."""

    def accept(self, message: Prepare) -> Tokens:
        """The room that the request needs, without the blocks that it would share with running requests.

        Raises Refused if the request cannot come here; nothing has changed either way.
        """
        ...

    def reserve(self, migration: str, tokens: Tokens) -> None:
        """Keep that much room, until `release`."""
        ...

    def release(self, migration: str) -> None:
        """Give the room back; an unknown migration is no error."""
        ...

    async def add(self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], tail: Tail | None) -> None:
        """Run the request under `hop`, after `outputs`, with a tail that the block store holds.

        Raises:
            Refused: the engine will not. The tail is still held.
        """
        ...

    def abort(self, request: RequestId, hop: int) -> None:
        """Abort the request if it runs under that very hop."""
        ...


class WorkerLinks(Protocol):
    """The connections of an engine's workers to those of other engines on the node."""

    addresses: tuple[str, ...]
    """The addresses of the workers, in the order of their ranks."""

    async def reach(self, addresses: Sequence[str]) -> bool:
        """Connect to these workers of another engine; False unless they are on this node."""
        ...

    async def send(
        self,
        key: str,
        first: Blocks,
        last: Blocks,
        slots: Sequence[Sequence[Slot]],
        blocks: Blocks,
        load: str,
        addresses: Sequence[str],
        cuts: Resharding | None = None,
    ) -> Bytes:
        """Copy full blocks [first, last) of a running request into a load of the workers at `addresses`.

        Each shard goes to the worker of the same rank or, with `cuts`, to those that take a part of it.
        They pass through `slots`, each of which is one per worker, for `blocks` blocks. Returns the bytes copied, once
        the other workers have them or do not need them. Cancelled, it returns only once the slots are not used any
        more.

        Raises:
            TransferFailed: as `BlockStore.gather` and `BlockStore.put`.
        """
        ...

    async def hold(
        self, tail: Tail, slots: Sequence[SlotRef], addresses: Sequence[str], cuts: Resharding | None = None
    ) -> None:
        """As `BlockStore.hold`, of the workers at `addresses`, which have been reached and expect the tail."""
        ...

    async def missing(self, load: str) -> int | None:
        """The number of a load's shards that have not arrived; None before its admission and after its end."""
        ...


HALTED = "halted"
"""The finish reason of a run that was halted: its request goes on, here or elsewhere."""


class Generated(msgspec.Struct, frozen=True, gc=False):
    """The output of one engine step for one request; in the last one, `finish` is vLLM's finish reason, or HALTED.

    `rest` is everything else in vLLM's output of this step, encoded (see `Extras`); None if there is nothing else.
    `prefilled` is in the first step with output: of the run's prompt, with the output before it.
    """

    tokens: tuple[int, ...]
    finish: str | None = None
    rest: bytes | None = None
    prefilled: Prefilled | None = None


class OutputSink(Protocol):
    """Takes the output of one run. Calls are made on the event loop, one at a time, and must not wait or raise."""

    def take(self, step: Generated) -> None:
        """The output of the next step. After one with a finish reason there are no more calls."""
        ...

    def fail(self, error: Exception) -> None:
        """The run has ended without a finish reason. There are no more calls."""
        ...


class BlockStore(Protocol):
    """The engine's KV blocks, by way of staging slots: one slot per worker, in the order of their ranks."""

    fingerprint: Fingerprint

    @property
    def links(self) -> WorkerLinks | None:
        """The workers' connections; None if only their replica exchanges blocks."""
        ...

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        """Copy blocks [first, last) of the running request `key`, each worker's shard into its slot.

        Raises:
            TransferFailed: the blocks are not all there (the request ended, or was preempted), for any worker.
        """
        ...

    async def computed(self, key: str) -> Tokens | None:
        """The number of first tokens of the running request `key` whose KV its blocks have; None: it has no blocks.

        Raises:
            TransferFailed: the engine does not answer.
        """
        ...

    async def computed_beyond(self, key: str, tokens: Tokens) -> Tokens:
        """Wait until the blocks of the running request `key` have the KV of more than `tokens` tokens; their number.

        Waits on for a request that waits, is preempted, or is not known yet or any more.

        Raises:
            TransferFailed: the engine does not answer.
        """
        ...

    async def load(self, load: str, spec: RequestSpec, outputs: tuple[int, ...], first: Blocks, last: Blocks) -> None:
        """Allocate blocks [first, last) of the request's prompt and outputs; return once `put` has filled them all.

        Requests that are added from then on find them in the prefix cache. Cancelled, it frees them. A name of a load
        is never reused.

        Raises:
            TransferFailed: the engine could not take them.
        """
        ...

    async def put(
        self, load: str, first: Blocks, last: Blocks, slots: Sequence[SlotRef], cuts: Resharding | None = None
    ) -> None:
        """Copy staged blocks [first, last) of the context into the load `load`, which has been called and not ended.

        There is a slot per worker or, with `cuts`, per sent shard of another engine, of which workers take parts.

        Raises:
            TransferFailed: a slot has another ticket, or the load ended, for any worker.
        """
        ...

    async def gather_tail(self, key: str, tail: Tail, slots: Sequence[Slot]) -> Sequence[Shard]:
        """Copy the tail of the running request `key`, which has output behind its tokens, as `gather` does.

        Raises:
            TransferFailed: as `gather`, or the engine computes the request's known tokens anew.
        """
        ...

    def present(self, spec: RequestSpec, outputs: tuple[int, ...]) -> HeldPrefix:
        """The number of the context's first full blocks that the prefix cache has, by tier, as far as is known."""
        ...

    def expect(self, tail: str) -> None:
        """Let the workers hold the tail of this name, once, or until `discard`."""
        ...

    async def hold(self, tail: Tail, slots: Sequence[SlotRef], cuts: Resharding | None = None) -> None:
        """Copy a staged tail into memory of the workers, for the request that will be added with it.

        The slots are as in `put`.

        Raises:
            TransferFailed: a slot has another ticket, or the tail is not expected, for any worker.
        """
        ...

    def discard(self, tail: str) -> None:
        """Free the tail of this name, which no request will be added with, and expect it no more."""
        ...


class PrefixHolds(Protocol):
    """The engine's cached blocks, kept for a copy."""

    async def hold_prefix(self, hold: str, spec: RequestSpec, outputs: tuple[int, ...]) -> Blocks:
        """Keep the first full blocks of a context that the prefix cache has, until `release_prefix`; their number.

        Blocks that only the tier of host memory has are loaded first, as far as there is room for them.

        They can be gathered and sent as those of a running request of the key `hold`, a name that is never reused.
        Cancelled, it releases them.

        Raises:
            TransferFailed: the engine could not hold them.
        """
        ...

    def release_prefix(self, hold: str) -> None:
        """End a hold. An unknown one is no error."""
        ...


class Peer(Protocol):
    """The target replica, as the source sees it.

    Every call may raise Refused, TransferFailed, or PeerLost when the replica is dead or stopping.
    """

    id: ReplicaId

    async def prepare(self, message: Prepare) -> Prepared:
        """Ask it to make room."""
        ...

    async def load(self, message: CopyRound) -> None:
        """Have it load a round of blocks; returns once all of them are in its prefix cache."""
        ...

    async def receive(self, message: Chunk) -> None:
        """Have it copy a chunk of a round into its cache."""
        ...

    async def renew(self, migration: str) -> None:
        """Have it keep what it holds for the migration, although nothing is sent."""
        ...

    async def adopt(self, message: Adopt) -> None:
        """Have it run the request; returns once it does. A repeated call changes nothing."""
        ...

    async def cancel(self, migration: str) -> None:
        """Have it free all that it holds for the migration, and end its run of the request."""
        ...

    async def resumed(self, migration: str) -> float | None:
        """Wait for the adopted request's first new token: seconds from its adoption; None if there was none."""
        ...


class Transport(Protocol):
    """Carries the bytes of a staging slot to another replica."""

    name: str

    @property
    def direct(self) -> bool:
        """True if `send` and `receive` have nothing to do where the workers can exchange blocks by themselves."""
        ...

    @property
    def shares_slots(self) -> bool:
        """True if the target reads the source's slot itself: then it is free only once the blocks are loaded."""
        ...

    def channel(self, source: ReplicaId, target: ReplicaId, rank: int) -> str:
        """Name of the next transfer of a shard, from the source's worker of this rank to a slot of the target.

        Both ends make the transfers of a rank in the order of these calls.
        """
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
        """Give up a channel after a failed transfer; the next transfer gets another channel."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


@runtime_checkable
class PeerGroups(Protocol):
    """A `Transport` that keeps something for each peer beside its channels under way: connections, or threads."""

    def leave(self, replica: ReplicaId) -> None:
        """Give up what is kept for a peer that has ended."""
        ...


# --- around the reader of a request -------------------------------------------------------------------


class LossKind(StrEnum):
    """Whose fault it is that a request is not served."""

    INVALID = "invalid"
    """The request's: no engine takes it."""
    UNAVAILABLE = "unavailable"
    """Nobody's: no replica takes it now."""
    SUSPECT = "suspect"
    """The request's, perhaps: engines have died with it on board."""
    INTERNAL = "internal"
    """Ours: a defect."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a request is not served; the text is for people."""

    kind: LossKind
    text: str
    retry_after_s: float | None = None
    """The predicted time after which a replica takes it, in seconds; None: unknown."""


@dataclass(frozen=True, slots=True)
class Prospects:
    """The prospects of a request without a replica.

    `wake_s` is the predicted time until a sleeping replica takes it, in seconds; None: none sleeps. `obstacle` is the
    reason why none takes it for now, if that is known.
    """

    wake_s: float | None = None
    obstacle: str | None = None


class Listener(Protocol):
    """Takes the output of one request. This is the only interface between the protocol and the making of answers.

    The calls come in this order: any number of `deliver`, whose outputs follow each other without gap or repetition
    from index 0 on, from any replicas; then either one with a finish reason, or `lost`, or nothing if the listener's
    side left first (`ReaderRun.leave`). Calls are made on the event loop, one at a time. They must not wait and must
    not raise; a slow listener has to store the output.
    """

    def deliver(self, output: Output) -> None:
        """The next output tokens, with the extras of their steps; with the last ones, its end."""
        ...

    def lost(self, loss: Loss) -> None:
        """The output cannot be completed."""
        ...


class Hosts(Protocol):
    """The replicas, as the reader of requests sees them. Every call but `place` may raise PeerLost."""

    @property
    def awake(self) -> Collection[ReplicaId]:
        """The replicas that are listed as running, without those that are known to sleep."""
        ...

    def reachable(self, replica: ReplicaId) -> bool:
        """False if the replica's events are known not to arrive."""
        ...

    async def changed(self, within_s: float) -> bool:
        """Wait until the list of replicas changes, or another one can be reached; False: not within that time."""
        ...

    @property
    def prospects(self) -> Prospects:
        """The prospects of requests for which there was no replica."""
        ...

    async def place(self, spec: RequestSpec, outputs: int, exclude: AbstractSet[ReplicaId]) -> ReplicaId | None:
        """A replica for a request that has `outputs` output tokens, none of `exclude`; None if there is none now."""
        ...

    async def submit(
        self, replica: ReplicaId, spec: RequestSpec, hop: int, outputs: tuple[int, ...], model: str | None
    ) -> str:
        """Have the request run under `hop`, after `outputs`, which `model` gave; return the model that runs it.

        Raises:
            Refused: the replica does not take it (Stopping: nor any other request). Nothing has changed there.
            PeerLost: there was no answer. The replica may have taken the request.
        """
        ...

    async def attach(self, replica: ReplicaId, request: RequestId, hop: int, index: int) -> bool:
        """Read a request from output token `index` on; False if the replica does not run it under `hop`."""
        ...

    async def keep(self, replica: ReplicaId, request: RequestId, hop: int, next_hop: int) -> None:
        """Answer a source in doubt: it goes on, the reader does not follow to `next_hop`."""
        ...

    async def release(self, replica: ReplicaId, request: RequestId, hop: int | None) -> None:
        """End the runs of a request under hops below `hop` (None: under any hop)."""
        ...


class Journal(Protocol):
    """Takes the events in a request's life, for traces and records. Its methods neither wait nor raise."""

    def hosted(self, spec: RequestSpec, reader: Reader, origin: SegmentOrigin, index: int) -> None:
        """`reader.host` has the request or is being asked to take it; output tokens from `index` on are its."""
        ...

    def took(self, spec: RequestSpec, reader: Reader) -> None:
        """An event of a replica has arrived, with or without tokens."""
        ...

    def lost(self, spec: RequestSpec, reader: Reader, reason: str, had: bool) -> None:
        """`reader.host` does not have the request, or not any more if it `had` it."""
        ...

    def continued(self, spec: RequestSpec, reader: Reader, lost: ReplicaId, reason: str, took_s: float) -> None:
        """The request goes on at `reader.host`, `took_s` seconds after `lost` was given up."""
        ...

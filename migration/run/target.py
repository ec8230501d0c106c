"""Carries out the target's side of one migration: executes the session's commands, keeps its lease."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple

from migration.concurrency import Tasks, gather, take_failure
from migration.protocol.errors import Refused, TransferFailed
from migration.protocol.layouts import Resharding, reshard
from migration.protocol.messages import (
    Adopt,
    Chunk,
    CopyRound,
    Fingerprint,
    PathRequest,
    Prepare,
    Prepared,
    SlotRef,
    load_name,
    tail_name,
)
from migration.protocol.ports import BlockStore, Slot, TargetHost, Transport
from migration.protocol.request import RequestSpec
from migration.protocol.tables import target
from migration.protocol.tables.target import TargetCommand, TargetEvent, TargetState
from migration.run.slots import Lease, Slots
from policies.causes import Cause
from policies.model import Blocks, Bytes, RequestId, Tokens
from policies.plan import Path

log = logging.getLogger(__name__)


class Agreement(NamedTuple):
    """How a request comes, and the cuts of shards that this takes; by tokens only, for a `reason`."""

    path: Path
    cuts: Resharding | None = None
    reason: str = ""


def agree(message: Prepare, own: Fingerprint) -> Agreement:
    """How the request can come: by KV if the caches are alike, by tokens if only the models are.

    Layouts may be unlike, as far as shards can be cut.

    Raises:
        Refused: it cannot, or not by the path that was asked for.
    """
    theirs = message.fingerprint
    if theirs.model != own.model:
        raise Refused("the replicas serve different models or versions", Cause.FINGERPRINT)
    if message.path is PathRequest.TOKENS:
        return Agreement(Path.TOKENS)
    try:
        return Agreement(Path.KV, _cuts(theirs, own))
    except TransferFailed as error:
        if message.path is PathRequest.KV:
            raise Refused(f"{error}; path tokens would work", Cause.FINGERPRINT) from error
        return Agreement(Path.TOKENS, reason=str(error))


def _cuts(theirs: Fingerprint, own: Fingerprint) -> Resharding | None:
    """How their shards become those here. Raises TransferFailed if blocks cannot come."""
    if not theirs.cache or not own.cache:
        raise TransferFailed("the KV blocks of one of the replicas cannot be moved")
    cuts = reshard(theirs.layouts, own.layouts)
    if theirs.cache != own.cache:
        raise TransferFailed("the replicas' KV caches differ")
    return cuts


class TargetRun:
    """One migration as the target sees it. `on_end` is called once, when nothing is held for it any more."""

    def __init__(
        self,
        message: Prepare,
        host: TargetHost,
        blocks: BlockStore,
        transport: Transport,
        slots: Slots,
        lease_s: float,
        on_end: Callable[[str], None],
    ) -> None:
        self._message = message
        self._host = host
        self._blocks = blocks
        self._transport = transport
        self._slots = slots
        self._lease_s = lease_s
        self._on_end = on_end
        self._session = target.new_session()
        self._cuts: Resharding | None = None
        """The parts of the source's shards that the workers here take; None: the layouts are equal."""
        self._outputs = list(message.outputs)
        self._room = Tokens(0)
        """The room that the host keeps for the request."""
        self._rounds = asyncio.Condition()
        self._begun = self._ended = self._loaded = 0
        """The newest rounds that have begun, that have ended, and whose blocks are all in the cache."""
        self._tasks = Tasks()
        self._first_round: asyncio.Task[None] | None = None
        self._tail: str | None = None
        """The name of the tail that the workers may hold, unless it is the host's."""
        self._adding: asyncio.Task[None] | None = None
        """The engine takes the request, whether or not a caller still waits; None before the request comes."""
        self._lease: asyncio.TimerHandle | None = None

    @property
    def request(self) -> RequestId:
        """The request that comes."""
        return self._message.spec.id

    @property
    def copied(self) -> RequestSpec | None:
        """The request whose context is copied; None if the request itself comes."""
        return self._message.spec if self._message.copies else None

    @property
    def outputs(self) -> Sequence[int]:
        """The request's output so far."""
        return self._outputs

    @property
    def hop(self) -> int:
        """The hop it will run under."""
        return self._message.next_hop

    @property
    def state(self) -> TargetState:
        """The session's state."""
        return self._session.state

    def prepare(self) -> Prepared:
        """Agree on a path and reserve room. Raises Refused; whatever it raises, nothing is held."""
        try:
            return self._prepare()
        except BaseException:
            begun = self._session.state is not TargetState.NEW
            self.post(TargetEvent.CANCEL if begun else TargetEvent.PREPARE_REFUSED)
            raise

    def _prepare(self) -> Prepared:
        path, self._cuts, reason = self._agreed()
        self._room = self._host.accept(self._message)
        self.post(TargetEvent.PREPARE_FITS)
        present = Blocks(0)
        if path is Path.KV:
            present = Blocks(self._blocks.present(self._message.spec, self._message.outputs).hbm)
            self._tail = tail_name(self._message.migration)
            self._blocks.expect(self._tail)
            first_round = self._message.first_round
            if first_round is not None and (lacking := first_round.without(present)):
                # The engine admits the load while the source gathers.
                self._first_round = self._start(self._load(lacking))
        links = self._blocks.links if self._transport.direct else None
        workers = links.addresses if links is not None else ()
        return Prepared(path, self._lease_s, workers, present, self._cuts, self._chunk(), reason)

    def _agreed(self) -> Agreement:
        """As `agree`; blocks also have to fit into a slot."""
        agreed = agree(self._message, self._blocks.fingerprint)
        self._cuts = agreed.cuts
        if self._chunk() != 0:
            return agreed
        reason = "a block of the source's workers does not fit into a staging slot here"
        if self._message.path is PathRequest.KV:
            raise Refused(f"{reason}; path tokens would work", Cause.FINGERPRINT)
        return Agreement(Path.TOKENS, reason=reason)

    def _chunk(self) -> Blocks | None:
        """The number of blocks of a chunk for which there is room in the slots that receive it."""
        if self._cuts is None or self._transport.shares_slots:
            return None
        layouts = self._message.fingerprint.layouts
        return self._slots.blocks_received([Bytes(layouts[rank].block_bytes) for rank in self._cuts.senders])

    async def load(self, message: CopyRound) -> None:
        """Load a round of blocks. Raises TransferFailed; the migration goes on without them."""
        self._live(TargetEvent.ROUND)
        self.post(TargetEvent.ROUND)
        try:
            self._merge(message.outputs_from, message.outputs)
            begun, self._first_round = self._first_round, None
            await self._until_stopped(begun or self._start(self._load(message)))
        except BaseException:
            self._post_if_allowed(TargetEvent.LOAD_FAILED)
            raise
        self._post_if_allowed(TargetEvent.LOADED)

    async def _load(self, message: CopyRound) -> None:
        load = load_name(message.migration, message.number)
        spec, outputs = self._message.spec, tuple(self._outputs)
        loading = asyncio.create_task(self._blocks.load(load, spec, outputs, message.first, message.last))
        watching = asyncio.create_task(self._renew_while_filling(load))
        try:
            # From its first turn on, the engine takes the load's chunks.
            await asyncio.sleep(0)
            async with self._rounds:
                self._begun = message.number
                self._rounds.notify_all()
            await loading
            self._loaded = message.number
        finally:
            self._ended = message.number
            loading.cancel()
            watching.cancel()

    async def _renew_while_filling(self, load: str) -> None:
        """Renew the lease while the workers fill a load by themselves: no message comes meanwhile."""
        links, before = self._blocks.links, None
        with contextlib.suppress(TransferFailed):
            while links is not None and self._transport.direct:
                await asyncio.sleep(self._lease_s / 4)
                missing = await links.missing(load)
                if missing is not None and missing != before and self._session.allows(TargetEvent.ROUND):
                    self._renew()
                before = missing

    def renew(self) -> None:
        """Keep everything for another lease. Raises Refused if there is nothing to keep."""
        self._live(TargetEvent.ROUND)
        self._renew()

    async def receive(self, chunk: Chunk) -> None:
        """Copy a chunk of a round into the cache, or hold the tail. Raises TransferFailed."""
        self._live(TargetEvent.ROUND)
        self._renew()
        await self._until_stopped(self._start(self._put(chunk)))

    async def _put(self, chunk: Chunk) -> None:
        lease = None if self._transport.shares_slots else await self._slots.lease(self._lease_s)
        try:
            slots = self._receiving(lease, len(chunk.shards))
            transfers = zip(chunk.channels, chunk.shards, slots, strict=True)
            staged = await gather([self._transport.receive(c, s.slot, s.size, slot) for c, s, slot in transfers])
            if chunk.tail is not None:
                await self._blocks.hold(chunk.tail, staged, self._cuts)
                return
            async with self._rounds:
                # A chunk may overtake the message that begins its round.
                await self._rounds.wait_for(lambda: self._begun >= chunk.round)
            await self._put_staged(chunk, staged)
        finally:
            if lease is not None:
                lease.end()

    def _receiving(self, lease: Lease | None, shards: int) -> Sequence[Slot | None]:
        """The slots into which `shards` shards come."""
        if lease is None:
            return (None,) * shards
        return lease.slots if self._cuts is None else lease.split(shards)

    async def _put_staged(self, chunk: Chunk, staged: Sequence[SlotRef]) -> None:
        """Put a chunk into its load, unless that ended without it: the cache may have held these blocks before."""
        try:
            if chunk.round <= self._ended:
                raise TransferFailed("the round has ended")
            load = load_name(chunk.migration, chunk.round)
            await self._blocks.put(load, chunk.first, chunk.last, staged, self._cuts)
        except TransferFailed:
            if chunk.round > self._loaded:
                raise

    def _start(self, loading: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `loading` until its end or STOP_LOADING."""
        task = self._tasks.start(loading)
        task.add_done_callback(take_failure)
        return task

    async def _until_stopped(self, task: asyncio.Task[None]) -> None:
        """Wait for the task's end. Raises TransferFailed if STOP_LOADING ends it before."""
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise TransferFailed("the migration ended while blocks were loaded") from None
            task.cancel()
            raise

    def _merge(self, index: int, outputs: tuple[int, ...]) -> None:
        """Take over output tokens from `index` on; earlier ones stay."""
        if index > len(self._outputs):
            raise TransferFailed(f"output tokens {len(self._outputs)} to {index} are missing")
        self._outputs[index:] = outputs

    async def adopt(self, message: Adopt) -> None:
        """Run the request; every delivery of the message waits until it runs. Raises Refused if that cannot be."""
        self._live(TargetEvent.ADOPT)
        self.post(TargetEvent.ADOPT)
        if self._adding is None:
            self._adding = asyncio.create_task(self._add(message))
            self._adding.add_done_callback(take_failure)
        await asyncio.shield(self._adding)
        if self._session.state is TargetState.CLOSED:
            raise Refused("the migration was cancelled meanwhile", Cause.MIGRATION_GONE)

    async def _add(self, message: Adopt) -> None:
        try:
            self._merge(message.outputs_from, message.outputs)
            if message.tail is None:
                self._discard_tail()
            await self._host.add(self._message.spec, self.hop, tuple(self._outputs), message.tail)
            self._tail = None
        except BaseException as error:
            self._post_if_allowed(TargetEvent.ADD_FAILED)
            if isinstance(error, TransferFailed):
                raise Refused(str(error), error.cause) from error
            raise
        self.post(TargetEvent.ADDED)

    def attach(self) -> bool:
        """The reader reads the request here; False if the request does not run yet."""
        if not self._session.allows(TargetEvent.ATTACHED):
            return False
        self.post(TargetEvent.ATTACHED)
        return True

    def _live(self, event: TargetEvent) -> None:
        if not self._session.allows(event):
            raise Refused(f"the migration is {self._session.state} here", Cause.MIGRATION_GONE)

    def post(self, event: TargetEvent) -> None:
        """Feed an event, execute its commands, renew the lease. Of commands that fail, the others are executed."""
        before = self._session.state
        commands = self._session.feed(event)
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._end_or_renew, before)
            for command in reversed(commands):
                last_first.callback(self._execute, command)

    def _post_if_allowed(self, event: TargetEvent) -> None:
        if self._session.allows(event):
            self.post(event)

    def _execute(self, command: TargetCommand) -> None:
        message = self._message
        match command:
            case TargetCommand.RESERVE:
                self._host.reserve(message.migration, self._room)
            case TargetCommand.RELEASE:
                self._host.release(message.migration)
            case TargetCommand.STOP_LOADING:
                for task in self._tasks:
                    task.cancel()
            case TargetCommand.ABORT_REQUEST:
                self._host.abort(message.spec.id, self.hop)
            case TargetCommand.LOAD_ROUND | TargetCommand.ADD_REQUEST:
                pass  # Carried out by the caller, who waits for the result.

    def _renew(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire)

    def _expire(self) -> None:
        log.warning("migration %s: no confirmation in state %s", self._message.migration, self._session.state)
        self._post_if_allowed(TargetEvent.LEASE_EXPIRED)

    def _discard_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            self._blocks.discard(tail)

    def _end_or_renew(self, before: TargetState) -> None:
        final = (TargetState.OWNED, TargetState.CLOSED)
        if self._session.state not in final:
            self._renew()
            return
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        if before not in final:
            self._on_end(self._message.migration)
        self._discard_tail()

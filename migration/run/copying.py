"""A copy session: KV blocks of one context from this replica to another one's cache, at once or as they fill.

This is the only way of blocks between replicas. The reasons for a session differ in who leads it, and in nothing else:

    reason                      leader      blocks                              when
    a move's rounds and tail    `source`    of a running request                as it decodes
    a followed prefill          `source`    of a running request                as its prefill fills them
    fetch, return, evacuation,  `donor`     of a prefix that the donor holds    at once
    an operator's order

The leader sees to it that the blocks stay: vLLM keeps those of a running request, a hold those of a prefix. It opens
the session (`open`), has it copy further blocks (`copy`, `copy_filled`) and the end of the context (`finish`), and
closes it. The target keeps what has come under a lease, which every message renews; without messages, `keep_target`
renews it. One account (`account`) counts blocks, bytes and seconds; the records of moves and of copies contain it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import NoReturn

from migration.concurrency import take_failure
from migration.protocol.messages import CopyRound, PathRequest, Prepare, Prepared, Tail, tail_name
from migration.protocol.ports import Hosted, Peer
from migration.protocol.record import CopyAccount
from migration.protocol.rounds import Progress, filled_range, unfilled
from migration.run.carrying import Carrier, Route, choose_carrier
from migration.run.world import MigrationWorld
from policies.model import Blocks, Bytes, Tokens

log = logging.getLogger(__name__)


class CopySession:
    """The blocks of one context on their way.

    Each round carries the output tokens since the previous one. `confirmed` is the number of tokens that the target has
    confirmed: those of a failed round may not have arrived. `progress` counts the blocks that the target has, and
    `held` is the tail that it holds.
    """

    def __init__(self, id: str, key: str, peer: Peer, world: MigrationWorld) -> None:
        """`key` is the engine's name of the request, or of the hold."""
        self.confirmed = 0
        self.progress = Progress()
        self.held: Tail | None = None
        self._id = id
        self._key = key
        self._peer = peer
        self._world = world
        self._route = Route(id, key, peer, world)
        self._carrier: Carrier | None = None
        self._lease_s = inf
        self._seconds = 0.0
        self._rounds = 0
        self._computed = Tokens(0)
        """The number of tokens that a prefill had computed when the session last waited for more."""
        self._announced: CopyRound | None = None
        """The round that the target has known of since `open`, without the blocks that it has."""
        self._unconfirmed: tuple[CopyRound, asyncio.Task[None]] | None = None
        """The newest round, whose blocks the target's workers have, and the target's confirmation of it."""

    @property
    def account(self) -> CopyAccount:
        """The blocks, bytes and seconds by now."""
        sent = Bytes(0) if self._carrier is None else self._carrier.sent
        progress = self.progress
        return CopyAccount(present=progress.present, blocks=progress.sent, bytes=sent, copy_s=self._seconds)

    @property
    def announced(self) -> bool:
        """True if the target waits for a round since `open`."""
        return self._announced is not None

    @property
    def chunk(self) -> Blocks:
        """The most blocks of a chunk, or of a tail, of an open session."""
        return self._route.chunk

    def lacking(self, last: Blocks) -> Bytes:
        """Bytes of the blocks up to `last` that the target does not have yet."""
        return Bytes((last - self.progress.copied) * self._world.blocks.fingerprint.block_bytes)

    def unprefilled(self, tokens: int) -> int:
        """Of the context's `tokens` tokens, those that a prefill had not computed when the session last waited."""
        return tokens - self._computed

    # --- open -----------------------------------------------------------------------------------------

    async def open(self, context: Hosted, next_hop: int, path: PathRequest, last: Blocks, at_once: bool) -> Prepared:
        """Ask the target to make room for a context whose blocks up to `last` are full.

        `at_once`: `copy` follows with these, so that the target's engine admits them before its answer is here.

        Raises:
            Refused, PeerLost: as `Peer.prepare` does.
        """
        world = self._world
        self.confirmed = len(context.outputs)
        first_round = self._plan(last, context.outputs) if at_once else None
        message = Prepare(
            migration=self._id,
            spec=context.spec,
            hop=context.hop,
            next_hop=next_hop,
            source=world.replica,
            path=path,
            fingerprint=world.blocks.fingerprint,
            outputs=context.outputs,
            first_round=first_round,
        )
        prepared = await self._peer.prepare(message)
        self._lease_s = prepared.lease_s
        self._route = replace(self._route, cuts=prepared.cuts, limit=prepared.chunk)
        self._carrier = await choose_carrier(self._route, prepared)
        # The newest full block of the target may be one that this context has not filled yet.
        self.progress = Progress.beginning(min(prepared.present, last))
        self._announced = None if first_round is None else first_round.without(prepared.present)
        return prepared

    async def keep_target(self) -> NoReturn:
        """Have the target keep what it holds, although nothing is sent. Ends only by a failure, as `Peer.renew`."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            await self.renew()

    async def renew(self) -> None:
        """Renew the target's lease. Raises Refused or PeerLost."""
        await self._peer.renew(self._id)

    async def free_target(self) -> None:
        """Have the target free all that it holds. If the call is lost, the target's lease has the same effect."""
        try:
            async with asyncio.timeout(self._world.limits.prepare_s):
                await self._peer.cancel(self._id)
        except Exception as error:
            log.warning("%s: the target was not freed: %r", self._id, error)

    def close(self) -> None:
        """The session is over, whatever is still under way."""
        if self._unconfirmed is not None:
            _, loading = self._unconfirmed
            loading.cancel()
            loading.add_done_callback(take_failure)

    # --- copy -----------------------------------------------------------------------------------------

    async def copy(self, last: Blocks, outputs: tuple[int, ...]) -> None:
        """Copy the blocks up to `last` of a context that ends with `outputs`; at first, those announced to the target.

        Where the workers send the blocks, this does not wait until the target has confirmed the round: see `finish`.

        Raises:
            TransferFailed, PeerLost, Refused, RequestGone: as gathering, sending and the target's loading do.
        """
        assert self._carrier is not None, "the session is open"
        planned, self._announced = self._announced or self._plan(last, outputs), None
        with self._timed():
            await self._confirm()
            self._unconfirmed = planned, await self._carrier.carry(planned)
            if self._unconfirmed[1].done():
                await self._confirm()
        self.progress = self.progress.add(planned.last)

    async def wait_filled(self, tokens: int) -> None:
        """Wait until a prefill of `tokens` tokens has filled a block that the target lacks; for ever if none is left.

        Raises:
            TransferFailed: the engine does not answer.
        """
        beyond = unfilled(self.progress, tokens, self._world.blocks.fingerprint.block_size)
        if beyond is None:
            await asyncio.Event().wait()
            raise AssertionError("the wait ends only by being cancelled")
        self._computed = await self._world.blocks.computed_beyond(self._key, Tokens(beyond))

    async def copy_filled(self, tokens: int, outputs: tuple[int, ...]) -> None:
        """Copy what a prefill of `tokens` tokens has filled by the last `wait_filled`. Raises as `copy`."""
        size = self._world.blocks.fingerprint.block_size
        if (filled := filled_range(self.progress, self._computed, tokens, size)) is not None:
            await self.copy(filled[1], outputs)

    async def finish(self, tail: Tokens | None = None, ready: Callable[[], None] = lambda: None) -> None:
        """Wait until the target has confirmed all rounds; meanwhile, have it hold the tail.

        The tail is the KV of the context's first `tail` tokens behind the copied blocks; None: there is none. `ready`
        is called as soon as the rounds are confirmed and the tail is staged: the blocks here are not needed any more.

        Raises:
            TransferFailed, PeerLost, Refused, RequestGone: as gathering, sending, loading and the target's holding do.
        """
        with self._timed():
            if tail is None:
                await self._confirm()
                ready()
                return
            await self._finish_with(Tail(tail_name(self._id), self.progress.copied, tail), ready)

    async def _finish_with(self, tail: Tail, ready: Callable[[], None]) -> None:
        assert self._carrier is not None, "the session is open"
        staged = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._carrier.carry_tail(tail, staged.set))
                await self._confirm()
                await staged.wait()
                ready()
        except ExceptionGroup as errors:  # Python 3.11.3 and earlier wrap errors that an `except*` block raises
            raise errors.exceptions[0] from None
        self.held = tail
        last = tail.last(self._world.blocks.fingerprint.block_size)
        self.progress = self.progress.add_tail(Blocks(last - tail.first))

    def _plan(self, last: Blocks, outputs: tuple[int, ...]) -> CopyRound:
        """The next round, up to block `last`."""
        self._rounds += 1
        news = outputs[self.confirmed :]
        return CopyRound(self._id, self._rounds, self.progress.copied, last, self.confirmed, news)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._world.clock()
        try:
            yield
        finally:
            self._seconds += self._world.clock() - began

    async def _confirm(self) -> None:
        """Wait until the target has confirmed the newest round."""
        if self._unconfirmed is not None:
            planned, loading = self._unconfirmed
            await loading
            self._unconfirmed = None
            self.confirmed = planned.outputs_from + len(planned.outputs)

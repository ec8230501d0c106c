"""Moves that take time, step by step.

    KV       the target reserves room; full blocks are copied while the request decodes on, then the blocks filled in
             the meantime, as long as that pays (`migration.protocol.rounds`, the live rules); the request is frozen,
             the last blocks worth copying are copied, it is handed over, and the target prefills the last few tokens
    tokens   the target reserves room; the request is frozen and handed over; the target prefills all of it

The target loads the copied blocks in a step of its engine, and the request joins the target's queue.

By KV, a request that is still prefilled is followed: blocks are copied as its steps fill them, and the freeze comes
with its first token. By tokens, or while it waits, a request without a token is handed over without a freeze. During
the copy of a decoding request, its end cancels the move. Its preemption (its blocks are gone) and a target that needs
the reserved room make the move fall back to tokens at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from migration.protocol.rounds import (
    CopyLimits,
    Progress,
    filled_range,
    final_range,
    full_blocks,
    worth_another_round,
)
from policies.causes import Cause
from policies.model import Blocks, Bytes, RequestId, Tokens
from policies.paths.choice import LinkId
from policies.plan import MoveReport, Path, Reason
from simulator.costs.costs import LinkCosts, MigrationCosts
from simulator.world.engine import SimulatedEngine
from simulator.world.links import Flow, Links
from simulator.world.live import Live, Stage
from simulator.world.loop import Loop, Timer, Turn
from simulator.world.observer import Transfer, TransferOutcome

LIMITS = CopyLimits()


class MoveObserver(Protocol):
    """The world's reactions to moves."""

    def touch(self, engine: SimulatedEngine) -> None:
        """Mark a changed engine, to be settled."""
        ...

    def settle(self) -> None:
        """Settle the changed engines, after the last of simultaneous changes."""
        ...

    def reported(self, live: Live, report: MoveReport) -> None:
        """Take a replica's report on a move: on its end at the source, and later on the first token at the target."""
        ...

    def transferred(self, transfer: Transfer) -> None:
        """Take the outcome of a move."""
        ...


@dataclass(slots=True, eq=False)
class MoveUnderWay:
    """One move under way.

    `frozen_s` is the end of its request's last step at the source, None while the request decodes on. `detour` is the
    cause of a fallback from KV to tokens, `copy_s` the seconds of copying until then. Blocks on their way are a `flow`
    first, then a `load`; `copying_s` is the time at which their copy began. It is `following` until the request's first
    token, and `waits_s` is the time since which it then has nothing to copy, `waited_s` the sum of these waits.
    """

    live: Live
    source: SimulatedEngine
    target: SimulatedEngine
    reason: Reason
    path: Path
    predicted_s: float
    began_s: float
    tokens: Tokens
    progress: Progress = field(default_factory=Progress)
    flow: Flow | None = None
    load: Timer | None = None
    copying_s: float | None = None
    copy_s: float = 0.0
    following: bool = False
    waits_s: float | None = None
    waited_s: float = 0.0
    detour: Cause | None = None
    frozen_s: float | None = None
    left_s: float | None = None
    resumed_s: float | None = None
    sent: int = 0

    @property
    def request(self) -> RequestId:
        """The request's id."""
        return self.live.id


class Mover:
    """Executes moves.

    `under_way` are the moves whose source still holds the request, `landed` those whose request does not decode yet at
    its target.
    """

    def __init__(self, loop: Loop, costs: MigrationCosts, observer: MoveObserver) -> None:
        self.under_way: dict[RequestId, MoveUnderWay] = {}
        self.landed: dict[RequestId, MoveUnderWay] = {}
        self.links = Links(loop, self._bandwidth)
        self._loop = loop
        self._costs = costs
        self._observer = observer

    def reports(self) -> list[MoveReport]:
        """The sources' reports on the moves under way."""
        return [
            MoveReport(m.request, m.source.replica, m.target.replica, path=m.path, tokens=m.tokens, reason=m.reason)
            for m in self.under_way.values()
        ]

    def route(self, source: SimulatedEngine, target: SimulatedEngine) -> tuple[LinkId, ...]:
        """The links between two replicas."""
        ports = (LinkId(f"out:{source.replica}"), LinkId(f"in:{target.replica}"))
        if source.node == target.node:
            return ports
        return (*ports, LinkId(f"up:{source.node}"), LinkId(f"down:{target.node}"))

    def costs_of(self, link: LinkId) -> LinkCosts:
        """The bandwidth and latency of a link, a replica's port or a node's uplink."""
        return self._costs.intra if link.startswith(("out:", "in:")) else self._costs.inter

    def copy(
        self, donor: SimulatedEngine, target: SimulatedEngine, tokens: Tokens, done: Callable[[], None]
    ) -> Callable[[], None]:
        """Copy the KV of that many tokens, over the links of moves; `done` is called at the end.

        Returns a function that gives the copy up.
        """
        route, size = self.route(donor, target), Bytes(tokens * self._costs.kv_bytes)
        flow = self.links.send(route, size, max(self.costs_of(link).latency_s for link in route), done)

        def give_up() -> None:
            self.links.cancel(flow)

        return give_up

    # --- beginnings and ends of moves -------------------------------------------------------------------

    def begin(
        self,
        live: Live,
        source: SimulatedEngine,
        target: SimulatedEngine,
        reason: Reason,
        path: Path,
        predicted_s: float = 0.0,
    ) -> None:
        """Begin to move a request. If the target has no room for it, the request stays."""
        self.land(live)
        tokens = live.tokens(self._loop.now)
        handed_over = reason is Reason.DISAGGREGATE and live.stage is not Stage.DECODE
        moving = MoveUnderWay(live, source, target, reason, path, predicted_s, self._loop.now, Tokens(round(tokens)))
        self.under_way[moving.request] = moving
        self._observer.touch(target)
        if not target.reserve(moving.request, tokens, self._loop.now, target.shares(live)):
            self._give_up(moving, TransferOutcome.REFUSED)
        elif path is Path.KV and (live.stage is Stage.PREFILL or handed_over):
            moving.progress, moving.following = Progress.beginning(self._present(moving)), True
            self._copy_filled(moving)
        elif live.stage is not Stage.DECODE:
            moving.detour = Cause.BLOCKS_GONE if path is Path.KV else None
            source.remove(live, self._loop.now)
            moving.path = Path.TOKENS
            self._hand_over(moving)
        elif path is Path.TOKENS:
            if self._freeze(moving):
                self._hand_over(moving)
        else:
            moving.progress = Progress.beginning(self._present(moving))
            (self._copy_round if self._costs.precopy else self._copy_rest)(moving)

    def over(self, live: Live) -> None:
        """End the move of a request that has ended."""
        if moving := self.under_way.get(live.id):
            self._give_up(moving, TransferOutcome.ENDED)

    def preempted(self, live: Live) -> None:
        """Hand a request that has lost its KV over to the target, if it was moving.

        One that is followed begins its prefill anew, and what is copied of it waits at the target.
        """
        moving = self.under_way.get(live.id)
        if moving is None:
            return
        if not moving.following:
            self._fall_back(moving, Cause.BLOCKS_GONE)
            return
        self._stop_copy(moving)
        self._wait(moving)

    def filling(self, live: Live) -> None:
        """A step has computed a part of a prefill: copy the blocks that it has filled, if the request is followed."""
        moving = self.under_way.get(live.id)
        if moving is not None and moving.following and moving.copying_s is None:
            self._copy_filled(moving)

    def decoding(self, live: Live) -> None:
        """A request has its first token, here or at its target. One that is followed freezes behind its newest copy."""
        moving = self.under_way.get(live.id)
        if moving is not None and moving.following and moving.copying_s is None:
            self._copy_filled(moving)
        self.land(live)

    def refused(self, request: RequestId) -> None:
        """Move without KV, since the target needs the reserved room: no block can be loaded, and the request queues."""
        moving = self.under_way[request]
        self._fall_back(moving, Cause.TRANSFER_FAILED)
        moving.progress = Progress()

    def land(self, live: Live) -> None:
        """Complete the move of a request that decodes again at its target, or that ends or moves before that."""
        if moving := self.landed.pop(live.id, None):
            if live.stage is Stage.DECODE:
                moving.resumed_s = self._loop.now
                self._report(moving, True)
            self._finish(moving, TransferOutcome.MOVED)

    # --- the course of a move -----------------------------------------------------------------------------

    def _copy_round(self, moving: MoveUnderWay) -> None:
        """Copy the newly full blocks while the request decodes on, or, if that no longer pays, the last blocks."""
        full = self._full_blocks(moving)
        if worth_another_round(moving.progress, full, LIMITS):
            self._copy(moving, full, self._copy_round)
        else:
            self._copy_rest(moving)

    def _copy_filled(self, moving: MoveUnderWay) -> None:
        """Copy the blocks that the prefill has filled, or wait for more; with the first token, the last blocks."""
        self._end_wait(moving)
        live, size = moving.live, self._costs.block_tokens
        if live.stage is Stage.DECODE:
            moving.following = False
            self._copy_rest(moving)
            return
        computed = live.need - live.todo if live.stage is Stage.PREFILL and self._costs.precopy else 0
        filled = filled_range(moving.progress, computed, live.need, size)
        if filled is None:
            self._wait(moving)
        else:
            self._copy(moving, filled[1], self._copy_filled)

    def _wait(self, moving: MoveUnderWay) -> None:
        """Wait for the prefill."""
        moving.waits_s = self._loop.now

    def _end_wait(self, moving: MoveUnderWay) -> None:
        if moving.waits_s is not None:
            moving.waited_s += self._loop.now - moving.waits_s
            moving.waits_s = None

    def _copy_rest(self, moving: MoveUnderWay) -> None:
        """Freeze the request, and copy the remaining blocks if they are worth it."""
        if not self._freeze(moving):
            return
        full = self._full_blocks(moving)
        if final_range(moving.progress, full, LIMITS) is None:
            self._hand_over(moving)
        else:
            self._copy(moving, full, self._hand_over)

    def _fall_back(self, moving: MoveUnderWay, cause: Cause) -> None:
        """Stop the request, and hand it over without the blocks that are not copied yet."""
        self._stop_copy(moving)
        self._end_wait(moving)
        moving.path, moving.detour, moving.following = Path.TOKENS, cause, False
        if moving.live.stage is Stage.DECODE:
            if not self._freeze(moving):
                return
        else:
            moving.frozen_s = self._loop.now
            moving.source.remove(moving.live, self._loop.now)
        self._hand_over(moving)

    def _copy(self, moving: MoveUnderWay, upto: Blocks, then: Callable[[MoveUnderWay], None]) -> None:
        size = Bytes((upto - moving.progress.copied) * self._costs.block_tokens * self._costs.kv_bytes)

        def sent() -> None:
            moving.flow = None
            moving.sent += size
            now = self._loop.now
            moving.load = self._loop.at(now + moving.target.load_s(now), Turn.LINK, loaded)

        def loaded() -> None:
            moving.load = None
            self._stop_copy(moving)
            moving.progress = moving.progress.add(upto)
            then(moving)
            self._observer.settle()

        moving.copying_s = self._loop.now
        moving.flow = self.links.send(self.route(moving.source, moving.target), size, self._latency(moving), sent)

    def _freeze(self, moving: MoveUnderWay) -> bool:
        """Freeze the request at the end of its step. False if it ends with that step, and its move with it."""
        now = self._loop.now
        if moving.source.ends_with_step(moving.live, now):
            return False
        moving.source.freeze(moving.live, now)
        moving.frozen_s = moving.live.stopped_s
        moving.target.secure(moving.request)
        self._observer.touch(moving.source)
        return True

    def _hand_over(self, moving: MoveUnderWay) -> None:
        moving.target.secure(moving.request)
        self._observer.touch(moving.source)
        begins_s = max(self._loop.now, moving.frozen_s or 0.0)
        self._loop.at(begins_s + self._costs.handover_s, Turn.LINK, lambda: self._arrive(moving))

    def _arrive(self, moving: MoveUnderWay) -> None:
        now = self._loop.now
        moving.source.release(moving.request)
        # Blocks behind evicted ones are of no use.
        evicted = self._present(moving) < moving.progress.present
        copied = Blocks(0) if evicted else moving.progress.copied
        todo = max(1, round(moving.live.held) - copied * self._costs.block_tokens)
        moving.target.receive(moving.live, todo)
        moving.live.moves += 1
        moving.left_s = now
        self.landed[moving.request] = self.under_way.pop(moving.request)
        self._report(moving, True)
        self._observer.touch(moving.source)
        self._observer.touch(moving.target)
        self._observer.settle()

    def _give_up(self, moving: MoveUnderWay, outcome: TransferOutcome) -> None:
        del self.under_way[moving.request]
        self._stop_copy(moving)
        moving.target.release(moving.request)
        self._observer.touch(moving.target)
        self._report(moving, False, Cause.NO_ROOM if outcome is TransferOutcome.REFUSED else Cause.REQUEST_ENDED)
        self._finish(moving, outcome)

    def _stop_copy(self, moving: MoveUnderWay) -> None:
        if moving.flow is not None:
            moving.sent += self.links.cancel(moving.flow)
            moving.flow = None
        if moving.load is not None:
            moving.load.cancel()
            moving.load = None
        if moving.copying_s is not None:
            moving.copy_s += self._loop.now - moving.copying_s
            moving.copying_s = None

    def _report(self, moving: MoveUnderWay, moved: bool, cause: Cause | None = None) -> None:
        ended_s = self._loop.now if moving.left_s is None else moving.left_s
        report = MoveReport(
            moving.request,
            moving.source.replica,
            moving.target.replica,
            moved,
            moving.path,
            cause or moving.detour,
            took_s=ended_s - moving.began_s - moving.waited_s,
            whole_s=None if moving.resumed_s is None else moving.resumed_s - moving.began_s - moving.waited_s,
            tokens=moving.tokens,
            sent=Bytes(moving.sent),
            copy_s=moving.copy_s,
            fell_back=moving.path is Path.TOKENS and moving.copy_s > 0,
            predicted_s=moving.predicted_s,
            reason=moving.reason,
        )
        self._observer.reported(moving.live, report)

    def _finish(self, moving: MoveUnderWay, outcome: TransferOutcome) -> None:
        now = self._loop.now
        self._observer.transferred(
            Transfer(
                moving.path,
                moving.tokens,
                Bytes(moving.sent),
                began_s=moving.began_s,
                ended_s=now if moving.left_s is None else moving.left_s,
                stall_s=0.0 if moving.frozen_s is None else now - moving.frozen_s,
                same_node=moving.source.node == moving.target.node,
                completed=outcome is TransferOutcome.MOVED,
                outcome=outcome,
                reason=moving.reason,
                predicted_s=moving.predicted_s,
                resumed_s=moving.resumed_s,
            )
        )

    def _full_blocks(self, moving: MoveUnderWay) -> Blocks:
        return full_blocks(int(moving.live.tokens(self._loop.now)), self._costs.block_tokens)

    def _present(self, moving: MoveUnderWay) -> Blocks:
        """The first full blocks that the target's prefix cache has."""
        if (cache := moving.target.cache) is None:
            return Blocks(0)
        tokens = cache.leading(moving.live.job.context) * cache.block_tokens
        return Blocks(min(tokens // self._costs.block_tokens, self._full_blocks(moving)))

    def _latency(self, moving: MoveUnderWay) -> float:
        return max(self.costs_of(link).latency_s for link in self.route(moving.source, moving.target))

    def _bandwidth(self, link: LinkId) -> float:
        return self.costs_of(link).bytes_per_s

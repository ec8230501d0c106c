"""The shell of the table of a replica's memory: executes its commands, and has the values of its reports."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

from migration.memory.tables import PoolCommand, PoolEvent, PoolState, new_pool, order_event
from migration.protocol.errors import Refused
from migration.protocol.ports import Clock
from policies.causes import Cause
from policies.memory.ledger import MemoryOrder, MemoryReport, OrderNumber, ReplicaMemory
from policies.memory.plan import ASLEEP, MemoryPlan, ModelMemory
from policies.model import Blocks, ReplicaId

log = logging.getLogger("ray.serve")

_LOOK_S = 0.05
"""The time between two looks for room, in seconds."""
_LEAVE_S = 0.5
"""The time in which requests that were given back leave the engine, in seconds."""
_LOADS = 3
"""The number of failed loads in a row after which the engine is given up."""


_NEVER = OrderNumber(0)
"""Before all orders."""

_Activity = Callable[[], Coroutine[Any, Any, PoolEvent]]


class EngineEnded(Exception):
    """The engine has ended, and its memory with it."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The outcome of one step of a shrink.

    `size` blocks are handed out now, requests have `over` blocks beyond the aim, and `moved` blocks changed places.
    """

    size: Blocks
    over: Blocks = Blocks(0)
    moved: Blocks = Blocks(0)


class EngineMemory(Protocol):
    """An engine's parameters and KV pool. The methods that wait raise EngineEnded."""

    model: ModelMemory
    """The bytes of its parts. `fixed` is measured at the start, `asleep` after each `drop`; until the first, it is
    taken to be `fixed`. Both grow with what `measure` finds."""
    sleepless: str | None
    """The reason why the engine cannot fall asleep; None if it can."""
    declared: Blocks
    """The most blocks that it may have."""
    start: Blocks
    """The number of its blocks when the replica begins to serve."""

    @property
    def size(self) -> Blocks:
        """The blocks that the engine hands out."""
        ...

    @property
    def used(self) -> Blocks:
        """The blocks of requests."""
        ...

    def measure(self, held: MemoryPlan) -> None:
        """Count what the processes hold beyond a plan, in this call and in the one before, from now on.

        They hold the plan, and do not change it. Processes grow when they serve: buffers of steps and of streams come
        with the first requests, and stay asleep.
        """
        ...

    def announce(self, blocks: Blocks) -> None:
        """From now on this is the capacity in the engine's statistics."""
        ...

    async def fit(self, blocks: Blocks) -> Fitted:
        """Shrink the pool towards `blocks` by some of the way; not at all while requests exceed `blocks`."""
        ...

    async def release(self, blocks: Blocks) -> str | None:
        """Give the memory behind the first `blocks` back to the machine, or return the reason why it was not taken."""
        ...

    async def grow(self, blocks: Blocks) -> None:
        """Hand out `blocks`, if that is more than now."""
        ...

    async def drop(self) -> str | None:
        """Give all memory of an engine without requests back but that of its processes: of prefix cache, KV blocks and
        parameters. It computes nothing from now on. The reason if that failed.
        """
        ...

    async def load(self, blocks: Blocks) -> str | None:
        """Load what was dropped, and hand out `blocks`. The engine computes again, or there is a reason."""
        ...


class HostedRequests(Protocol):
    """The requests on a replica, and all else that uses its engine."""

    @property
    def is_empty(self) -> bool:
        """True if no request, migration or copy has memory of the engine."""
        ...

    def close(self) -> None:
        """Take nothing new: requests leave, as before a stop."""
        ...

    def open(self) -> None:
        """Take requests again."""
        ...

    def give_back(self, blocks: Blocks) -> None:
        """Have requests leave that have at least `blocks` KV blocks; all that can be continued if they have fewer."""
        ...

    def give_up(self, reason: str) -> None:
        """The engine is of no use any more: the replica has to be replaced."""
        ...


async def begin(memory: EngineMemory, blocks: Blocks) -> None:
    """Give an engine without requests its size at the start."""
    memory.start = blocks
    while (await memory.fit(blocks)).size > blocks:
        pass
    await memory.grow(blocks)
    await memory.release(blocks)
    memory.announce(blocks)


@dataclass(frozen=True, slots=True)
class ResizeCounts:
    """Resizes since the start that ended or failed, their seconds, and the blocks that changed places."""

    shrunk: int = 0
    grown: int = 0
    failed_shrinks: int = 0
    failed_growths: int = 0
    seconds: float = 0.0
    renumbered: int = 0


@dataclass(frozen=True, slots=True)
class WakeCounts:
    """Wakes since the start that ended or failed, and the seconds of those that ended."""

    done: int = 0
    failed: int = 0
    seconds: float = 0.0


class Resizer:
    """Follows orders with the engine of one replica, and with its `requests`.

    `at` is the place of the present size among the orders.
    """

    def __init__(
        self,
        replica: ReplicaId,
        memory: EngineMemory,
        clock: Clock,
        requests: HostedRequests,
        at: OrderNumber = _NEVER,
    ) -> None:
        self.memory = memory
        self._clock = clock
        self._requests = requests
        plan = MemoryPlan(memory.size)
        self._replica = ReplicaMemory(replica, at, plan, plan)
        self._pool = new_pool()
        self._task: asyncio.Task[None] | None = None
        self._deadline = self._ordered_at = 0.0
        self._shrink_s = 0.0
        self._over = Blocks(0)
        self._failed_loads = 0
        self._reserved = False
        self._lent: Blocks | None = None
        self.asleep_at: float | None = None
        """The time by `clock` when it fell asleep; None once it has woken."""
        self.cause: str | None = None
        """The reason why the replica does not have the plan that it was ordered to, or did not wake; else None."""
        self.counts = ResizeCounts()
        self.wakes = WakeCounts()

    @property
    def state(self) -> PoolState:
        """The state of the pool."""
        return self._pool.state

    @property
    def report(self) -> MemoryReport:
        """The ordered plan, and the plan that the replica holds."""
        return self._replica.report

    @property
    def ordered(self) -> Blocks:
        """The number of blocks that the pool is to have; 0 asleep."""
        return (self._replica.ordered.blocks or Blocks(0)) if self._lent is None else self._lent

    @property
    def held(self) -> Blocks:
        """The number of blocks whose memory the replica may have; 0 asleep."""
        return self._replica.held.blocks or Blocks(0)

    def asked(self, fence: int) -> MemoryReport:
        """The report for a scheduler with this fence, which no older one may order anything after."""
        self._replica, report = self._replica.asked(fence)
        return report or self.report

    def obey(self, order: MemoryOrder, shrink_s: float) -> MemoryReport:
        """Take an order, unless a newer one has come; requests beyond it have `shrink_s` seconds to move away."""
        follows = self._replica.obey(order)
        if self._reserved or order.plan.remote != self._replica.ordered.remote:
            # Its layers are on their way: the order is answered by what it holds.
            self._replica = replace(self._replica, at=follows.at)
        elif follows is not self._replica:
            failed = self.cause is not None
            event = order_event(self.state, order.plan, self._replica.ordered, self._replica.held, failed)
            self._replica = follows
            if event is not PoolEvent.SAME:
                self._ordered_at = self._clock()
                self._shrink_s, self._deadline = shrink_s, self._ordered_at + shrink_s
            self._feed(event)
        return self.report

    def reserve(self) -> None:
        """Take no order until `convert`: an exchange of layers begins. The replica counts with what it has until then.

        Raises Refused unless the replica is awake, and its pool has its size.
        """
        if self.state is not PoolState.SETTLED or self._reserved:
            raise Refused("the replica is changing its memory: try again", Cause.UNEXPECTED)
        self._reserved = True

    def lend(self, blocks: Blocks, shrink_s: float) -> None:
        """Have the pool keep to `blocks`, no more than ordered: the rest of its memory is for the exchange."""
        self._reserved, self._lent = True, blocks
        self._ordered_at = self._clock()
        self._shrink_s, self._deadline = shrink_s, self._ordered_at + shrink_s
        self._feed(PoolEvent.LESS if blocks < self.held else PoolEvent.MORE)

    def convert(self, remote: int) -> None:
        """The exchange is over, with this many remote layers: the pool gets what the ordered memory holds then.

        In whole blocks: one may be lost on the way there, and one on the way back.
        """
        self._reserved, self._lent, memory = False, None, self.memory
        blocks = memory.model.blocks_in(memory.model.need(self._replica.ordered), remote)
        plan = MemoryPlan(Blocks(min(blocks, memory.declared)), remote)
        self._replica = replace(self._replica, ordered=plan, held=plan)
        self._ordered_at = self._clock()
        self._feed(PoolEvent.MORE)

    async def settled(self) -> None:
        """Wait until no activity is under way."""
        while self._task is not None and not self._task.done():
            await asyncio.wait((self._task,))

    def close(self) -> None:
        """End the activity under way."""
        if self._task is not None:
            self._task.cancel()

    # --- inside ---------------------------------------------------------------------------------------

    def _feed(self, event: PoolEvent) -> None:
        for command in self._pool.feed(event):
            self._execute(command)

    def _execute(self, command: PoolCommand) -> None:
        match command:
            case PoolCommand.CLOSE:
                self._requests.close()
            case PoolCommand.OPEN:
                self._requests.open()
            case PoolCommand.ANNOUNCE:
                self.memory.announce(self.ordered)
            case PoolCommand.GIVE_BACK:
                self._requests.give_back(self._over)
                self._deadline = self._clock() + max(self._shrink_s, _LEAVE_S)
            case PoolCommand.GIVE_UP:
                self._requests.give_up(f"its parameters were not loaded {_LOADS} times in a row: {self.cause}")
            case _:
                self._note(command)

    def _note(self, command: PoolCommand) -> None:
        """Have the reports follow what has ended, or begins."""
        match command:
            case PoolCommand.NOTE_RELEASED:
                self._hold(self._replica.ordered)
                self._count(shrunk=1)
            case PoolCommand.NOTE_GROWN:
                self.cause = None
                self._count(grown=1)
            case PoolCommand.NOTE_FAILED:
                is_shrink = self.ordered < self.held
                self._count(failed_shrinks=is_shrink, failed_growths=not is_shrink)
            case PoolCommand.NOTE_ASLEEP:
                self._hold(ASLEEP)
                # One that could not wake drops what it has loaded, and has not been awake.
                self.asleep_at = self._clock() if self.asleep_at is None else self.asleep_at
            case PoolCommand.NOTE_AWAKE:
                self._hold(self._replica.ordered)
                self._failed_loads, self.asleep_at = 0, None
                took_s = self._clock() - self._ordered_at
                self.wakes = replace(self.wakes, done=self.wakes.done + 1, seconds=self.wakes.seconds + took_s)
            case PoolCommand.NOTE_NOT_LOADED:
                self.wakes = replace(self.wakes, failed=self.wakes.failed + 1)
            case _:
                self._act(command)

    def _act(self, command: PoolCommand) -> None:
        """Begin an activity. What takes memory is reported before it does."""
        if command in (PoolCommand.GROW, PoolCommand.LOAD):
            self._hold(replace(self._replica.ordered, blocks=max(self.held, self.ordered)))
        activities: dict[PoolCommand, _Activity] = {
            PoolCommand.GROW: self._grow,
            PoolCommand.FIT: self._fit,
            PoolCommand.AWAIT_ROOM: self._await_room,
            PoolCommand.RELEASE: self._release,
            PoolCommand.EMPTY: self._empty,
            PoolCommand.DROP: self._drop,
            PoolCommand.LOAD: self._load,
        }
        self._begin(activities[command])

    def _count(self, **ended: int) -> None:
        """Add to the counts of these names, and the time since the order."""
        counts, seconds = self.counts, self._clock() - self._ordered_at
        added = {name: getattr(counts, name) + count for name, count in ended.items()}
        self.counts = replace(counts, seconds=counts.seconds + seconds, **added)

    def _hold(self, plan: MemoryPlan) -> None:
        if not self._reserved:
            self._replica = replace(self._replica, held=plan)

    def _begin(self, activity: _Activity) -> None:
        self._task = asyncio.create_task(self._run(self._task, activity))

    async def _run(self, before: asyncio.Task[None] | None, activity: _Activity) -> None:
        """Perform an activity behind the one before, and feed its result unless another one has begun since.

        The one before, if it was given up, ends with its call to the engine: the engine's answers come in order.
        """
        mine = asyncio.current_task()
        if before is not None and before is not mine and not before.done():
            await asyncio.wait((before,))
        if self._task is not mine:
            return
        try:
            event = await activity()
        except EngineEnded:
            event = PoolEvent.ENGINE_ENDED
        except Exception as error:
            log.exception("resizing the KV pool of replica %s failed", self._replica.replica)
            self.cause, event = f"a call to the engine failed: {error!r}", PoolEvent.CALL_FAILED
        if self._task is mine:
            self._feed(event)

    async def _fit(self) -> PoolEvent:
        aim, mine = self.ordered, self._task
        if self.memory.size < aim:
            # An earlier order went further down; the memory up to `held` is still there.
            await self.memory.grow(aim)
        while self._task is mine:
            fitted = await self.memory.fit(aim)
            self._over = fitted.over
            self.counts = replace(self.counts, renumbered=self.counts.renumbered + fitted.moved)
            if fitted.over > 0:
                return PoolEvent.EXCEEDS
            if fitted.size <= aim:
                break
        return PoolEvent.FITS

    async def _await_room(self) -> PoolEvent:
        await asyncio.sleep(_LOOK_S)
        return PoolEvent.OVERDUE if self._clock() >= self._deadline else PoolEvent.LOOK_AGAIN

    async def _release(self) -> PoolEvent:
        self.cause = await self.memory.release(self.ordered)
        return PoolEvent.RELEASED if self.cause is None else PoolEvent.RELEASE_FAILED

    async def _grow(self) -> PoolEvent:
        await self.memory.grow(self.ordered)
        return PoolEvent.GROWN

    async def _empty(self) -> PoolEvent:
        while not self._requests.is_empty:
            await asyncio.sleep(_LOOK_S)
            if self._clock() >= self._deadline:
                self._over = self.memory.declared
                return PoolEvent.OVERDUE
        return PoolEvent.EMPTY

    async def _drop(self) -> PoolEvent:
        failed = await self.memory.drop()
        if failed is not None or not self._failed_loads:
            # Else it stays known why the replica did not wake.
            self.cause = failed
        return PoolEvent.DROPPED if failed is None else PoolEvent.DROP_FAILED

    async def _load(self) -> PoolEvent:
        try:
            self.cause = await self.memory.load(self.ordered)
        except EngineEnded:
            raise
        except Exception as error:
            log.exception("replica %s could not load", self._replica.replica)
            self.cause = f"a call to the engine failed: {error!r}"
        if self.cause is None:
            return PoolEvent.LOADED
        self._failed_loads += 1
        return PoolEvent.LOAD_FAILED if self._failed_loads < _LOADS else PoolEvent.LOAD_HOPELESS

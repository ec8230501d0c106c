"""The shell of one half of a pair: executes the commands of its table on an engine, and asks the buddy."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from migration.memory.pair_tables import AT_HOME, TOGETHER, HalfState, PairAction, PairEvent, new_half
from migration.memory.run import EngineEnded, Resizer
from migration.protocol.errors import MigrationError, PeerLost
from policies.model import Blocks, ReplicaId

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""The time between two looks at the engine and at the buddy, in seconds."""
_COPY_LOOK_S = 0.005
"""The time between two looks at a layer's copy, in seconds."""
_ANSWER_S = 5.0
"""The time within which the buddy's replica answers, in seconds. A late one may have done what it was asked to."""
HOP_S = 10.0
"""The time within which the buddy's engine answers a hop, or is lost, in seconds."""
_FORGET_S = 10.0
"""The time within which vLLM has to forget all KV once the buddy is lost, in seconds."""

Activity = Callable[[], Coroutine[Any, Any, PairEvent]]


@dataclass(frozen=True, slots=True)
class PairProposal:
    """The lower replica's offer to the upper one: a pair of this `epoch`, and the address of its worker.

    The lower one keeps layers [0, boundary) of `layers`. `model` names the weights. Requests that are in the way of the
    exchange have `shrink_s` seconds to move away. An operator has ordered it `by_hand`, or the policy.
    """

    epoch: int
    lower: ReplicaId
    upper: ReplicaId
    boundary: int
    layers: int
    model: str
    address: str
    shrink_s: float
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class PairLook:
    """The state of a pair in an engine's worker, see `migration.kv.pair`.

    `remote` layers run at the buddy, and `guest_layers` of the buddy's run here. `hops` of steps, with `hop_tokens`
    tokens, have waited `hop_seconds` seconds for it. For `buddy_seconds` of them it ran these layers, or this half ran
    some of the buddy's. `served` of its hops ran here. `lost` is the reason why the buddy is lost, and `lost_steps`
    have yielded no token since.
    """

    remote: int = 0
    is_copying: bool = False
    copy_failure: str | None = None
    lost: str | None = None
    guest_layers: int = 0
    hops: int = 0
    hop_tokens: int = 0
    hop_seconds: float = 0.0
    buddy_seconds: float = 0.0
    served: int = 0
    lost_steps: int = 0


class EngineHalf(Protocol):
    """An engine's side of a pair. All methods raise EngineEnded."""

    layers: int
    """The number of the model's layers."""
    unable: str | None
    """The reason why the engine cannot be in a pair; None if it can."""

    async def listen(self, epoch: int) -> str:
        """Begin a pair; the address at which the buddy's worker connects."""
        ...

    async def link(self, address: str, epoch: int) -> str | None:
        """Connect to the buddy's worker; the reason if that failed."""
        ...

    async def copy(self, layer: int, back: bool) -> None:
        """Begin to copy the KV of a layer to the buddy, or `back`."""
        ...

    async def give(self, layer: int) -> str | None:
        """Have the buddy run a copied layer; the reason if that failed."""
        ...

    async def take_back(self, layer: int) -> str | None:
        """Run a layer here whose KV was copied back; the reason if that failed."""
        ...

    async def forget(self, layer: int, back: bool) -> None:
        """Give a copy up."""
        ...

    async def load(self) -> str | None:
        """Load the parameters of all remote layers; the reason if they cannot be had."""
        ...

    async def look(self) -> PairLook:
        """The state in the worker."""
        ...

    async def abandon(self) -> None:
        """End the connections and free the buddy's KV. Steps yield no token, if layers are remote."""
        ...

    async def forget_kv(self, within_s: float) -> str | None:
        """Compute nothing from now on, and have all requests without KV and the prefix cache empty; or the reason why
        not, `within_s` seconds."""
        ...

    async def be_whole(self) -> None:
        """Compute again: all layers run here, with the parameters that `load` has brought."""
        ...

    async def close(self) -> None:
        """The pair is over; no layer is remote."""
        ...


class Buddy(Protocol):
    """The other half's replica. Both methods raise MigrationError, PeerLost if it is dead."""

    async def propose_pair(self, proposal: PairProposal) -> str:
        """Ask for a pair; the address of its worker. Raises Refused."""
        ...

    async def pair_state(self, epoch: int) -> str | None:
        """The state of its half of that epoch; None without one."""
        ...


class PairShell:
    """One half of one pair.

    The pool follows by its `resizer`. `give_up(reason)` ends an engine that cannot be whole again, and `over` is called
    once the pair is.
    """

    def __init__(
        self,
        proposal: PairProposal,
        own: ReplicaId,
        engine: EngineHalf,
        resizer: Resizer,
        buddy: Buddy,
        give_up: Callable[[str], None],
        over: Callable[[], None],
        theirs: str | None = None,
    ) -> None:
        """The upper half has the address of `theirs`, the lower one asks for it. Call `begin`."""
        self.proposal = proposal
        self.cause: str | None = None
        """The reason why the pair ends, or ended."""
        self.look = PairLook()
        """The newest look at the worker."""
        self.times: dict[HalfState, float] = {}
        """When each state began, by the event loop's clock."""
        self._is_lower = own == proposal.lower
        self._engine = engine
        self._resizer = resizer
        self._buddy = buddy
        self._give_up = give_up
        self._over = over
        self._theirs = theirs
        self._half = new_half(leads=theirs is None)
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def state(self) -> HalfState:
        """Where this half stands."""
        return self._half.state

    @property
    def buddy(self) -> ReplicaId:
        """The other replica."""
        return self.proposal.upper if self._is_lower else self.proposal.lower

    @property
    def own_layers(self) -> int:
        """The number of layers that this half keeps."""
        proposal = self.proposal
        return proposal.boundary if self._is_lower else proposal.layers - proposal.boundary

    def begin(self) -> None:
        """Begin to ask the buddy, or to connect to it."""
        self._note_time()
        self._execute(PairAction.ASK if self._theirs is None else PairAction.LINK)
        self._watching = asyncio.create_task(self._watch())

    def undo(self, cause: str) -> None:
        """Have the pair end: all layers come back."""
        self._note(cause)
        self._feed(PairEvent.UNDO)

    def stop(self) -> None:
        """End all activities: the engine has ended."""
        for task in (self._task, self._watching):
            if task is not None:
                task.cancel()

    # --- inside ---------------------------------------------------------------------------------------

    def _note(self, cause: str | None) -> None:
        self.cause = self.cause or cause

    def _note_time(self) -> None:
        self.times.setdefault(self.state, asyncio.get_running_loop().time())

    def _feed(self, event: PairEvent) -> None:
        before = self.state
        commands = self._half.feed(event)
        self._note_time()
        for command in commands:
            self._execute(command)
        if self.state is HalfState.OVER and before is not HalfState.OVER:
            log.info("the pair %d with replica %s is over: %s", self.proposal.epoch, self.buddy, self.cause)

    def _execute(self, command: PairAction) -> None:
        match command:
            case PairAction.GROW:
                self._resizer.convert(0 if self.state is HalfState.OVER else self._to_give)
            case PairAction.GIVE_UP:
                self._give_up(f"it cannot hold the whole model again: {self.cause}")
                self._over()
            case _:
                activities: dict[PairAction, Activity] = {
                    PairAction.ASK: self._ask,
                    PairAction.LINK: self._link,
                    PairAction.FIT: self._fit,
                    PairAction.GIVE_LAYER: self._give_layer,
                    PairAction.SHRINK: self._fit,
                    PairAction.LOAD: self._load,
                    PairAction.RETURN_LAYER: self._return_layer,
                    PairAction.AWAIT_BUDDY: self._await_buddy,
                    PairAction.RESTORE: self._restore,
                }
                self._task = asyncio.create_task(self._run(self._task, activities.get(command)))

    async def _run(self, before: asyncio.Task[None] | None, activity: Activity | None) -> None:
        """Perform an activity behind the one before, and feed its result unless another one has begun since.

        Without an activity the pair is over.
        """
        mine = asyncio.current_task()
        if before is not None and before is not mine and not before.done():
            await asyncio.wait((before,))
        try:
            if activity is None:
                await self._engine.close()
                self._over()
                return
            if self._task is not mine:
                return
            event = await activity()
        except EngineEnded as error:
            self._note(str(error))
            event = PairEvent.ENGINE_ENDED
        except Exception as error:
            event = self._call_failed(error)
        if self._task is mine and self._half.allows(event):
            self._feed(event)
            if event is PairEvent.ENGINE_ENDED:
                self._over()

    async def _watch(self) -> None:
        """Look at the worker and at the buddy as long as the pair lasts."""
        while self.state is not HalfState.OVER:
            await asyncio.sleep(LOOK_S)
            try:
                look = await self._engine.look()
            except EngineEnded:
                return
            except Exception as error:
                self._end_look(error)
                return
            if look.hops >= self.look.hops:
                # Once the worker has ended the pair, nothing is left of it there.
                self.look = look
            if self.state in (HalfState.OVER, HalfState.ASKING, HalfState.RESTORING):
                continue
            if lost := self.look.lost:
                self._lose(lost)
            elif self.state in TOGETHER:
                await self._follow()

    def _end_look(self, error: Exception) -> None:
        """A look has failed. It does not count once the pair is over."""
        if self.state is not HalfState.OVER:
            self._feed(self._call_failed(error))

    async def _follow(self) -> None:
        """Undo the pair if the buddy does."""
        try:
            state = await self._buddys_state()
        except (MigrationError, TimeoutError):
            # Its worker's connection shows whether it is lost.
            return
        if state not in TOGETHER:
            self.undo(f"replica {self.buddy} has left the pair")

    async def _buddys_state(self) -> str | None:
        """The state of the other half. Raises MigrationError and TimeoutError."""
        async with asyncio.timeout(_ANSWER_S):
            return await self._buddy.pair_state(self.proposal.epoch)

    def _lose(self, reason: str) -> None:
        self._note(reason)
        self._feed(PairEvent.BUDDY_LOST)

    def _call_failed(self, error: Exception) -> PairEvent:
        log.exception("a call to the engine failed in the pair %d", self.proposal.epoch, exc_info=error)
        self.cause = f"a call to the engine failed: {error!r}"
        return PairEvent.CALL_FAILED

    async def _ask(self) -> PairEvent:
        try:
            async with asyncio.timeout(_ANSWER_S):
                self._theirs = await self._buddy.propose_pair(self.proposal)
        except (PeerLost, TimeoutError) as error:
            # It may have accepted, and may be there.
            self._note(str(error) or f"replica {self.buddy} does not answer")
            return PairEvent.UNDO
        except MigrationError as error:
            self._note(str(error))
            return PairEvent.REFUSED
        return PairEvent.ACCEPTED

    async def _link(self) -> PairEvent:
        assert self._theirs is not None, "the buddy has answered"
        failure = await self._engine.link(self._theirs, self.proposal.epoch)
        self._note(failure)
        return PairEvent.LINKED if failure is None else PairEvent.LINK_FAILED

    async def _fit(self) -> PairEvent:
        """Have the pool be so small that the replica holds no more than before, with a layer's KV in two places."""
        mine, forming = self._task, self.state is HalfState.FITTING
        memory, report = self._resizer.memory, self._resizer.report
        blocks = memory.model.blocks_exchanging(memory.model.need(report.ordered))
        while failure := await self._lent(blocks, self.proposal.shrink_s):
            self._note(failure)
            if forming or self._task is not mine:
                return PairEvent.UNDO
            await asyncio.sleep(LOOK_S)
        return PairEvent.FITS

    async def _lent(self, blocks: Blocks, shrink_s: float) -> str | None:
        """Have the pool keep to `blocks`; the reason if it does not.

        Requests may never leave: it waits no longer than the activity that has called it lasts.
        """
        mine = self._task
        self._resizer.lend(blocks, shrink_s)
        settled = asyncio.create_task(self._resizer.settled())
        try:
            while self._task is mine and not settled.done():
                await asyncio.wait((settled,), timeout=LOOK_S)
        finally:
            settled.cancel()
        return self._resizer.cause

    @property
    def _to_give(self) -> int:
        """The number of layers that the buddy runs once they are paired."""
        return self.proposal.layers - self.own_layers

    async def _give_layer(self) -> PairEvent:
        given = (await self._engine.look()).remote
        if given == self._to_give:
            return PairEvent.ALL_GIVEN
        layer = self.proposal.layers - 1 - given if self._is_lower else given
        return await self._exchange(layer, back=False, done=PairEvent.GIVEN)

    async def _return_layer(self) -> PairEvent:
        given = (await self._engine.look()).remote
        if not given:
            return PairEvent.ALL_RETURNED
        layer = self.proposal.layers - given if self._is_lower else given - 1
        return await self._exchange(layer, back=True, done=PairEvent.RETURNED)

    async def _exchange(self, layer: int, back: bool, done: PairEvent) -> PairEvent:
        """Copy a layer while steps run; then it changes its place."""
        mine = self._task
        await self._engine.copy(layer, back)
        while True:
            look = await self._engine.look()
            if not look.is_copying or self._task is not mine:
                break
            await asyncio.sleep(_COPY_LOOK_S)
        if self._task is not mine:
            await self._engine.forget(layer, back)
            return done
        failure = look.copy_failure
        if failure is None:
            failure = await (self._engine.take_back(layer) if back else self._engine.give(layer))
        else:
            await self._engine.forget(layer, back)
        self._note(failure)
        return done if failure is None else PairEvent.BUDDY_LOST

    async def _load(self) -> PairEvent:
        if failure := await self._engine.load():
            self.cause = failure
            return PairEvent.LOAD_FAILED
        return PairEvent.LOADED

    async def _await_buddy(self) -> PairEvent:
        """Keep the promises to the buddy until it needs them no more."""
        mine = self._task
        while self._task is mine:
            try:
                state = await self._buddys_state()
            except PeerLost:
                # A dead one needs nothing. One that lives loses the pair with the connection, and no token.
                return PairEvent.BUDDY_LOST
            except (MigrationError, TimeoutError):
                state = HalfState.PAIRED
            if state is None or state in AT_HOME:
                return PairEvent.BUDDY_HOME
            await asyncio.sleep(LOOK_S)
        return PairEvent.BUDDY_HOME

    async def _restore(self) -> PairEvent:
        """Have the whole model here, after the KV of all requests was lost with the buddy."""
        engine, memory = self._engine, self._resizer.memory
        await engine.abandon()
        if failure := await engine.forget_kv(_FORGET_S):
            return self._failed(failure)
        whole = memory.model.blocks_in(memory.model.need(self._resizer.report.ordered))
        if failure := await self._lent(whole, 0.0):
            return self._failed(failure)
        if failure := await engine.load():
            return self._failed(failure)
        await engine.be_whole()
        return PairEvent.RESTORED

    def _failed(self, failure: str) -> PairEvent:
        self.cause = failure
        return PairEvent.RESTORE_FAILED

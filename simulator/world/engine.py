"""One replica's engine: continuous batching, chunked prefill, KV memory and preemption, as in vLLM.

    waiting --room--> prefill --all computed--> decode --all generated--> over
       ^                 |                        |
       +---preempted-----+------------------------+--freeze--> frozen --release--> gone

As long as the running requests stay the same, decoding follows a closed formula; a step that prefills is a separate
event. If prefills share the steps of decoding requests, requests are admitted, preempted and frozen between two steps,
as in a real engine: an arrival waits for the end of the step under way. Times are seconds of virtual time. The caller
passes the current time to every change, and calls `settle` after the last of simultaneous changes.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from policies.cost.steps import PrefillChunk, WholeStep
from policies.engine.batching import BatchScheduler, divide
from policies.model import Blocks, ReplicaId, RequestId, Tokens
from simulator.caches.cache import SimulatedCache
from simulator.costs.steps import Leg, StepTimes
from simulator.world.batch import NEARLY, NEVER, Batch
from simulator.world.live import Live, Stage
from simulator.world.lockstep import Lockstep


class Memory(StrEnum):
    """The rule for exceeding a replica's memory."""

    STRICT = "strict"
    """Never exceeded: there is always room for a further step."""
    SLOTS = "slots"
    """May be exceeded between decisions."""
    UNBOUNDED = "unbounded"
    """May always be exceeded."""


@dataclass(slots=True)
class Settled:
    """The events of one `settle`: the affected requests by kind of event, in the order of the events.

    The requests in `refused` have lost the room that was promised to them, those in `filling` have a part of their
    prefill done and a part left.
    """

    prefilling: list[Live] = field(default_factory=list)
    filling: list[Live] = field(default_factory=list)
    decoding: list[Live] = field(default_factory=list)
    over: list[Live] = field(default_factory=list)
    preempted: list[Live] = field(default_factory=list)
    refused: list[RequestId] = field(default_factory=list)


class SimulatedEngine:
    """An engine with room for `capacity` tokens of KV, which may change; a `cache` has the rest of the memory.

    Turns in the queues of `scheduler` are equal without classes. `reserved` is the room promised to requests on their
    way here, which is withdrawn before any preemption. `handed` is the room of requests during their hand-over, on both
    sides. `full_s` is the time at which memory will be full without changes. `lockstep` is its group, if other engines
    run a part of its layers, `whole_step` its step under way as it would be without them.
    """

    def __init__(
        self,
        replica: ReplicaId,
        node: str,
        capacity: Tokens,
        times: StepTimes,
        memory: Memory,
        on_steps: Callable[[float, float], None] | None = None,
        cache: SimulatedCache | None = None,
    ) -> None:
        self.replica = replica
        self.node = node
        self.capacity = capacity
        self.scheduler: BatchScheduler[Live] = BatchScheduler()
        self.reserved: dict[RequestId, float] = {}
        self.handed: dict[RequestId, float] = {}
        self.batch = Batch(times, on_steps)
        self.full_s = NEVER
        self.cache = cache
        self.lockstep: Lockstep[SimulatedEngine] | None = None
        self.whole_step: WholeStep | None = None
        self._times = times
        self._memory = memory
        self._still = 0.0
        """The part of the used memory that does not grow, in tokens: prefills, hand-overs, and promised room."""
        self._prefills: deque[Live] = deque()
        self._chunks: list[tuple[Live, int]] = []
        self._step_ends = NEVER
        self._awaited = NEVER
        """The end of the decoding step under way, if a request waits for it."""
        self._pause_s = 0.0
        """Seconds by which the next step is longer."""
        self._admitted: list[Live] = []
        self._started: list[Live] = []
        self._filling: list[Live] = []

    # --- queries --------------------------------------------------------------------------------------

    @property
    def is_at_work(self) -> bool:
        """True while it computes steps."""
        return self.batch.size > 0 or self._step_ends < NEVER

    @property
    def is_empty(self) -> bool:
        """True without requests, also on their way here or from here."""
        return not (self.scheduler.running or self.scheduler.waiting or self.reserved or self.handed)

    @property
    def slowdown(self) -> float:
        """The time of its steps as a multiple of that alone on the device."""
        return self.batch.slowdown

    def free_blocks(self, now: float) -> Blocks | None:
        """The free blocks of an engine with a prefix cache, which reports them; None without one. Below zero if the
        capacity is below what is used.
        """
        return None if self.cache is None else Blocks(int(self.free(now)) // self.cache.block_tokens)

    def free(self, now: float) -> float:
        """Tokens of KV that are neither used nor promised."""
        if self.lockstep is not None and self.lockstep.account is not None:
            return self.lockstep.account - self.lockstep.used(now)
        return self.capacity - self.used(now)

    @property
    def still(self) -> float:
        """Tokens of KV that are used or promised, and do not grow."""
        return self._still

    def used(self, now: float) -> float:
        """Tokens of KV that are used or promised; blocks that requests share count once."""
        shared = 0 if self.cache is None else self.cache.shared_tokens
        return self._still + self.batch.context(now) - shared

    def prefilling(self) -> int:
        """Tokens that wait for their prefill."""
        return sum(live.todo for live in self._prefills) + sum(live.todo for live in self.scheduler.waiting)

    def load_s(self, now: float) -> float:
        """Seconds to load blocks that have arrived: they wait for the next step, and are loaded in it."""
        if not self._times.prefills:
            return 0.0
        return self.rest_s(now) + self._times.decode(self.batch.size + 1, self.batch.context(now)).step_s

    def rest_s(self, now: float) -> float:
        """Seconds until the end of the step under way; 0 between two steps."""
        return self._step_ends - now if self._in_step else self.batch.rest_s(now)

    def ends_with_step(self, live: Live, now: float) -> bool:
        """True if the step under way generates the last token of a decoding request."""
        return self._times.interferes and self._whole(live, now) >= live.job.prompt + live.job.output

    def due(self) -> float:
        """The time of the next `settle` if nothing changes. `settle` must have been called after the last change."""
        if self._in_step:
            return self._step_ends
        times = [self._step_ends, self._awaited, self.batch.next_end()]
        if self._memory is Memory.STRICT:
            times.append(self.full_s)
        return min(times)

    # --- changes ----------------------------------------------------------------------------------------

    def slow_down(self, slowdown: float, now: float) -> None:
        """Have steps from the next one on take that many times as long as alone on the device."""
        self.batch.sync(now)
        self.batch.slowdown = slowdown

    def pause(self, seconds: float) -> None:
        """Stand still for that time, behind the step under way."""
        self._pause_s += seconds

    def add(self, live: Live) -> None:
        """Queue a request without KV: it waits for room, and is then prefilled as a whole."""
        live.queue()
        live.at = self.replica
        self.scheduler.enqueue(live)

    def adopt(self, live: Live, todo: int, now: float) -> None:
        """Admit a request with all of its KV except `todo` tokens at once. It uses the room promised to it."""
        self.batch.sync(now)
        self.release(live.id)
        live.at = self.replica
        self.scheduler.start(live)
        self._begin(live, todo, now)

    def receive(self, live: Live, todo: int) -> None:
        """Queue a request whose KV is in the prefix cache, except for `todo` tokens."""
        self.release(live.id)
        live.at = self.replica
        live.stage, live.todo = Stage.WAITING, todo
        self.scheduler.enqueue(live)

    def take_over(self, live: Live, origin: "SimulatedEngine", now: float) -> None:
        """Move a request from another engine instantaneously, with its KV and its stage."""
        stage, todo = live.stage, live.todo
        origin.remove(live, now)
        if stage is Stage.WAITING:
            self.add(live)
        else:
            self.adopt(live, todo if stage is Stage.PREFILL else 0, now)

    def remove(self, live: Live, now: float) -> None:
        """Remove a request and free its memory."""
        self.scheduler.remove(live)
        if live.stage is Stage.WAITING:
            live.stage = Stage.NOWHERE
        else:
            self.batch.sync(now)
            self._leave(live, now)

    def freeze(self, live: Live, now: float) -> None:
        """Stop and remove a decoding request. Its blocks stay in memory until `release`.

        The step under way still yields a token of it.
        """
        rest_s, held = self.rest_s(now), self._whole(live, now)
        self.remove(live, now)
        live.stage = Stage.FROZEN
        if self._times.interferes:
            live.held, live.stopped_s = held, now + rest_s
        # Blocks that others use are theirs.
        self.handed[live.id] = live.held - self.shares(live)
        self._still += self.handed[live.id]

    def shares(self, live: Live) -> int:
        """The tokens of a request's blocks that running requests use: it needs no memory of its own for them."""
        if self.cache is None:
            return 0
        return self.cache.active(live.job.context[: (live.need - 1) // self.cache.block_tokens])

    def reserve(self, request: RequestId, tokens: float, now: float, shared: float = 0.0) -> bool:
        """Promise room to a request on its way here; False if there is not enough beside the `shared` tokens, which
        running requests have here.
        """
        if self._memory is not Memory.UNBOUNDED and self.free(now) < tokens - shared:
            return False
        self.reserved[request] = tokens - shared
        self._still += tokens - shared
        return True

    def secure(self, request: RequestId) -> None:
        """Make the room promised to a request irrevocable, since the request is about to arrive."""
        if request in self.reserved:
            self.handed[request] = self.reserved.pop(request)

    def release(self, request: RequestId) -> None:
        """Free the memory held for a request or promised to it."""
        self._still -= self.handed.pop(request, 0.0) + self.reserved.pop(request, 0.0)

    def settle(self, now: float, decided: bool = False) -> Settled:
        """Bring the engine up to date: end, preempt and admit requests, and begin the next step.

        `decided` is true just after the execution of an epoch's decisions.
        """
        happened = Settled()
        self.batch.sync(now)
        self._trim(now)
        if now >= self._step_ends:
            self._end_step(now)
        self._finish(now, happened)
        between = not self._times.interferes or not self.rest_s(now)
        if (between and self._memory is Memory.STRICT) or (decided and self._memory is Memory.SLOTS):
            self._relieve(now, happened)
        if between:
            self._admit_waiting(now)
            self._finish(now, happened)
        if between and (self._prefills or self._pause_s) and self._step_ends == NEVER:
            self._begin_step(now)
        elif not self._in_step:
            self._pace(now)
        self.full_s = self._full_s(now)
        self._awaited = now + self.rest_s(now) if not between and self._is_awaited(now) else NEVER
        happened.prefilling, self._admitted = self._admitted, []
        happened.filling, self._filling = self._filling, []
        happened.decoding, self._started = self._started, []
        self._trim(now)
        return happened

    # --- inside ---------------------------------------------------------------------------------------

    @property
    def _in_step(self) -> bool:
        """True while a step with prefills determines the pace of decoding."""
        return self._step_ends < NEVER and self._times.interferes

    def _whole(self, live: Live, now: float) -> float:
        """The tokens of a request at the end of the step under way."""
        return math.ceil(live.tokens(now) - NEARLY)

    def _is_awaited(self, now: float) -> bool:
        """True if something begins at the end of the decoding step under way."""
        waiting = self.scheduler.waiting
        return bool(self._prefills) or self._pause_s > 0 or (bool(waiting) and self._admits(waiting[0], now))

    def _full_s(self, now: float) -> float:
        """The time at which memory will be full without changes: too full for the next step, if steps are whole."""
        if not self.batch.size:
            return NEVER
        size = self._growth
        room = self.free(now)
        if not self._times.interferes:
            return self.batch.after(room / size)
        begun = self.batch.left(now)
        return self.batch.after(begun + max(0, math.floor(room / size - begun + NEARLY)))

    def take_in(self, names: Sequence[int], now: float) -> None:
        """Add copied blocks to the prefix cache, as far as there is memory for them."""
        if self.cache is not None:
            self.cache.take_in(names)
            self._trim(now)

    def _trim(self, now: float) -> None:
        """Leave the prefix cache the memory that nothing else needs."""
        if self.cache is not None:
            self.cache.trim(self.free(now))

    def _begin_step(self, now: float) -> None:
        """Begin a step that prefills queued requests, first come first served, within the budget."""
        chunks = []
        for live, tokens in divide(map(self._reused, self._prefills), self._times.budget(self.batch.size)):
            if live.cached is None:
                live.cached = live.need - live.todo
            self._chunks.append((live, tokens))
            chunks.append(PrefillChunk(tokens, max(0, math.ceil(live.held) - live.todo)))
            if self.cache is not None:
                self.cache.fill(live.id, live.need - live.todo + tokens)
        alone_s = self._times.prefill(self.batch.size, self.batch.context(now), chunks)
        self.whole_step = WholeStep(alone_s, self.batch.size + sum(chunk.tokens for chunk in chunks))
        seconds = self.slowdown * alone_s if self.lockstep is None else self.lockstep.cycle_s()
        seconds, self._pause_s = seconds + self._pause_s, 0.0
        self._step_ends = round(now + seconds, 9)
        self.batch.pace(Leg(seconds, 0.0) if self._times.interferes else None)

    def _pace(self, now: float) -> None:
        """Set the pace of steps that only decode."""
        if self.lockstep is None:
            self.batch.pace()
            return
        leg = self._times.decode(self.batch.size, self.batch.context(now))
        self.whole_step = WholeStep(leg.step_s, self.batch.size) if self.batch.size else None
        self.batch.pace(Leg(self.lockstep.cycle_s(), leg.growth_s) if self.batch.size else None)

    @property
    def _growth(self) -> int:
        """The tokens by which a step makes the memory fuller."""
        return self.batch.size if self.lockstep is None or self.lockstep.account is None else self.lockstep.batch_size

    def _end_step(self, now: float) -> None:
        self._step_ends = NEVER
        chunks, self._chunks = self._chunks, []
        for live, tokens in chunks:
            live.todo -= tokens
            if live.todo > 0:
                self._filling.append(live)
            else:
                self._prefills.remove(live)
                self._still -= live.held
                live.held += 1  # a prefill ends with a token
                self._decode(live, now)

    def _admit_waiting(self, now: float) -> None:
        """Admit waiting requests in their order, as long as there is room for the next one."""
        while (live := self.scheduler.admit(partial(self._admits, now=now))) is not None:
            self._begin(live, live.todo, now)

    def _admits(self, live: Live, now: float) -> bool:
        """True if there is room for a waiting request."""
        return (
            self._memory is Memory.UNBOUNDED or self.free(now) - self._spare() >= live.held - self.shares(live) - NEARLY
        )

    def _spare(self) -> float:
        """Tokens that must stay free after an admission: at least one step of all requests, so that they can go on."""
        if not self.scheduler.running and not self._still:
            return 0.0
        step = 1.0 + self._growth if self._memory is Memory.STRICT else 0.0
        return max(self._times.watermark(self.capacity), step)

    def _reused(self, live: Live) -> Live:
        """Leave out the first tokens of a prefill that are in the cache, unless some have been computed."""
        if self.cache is not None:
            done = self.cache.claim(live.id, live.job.context, live.need, live.need - live.todo)
            live.todo = min(live.todo, live.need - done)
        return live

    def _begin(self, live: Live, todo: int, now: float) -> None:
        """Prefill or decode a request that runs from now on."""
        live.todo = todo
        self._reused(live)
        if todo and self._times.prefills:
            live.stage = Stage.PREFILL
            self._still += live.held
            self._prefills.append(live)
            self._admitted.append(live)
        else:
            self._decode(live, now)

    def _decode(self, live: Live, now: float) -> None:
        self.batch.join(live, now)
        self._started.append(live)

    def _leave(self, live: Live, now: float) -> None:
        """Remove a request that ran from the batch or from the prefills, and free its memory."""
        if self.cache is not None:
            if live.stage is Stage.DECODE:
                # The KV of the newest token is computed with the next one.
                self.cache.fill(live.id, math.ceil(live.tokens(now) - NEARLY) - 1)
            self.cache.release(live.id)
        if live.stage is Stage.DECODE:
            self.batch.leave(live, now)
            return
        self._prefills.remove(live)
        self._chunks = [chunk for chunk in self._chunks if chunk[0] is not live]
        self._still -= live.held
        live.stage = Stage.NOWHERE

    def _finish(self, now: float, happened: Settled) -> None:
        while (live := self.batch.ended()) is not None:
            self.scheduler.remove(live)
            self._leave(live, now)
            live.stage, live.held = Stage.OVER, live.job.prompt + live.job.output
            happened.over.append(live)

    def _relieve(self, now: float, happened: Settled) -> None:
        """Free memory until the next step has room: promised room first, then the youngest request."""
        while self.batch.size and self.free(now) <= self._least():
            if self.reserved:
                request = next(reversed(self.reserved))
                self.release(request)
                happened.refused.append(request)
                continue
            live = self.scheduler.preempt(partial(self._leave, now=now))
            live.preemptions += 1
            live.queue()
            happened.preempted.append(live)

    def _least(self) -> float:
        """The free tokens at which memory is full; with whole steps, it has to take a token of every request."""
        nearly = NEARLY * (1 + self._growth)
        if self._memory is not Memory.STRICT:
            return -nearly
        return self._growth - nearly if self._times.interferes else nearly

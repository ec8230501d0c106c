"""The requests on one replica: runs them in the engine and publishes their tokens.

A muted request computes on, and the host keeps its new tokens unpublished. A halted one is not in the engine: it costs
no step while its target takes it over, and continues after its tokens so far if it stays. The engine halts a request by
itself behind a token, or at once, which wastes the step in flight.
"""

import asyncio
import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from deployments.engine.port import Engine, EngineDead, InvalidRequest, Tie
from deployments.processes.table import is_ending
from deployments.replica.outbox import Outboxes
from deployments.replica.prefix_cache.contexts import PastContexts
from migration.protocol.core_messages import Prefilled
from migration.protocol.errors import Refused, RequestGone, Stopping
from migration.protocol.messages import Prepare, Tail
from migration.protocol.ports import HALTED, Clock, Generated, Hosted
from migration.protocol.request import Delta, Doubt, Extras, IngressId, Lost, Moved, Moving, RequestSpec, Trait
from policies.causes import Cause
from policies.model import Blocks, Phase, RequestId, RequestLoad, Tokens
from policies.prefix.names import in_common

log = logging.getLogger(__name__)

_REMEMBERED = 256
"""The number of ended requests whose output is kept, in case the stream that carried it has broken."""
_REMEMBERED_BYTES = 64 << 20
"""The size of the extras that are kept of ended requests: vectors for every token of a prompt may have some MiB."""


@dataclass(slots=True)
class Run:
    """One request under one hop."""

    spec: RequestSpec
    hop: int
    outputs: list[int]
    started: float
    published: int
    resumed_at: int = 0
    muted: bool = False
    halted: bool = False
    leaving: bool = False
    """The run will be halted behind a token."""
    fetching: bool = False
    """The run waits for blocks of its prompt, and is not in the engine yet."""
    restarts: int = 0
    finish: str | None = None
    last_hop: int = 0
    first: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    first_s: float | None = None
    awaited: asyncio.Event | None = field(default=None, repr=False)
    """Set at the next published token."""
    idle: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set once the run is halted behind a token, or has ended."""
    extras: list[tuple[int, bytes]] = field(default_factory=list, repr=False)
    """Those of this run's steps (see `migration.protocol.request.Extras`)."""
    prompt_names: Sequence[int] | None = field(default=None, repr=False)

    @property
    def decodes(self) -> bool:
        """True if this run has generated a token, so that the context is in KV blocks."""
        return len(self.outputs) > self.resumed_at

    @property
    def key(self) -> str:
        """The run's name in the engine, a new one each time it is halted and continued."""
        return f"{self.spec.id}.{self.hop}" + (f".{self.restarts}" if self.restarts else "")

    @property
    def context(self) -> int:
        """Prompt and output tokens."""
        return self.spec.prompt_tokens + len(self.outputs)

    def names(self, engine: Engine) -> Sequence[int]:
        """The names of the blocks of its prompt; computed once, if at all."""
        if self.prompt_names is None:
            self.prompt_names = engine.names(self.spec, ())
        return self.prompt_names

    @property
    def extra_bytes(self) -> int:
        """The size of all extras."""
        return sum(len(rest) for _, rest in self.extras)

    def delta(self, index: int, finish: str | None) -> Delta:
        """The published output from token `index` on."""
        tokens = tuple(self.outputs[index : self.published])
        return Delta(self.spec.id, self.hop, index, tokens, finish, self._extras(index, finish) if self.extras else ())

    def _extras(self, index: int, finish: str | None) -> Extras:
        """Those of the steps from token `index` on. A last step without tokens stands behind all tokens."""
        end = self.published + (finish is not None)
        first, last = (bisect_left(self.extras, (at, b"")) for at in (index, end))
        return tuple(self.extras[first:last])


@dataclass(frozen=True, slots=True)
class RunSink:
    """Implements `OutputSink` for one run on a host."""

    host: "RequestHost"
    run: Run

    def take(self, step: Generated) -> None:
        """See `OutputSink.take`."""
        self.host.took(self.run, step)

    def fail(self, error: Exception) -> None:
        """See `OutputSink.fail`."""
        self.host.failed(self.run, error)


class RequestHost:
    """Implements `SourceHost` and `TargetHost` on one engine.

    `on_end` is called when a request ends by itself, is aborted by its reader (True), or is lost. `by_priority`: the
    engine schedules requests by their priority. `contexts` remember those that end here by themselves or by their
    reader: the blocks of the others are where they have gone.
    """

    def __init__(
        self,
        engine: Engine,
        outboxes: Outboxes,
        clock: Clock,
        room: Callable[[], int],
        on_end: Callable[[RequestId, bool], None] = lambda request, by_client: None,
        by_priority: bool = False,
        contexts: PastContexts | None = None,
    ) -> None:
        self._engine = engine
        self._by_priority = by_priority
        self._outboxes = outboxes
        self._clock = clock
        self._room = room
        self.on_end = on_end
        self.on_context: Callable[[RequestSpec, Sequence[int]], None] = lambda spec, outputs: None
        """Called with the context of every request that `contexts` remember."""
        self.contexts = contexts or PastContexts(lambda: 0, clock)
        self._runs: dict[RequestId, Run] = {}
        self._ended: OrderedDict[RequestId, Run] = OrderedDict()
        self._ended_bytes = 0
        self._reserved: dict[str, int] = {}
        self._last_output_s = clock()
        self.stopping = False
        self.asleep = False
        """The replica is asleep, or about to be."""
        self.prompts = Prefilled(0, 0)
        """The prompts of all requests that began here, once they were computed."""

    # --- for the ingress ------------------------------------------------------------------------------

    def submit(
        self,
        spec: RequestSpec,
        hop: int,
        outputs: tuple[int, ...],
        tail: Tail | None = None,
        fetching: bool = False,
    ) -> None:
        """Run a request under `hop`, after its output tokens so far, with a tail that the engine holds.

        If it is `fetching` blocks, it is here from now on, and in the engine from `begin` on.

        Raises:
            Stopping: the replica is stopping or asleep, or its engine has died.
            Refused: the request exceeds the model's context, cannot be continued exactly, or runs here already.
        """
        self._require_open(closely=hop > 0)
        if spec.prompt_tokens + spec.max_tokens > self._engine.max_context:
            raise Refused("prompt and max_tokens exceed the model's context", Cause.TOO_LONG)
        if outputs and (tied := self._tied(spec)):
            raise Refused(f"the answer cannot be continued here exactly ({tied})", Cause.IMMOVABLE)
        current = self._runs.get(spec.id)
        if current is not None and current.hop >= hop:
            raise Refused(f"the request runs here already, under hop {current.hop}", Cause.ALREADY_THERE)
        if current is not None:
            self._remove(current)
            self.on_end(spec.id, True)
        run = Run(spec, hop, list(outputs), self._clock(), len(outputs), resumed_at=len(outputs), last_hop=hop)
        if fetching:
            run.fetching = run.halted = True
            self._runs[spec.id] = run
        else:
            self._begin(run, tail)

    def begin(self, request: RequestId, hop: int) -> None:
        """Run a request that was fetching blocks, if it is still here and has not begun otherwise.

        A move that has muted it meanwhile hands it over, or has it begin by its unmuting.
        """
        run = self._runs.get(request)
        if run is not None and run.hop == hop and run.fetching and not run.muted:
            self._begin_or_lose(run)

    def abort(self, request: RequestId, hop: int) -> None:
        """Abort a request if it runs under exactly this hop; otherwise do nothing."""
        run = self._runs.get(request)
        if run is not None and run.hop == hop:
            self._remove(run)

    def client_gone(self, request: RequestId, hop: int | None = None) -> None:
        """Abort a request under a hop below `hop` (None: any hop), since its reader has left or reads elsewhere."""
        run = self._runs.get(request)
        if run is not None and (hop is None or run.hop < hop):
            if hop is None:
                self._keep_context(run)
            self._remove(run)
            self.on_end(request, True)

    def forget_ingress(self, ingress: IngressId) -> int:
        """Abort every request of an ingress that is gone. Returns their number."""
        orphans = [run.spec.id for run in self._runs.values() if run.spec.ingress == ingress]
        for request in orphans:
            self.client_gone(request)
        return len(orphans)

    def resume(self, request: RequestId, hop: int, index: int) -> bool:
        """Publish the output from token `index` on again, as far as it was published.

        Returns False if there is no such run, or if it has ended here before the end of its output, so that no more
        tokens would follow. Returns False, too, if the request asks for logprobs and `index` is before this run: they
        have stayed on the former replica. The reader then submits the request again.
        """
        run = self._runs.get(request) or self._ended.get(request)
        if run is None or run.hop != hop:
            return False
        if request not in self._runs and (run.muted or run.finish is None):
            return False
        if index < run.resumed_at and Trait.SCORED in run.spec.traits:
            return False
        if index < run.published or (run.finish and not run.muted):
            self._outboxes.put(run.spec.ingress, run.delta(index, None if run.muted else run.finish))
        return True

    async def first_token(self, request: RequestId, hop: int) -> float | None:
        """Wait for the first token that the run publishes. Returns the seconds from its start; None without a token."""
        run = self._runs.get(request) or self._ended.get(request)
        if run is None or run.hop != hop:
            return None
        await run.first.wait()
        return run.first_s

    # --- SourceHost -----------------------------------------------------------------------------------

    def snapshot(self, request: RequestId, hop: int | None = None) -> Hosted:
        """See `SourceHost.snapshot`. A muted request is frozen at its published output."""
        run = self._live(request, hop)
        outputs = run.outputs[: run.published] if run.muted else run.outputs
        return Hosted(run.spec, run.hop, run.key, tuple(outputs), run.decodes)

    def next_hop(self, request: RequestId) -> int:
        """See `SourceHost.next_hop`."""
        run = self._live(request)
        run.last_hop += 1
        return run.last_hop

    async def next_output(self, request: RequestId, hop: int) -> None:
        """See `SourceHost.next_output`."""
        run = self._live(request, hop)
        run.awaited = run.awaited or asyncio.Event()
        await run.awaited.wait()

    async def halt_behind_token(self, request: RequestId, hop: int) -> None:
        """See `SourceHost.halt_behind_token`."""
        run = self._live(request, hop)
        run.leaving = True
        self._engine.halt(run.key, run.spec.max_tokens - len(run.outputs))
        await run.idle.wait()

    def mute(self, request: RequestId, hop: int) -> Hosted:
        """See `SourceHost.mute`."""
        self._live(request, hop).muted = True
        return self.snapshot(request, hop)

    def halt(self, request: RequestId, hop: int) -> None:
        """See `SourceHost.halt`."""
        run = self._live(request, hop)
        run.halted = True
        self._engine.abort(run.key)

    def unmute(self, request: RequestId, hop: int) -> None:
        """See `SourceHost.unmute`."""
        run = self._runs.get(request)
        if run is None or run.hop != hop:
            return
        run.muted = run.leaving = False
        self._publish(run)
        if run.halted and not run.finish:
            self._continue(run)

    def announce(self, event: Moving | Moved | Doubt) -> None:
        """See `SourceHost.announce`."""
        run = self._live(event.request, event.hop)
        self._outboxes.put(run.spec.ingress, event)

    def drop(self, request: RequestId, hop: int) -> None:
        """See `SourceHost.drop`."""
        self._remove(self._live(request, hop))

    def why_immovable(self, request: RequestId) -> Tie | None:
        """The reason why a request must stay; None if it may move. Raises RequestGone."""
        return self._tied(self._live(request).spec)

    @property
    def tied(self) -> frozenset[Trait]:
        """The traits of requests that must stay."""
        return frozenset(trait for trait in Trait if self._tied_by(frozenset((trait,))))

    def _tied(self, spec: RequestSpec) -> Tie | None:
        return self._tied_by(spec.traits)

    def _tied_by(self, traits: frozenset[Trait]) -> Tie | None:
        return Tie.POOLED if Trait.POOLED in traits else self._engine.tied(traits)

    # --- TargetHost -----------------------------------------------------------------------------------

    def accept(self, message: Prepare) -> Tokens:
        """See `TargetHost.accept`. Shared blocks are looked for only where room is scarce."""
        self._require_open(closely=True)
        if message.spec.id in self._runs:
            raise Refused("the request runs here already", Cause.ALREADY_THERE)
        tokens = message.spec.prompt_tokens + len(message.outputs)
        if self._left() < tokens:
            tokens -= self._shared(message.spec, message.outputs)
        if self._left() < tokens:
            raise Refused(f"no room for {tokens} tokens", Cause.NO_ROOM)
        return Tokens(tokens)

    def reserve(self, migration: str, tokens: Tokens) -> None:
        """See `TargetHost.reserve`."""
        self._reserved[migration] = tokens

    def release(self, migration: str) -> None:
        """See `TargetHost.release`."""
        self._reserved.pop(migration, None)

    async def add(self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], tail: Tail | None) -> None:
        """See `TargetHost.add`."""
        self.submit(spec, hop, outputs, tail)

    @property
    def closed(self) -> str | None:
        """The reason why nothing new is taken here; None if something is."""
        if self.stopping:
            return "the replica is stopping"
        if self.asleep:
            return "the replica is asleep"
        return None if self._engine.death is None else f"the engine died: {self._engine.death}"

    def silent_s(self) -> float:
        """Seconds without any token from the engine while requests run in it; 0 if none do."""
        return self._clock() - self._last_output_s if self._computes else 0.0

    def excuse_silence(self) -> None:
        """The engine gives no token now, and that is no fault of its."""
        self._last_output_s = self._clock()

    def lose_all(self, reason: str) -> None:
        """Give the engine up: notify every reader of its death, and take no more requests."""
        self.stopping = True
        for run in list(self._runs.values()):
            self._lose(run, Lost(run.spec.id, run.hop, reason, died=True))
            self._engine.abort(run.key)

    def give_back(self, blocks: Blocks, block_size: int) -> int:
        """Have requests with at least `blocks` KV blocks continue elsewhere, from their tokens; return their number.

        Their readers submit them again. The last turns go first. Requests that move, or that no engine could continue
        exactly, stay. So do those in the engine's queue, unless the replica is about to fall asleep.
        """
        queued, left, count = self._queued(), int(blocks), 0
        for run in sorted(self._runs.values(), key=_turn, reverse=True):
            waits = run.key in queued and not self.asleep
            stays = run.muted or run.halted or waits or (run.outputs and self._tied(run.spec))
            if left > 0 and not stays:
                left -= -(-run.context // block_size)
                count += 1
                self._lose(run, Lost(run.spec.id, run.hop, "the replica's KV pool shrinks"))
                self._engine.abort(run.key)
        return count

    # --- inside ---------------------------------------------------------------------------------------

    def _require_open(self, closely: bool) -> None:
        """Raise Stopping if nothing new is taken here. `closely`: look at the engine's processes, too.

        A request that comes from another replica may do so since that one's engine has died. Where all die at once, the
        end of this one may not have been noticed yet.
        """
        if (reason := self.closed) is not None:
            raise Stopping(reason, Cause.ASLEEP if self.asleep and not self.stopping else Cause.STOPPING)
        if closely and any(map(is_ending, self._engine.processes.all)):
            raise Stopping("the engine is ending")

    def _left(self) -> int:
        """The room beside all reservations, in tokens."""
        return self._room() - sum(self._reserved.values())

    def _shared(self, spec: RequestSpec, outputs: tuple[int, ...]) -> int:
        """The tokens of a context's first blocks that are in the prefix cache, and that decoding requests use."""
        names, size = self._engine.names(spec, outputs), self._engine.fingerprint.block_size
        # An engine computes the last token of a context, and with it the block that this token ends.
        usable = (spec.prompt_tokens + len(outputs) - 1) // size
        queued = self._queued()
        used = (
            in_common(names, run.names(self._engine))
            for run in self._runs.values()
            if run.decodes and not run.halted and run.key not in queued
        )
        return min(max(used, default=0), self._engine.present(spec, outputs).hbm, usable) * size

    @property
    def reserved_tokens(self) -> Tokens:
        """Room reserved for requests on their way here."""
        return Tokens(sum(self._reserved.values()))

    def partial_blocks(self, block_size: int) -> int:
        """The number of blocks of requests in the engine that are not full, if none of them waits."""
        return sum(run.context % block_size > 0 for run in self._runs.values() if not run.halted)

    def loads(self) -> Iterator[RequestLoad]:
        """The loads of all requests, for policies."""
        now = self._clock()
        queued = self._queued()
        for run in self._runs.values():
            phase = Phase.WAITING if run.key in queued else Phase.DECODE if run.decodes else Phase.PREFILL
            phase = Phase.MOVING if run.muted else phase
            yield RequestLoad(
                id=run.spec.id,
                label=run.spec.label,
                tokens=Tokens(run.context),
                phase=phase,
                age_s=round(now - run.started, 3),
                hop=run.hop,
                immovable=self.why_immovable(run.spec.id),
                precedence=run.spec.precedence,
                adapter=run.spec.adapter_id,
            )

    def _queued(self) -> set[str]:
        """The keys of the runs without KV blocks."""
        computing = [run for run in self._runs.values() if not run.halted]
        return queued_keys(computing, self._engine.stats().waiting, self._by_priority)

    @property
    def _computes(self) -> bool:
        """True if a request runs in the engine."""
        return any(not run.halted for run in self._runs.values())

    def _begin(self, run: Run, tail: Tail | None = None) -> None:
        """Run a request in the engine, after its output so far."""
        if not self._computes:
            self._last_output_s = self._clock()
        run.halted = run.fetching = False
        # The sink is not called before `add` has returned. If that fails, the request is not here.
        self._engine.add(run.key, run.spec, tuple(run.outputs), RunSink(self, run), tail)
        self._runs[run.spec.id] = run

    def _begin_or_lose(self, run: Run) -> None:
        """`_begin` for a request that is here, as its reader knows."""
        try:
            self._begin(run)
        except Exception as error:
            self.failed(run, error)

    def _continue(self, run: Run) -> None:
        """Run a halted request in the engine again."""
        run.restarts += 1
        run.idle.clear()
        self._begin_or_lose(run)

    def _live(self, request: RequestId, hop: int | None = None) -> Run:
        run = self._runs.get(request)
        if run is None or hop not in (None, run.hop):
            raise RequestGone(f"request {request} is not here")
        return run

    def took(self, run: Run, step: Generated) -> None:
        """The engine has made a step for a run."""
        self._last_output_s = self._clock()
        if step.prefilled is not None and not run.resumed_at and not run.restarts:
            self.prompts = Prefilled(*map(sum, zip(self.prompts, step.prefilled, strict=True)))
        if step.rest is not None:
            run.extras.append((len(run.outputs), step.rest))
        run.outputs.extend(step.tokens)
        halted = step.finish == HALTED
        run.finish = None if halted else step.finish
        if not run.muted:
            self._publish(run)
        elif run.finish:
            self.on_end(run.spec.id, False)
        if halted:
            run.halted = True
            run.idle.set()
            if not run.leaving:
                self._continue(run)

    def failed(self, run: Run, error: Exception) -> None:
        """The engine has ended a run without its output."""
        match error:
            case EngineDead():
                event = Lost(run.spec.id, run.hop, f"the engine died: {error}", died=True)
            case InvalidRequest():
                event = Lost(run.spec.id, run.hop, str(error), invalid=True)
            case _:
                log.warning("request %s failed in the engine: %s", run.spec.id, error)
                event = Lost(run.spec.id, run.hop, f"the engine failed: {error}")
        self._lose(run, event)

    def _publish(self, run: Run) -> None:
        """Publish the new tokens. With the end of the output, the run ends."""
        index, run.published = run.published, len(run.outputs)
        fresh = index < run.published
        if fresh or run.finish:
            self._outboxes.put(run.spec.ingress, run.delta(index, run.finish))
        if fresh and run.awaited is not None:
            run.awaited.set()
            run.awaited = None
        if fresh and not run.first.is_set():
            run.first_s = self._clock() - run.started
            run.first.set()
        if run.finish:
            self._keep_context(run)
            self._retire(run)
            self.on_end(run.spec.id, False)

    def _keep_context(self, run: Run) -> None:
        """Remember the context of a run that ends, unless it leaves no KV."""
        if Trait.POOLED not in run.spec.traits:
            self.contexts.add(run.spec, run.outputs)
            self.on_context(run.spec, run.outputs)

    def _lose(self, run: Run, event: Lost) -> None:
        """End a run without its output, and publish the event."""
        if self._runs.get(run.spec.id) is run:
            self._retire(run)
            self._outboxes.put(run.spec.ingress, event)
            self.on_end(run.spec.id, False)

    def _remove(self, run: Run) -> None:
        self._retire(run)
        self._engine.abort(run.key)

    def _retire(self, run: Run) -> None:
        if self._runs.get(run.spec.id) is run:
            del self._runs[run.spec.id]
        # It will not run again, and with media it can be large.
        run.spec = replace(run.spec, body=())
        run.first.set()
        run.idle.set()
        if run.awaited is not None:
            run.awaited.set()
        self._remember(run)

    def _remember(self, run: Run) -> None:
        """Keep the output of an ended run; forget that of the earliest ones."""
        if before := self._ended.pop(run.spec.id, None):
            self._ended_bytes -= before.extra_bytes
        self._ended[run.spec.id] = run
        self._ended_bytes += run.extra_bytes
        while len(self._ended) > _REMEMBERED or self._ended_bytes > _REMEMBERED_BYTES:
            _, forgotten = self._ended.popitem(last=False)
            self._ended_bytes -= forgotten.extra_bytes


def _turn(run: Run) -> tuple[int, float, float]:
    """A request's place among those that wait; without classes, by its arrival."""
    return run.spec.priority, run.spec.precedence.arrived_s, run.started


def queued_keys(runs: Iterable[Run], waiting: int, by_priority: bool = False) -> set[str]:
    """The keys of the runs without KV blocks, given the engine's number of `waiting` requests.

    vLLM admits requests first come, first served, and preempts the latest; with `by_priority`, that of the lowest
    priority number comes first, and that of the highest one is preempted. So the waiting runs are the last ones without
    a token and, if these are fewer than `waiting`, the last ones with a token.
    """
    if not waiting:
        return set()
    if by_priority:
        runs = sorted(runs, key=lambda run: run.spec.priority)
    without: list[str] = []
    decoding: list[str] = []
    for run in runs:
        (decoding if run.decodes else without).append(run.key)
    queued = without[-waiting:]
    return {*queued, *decoding[len(decoding) - max(0, waiting - len(queued)) :]}

"""Calls of the ingress to single replicas, which may be dead, slow, or not routable yet."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, TypeVar

from app.ingress.streams.placing import Placer
from deployments.api.calls import Submission
from deployments.api.protocols import RemoteReplicas, ServingApi
from deployments.serve.coalesce import Coalescer
from deployments.serve.routing import Unrouted
from migration.protocol.errors import PeerLost, Refused
from migration.protocol.ports import Clock, Prospects
from migration.protocol.request import ModelIdentity, RequestSpec
from policies.causes import Cause
from policies.model import ReplicaId, RequestId

RECONNECT_S = 0.05
ROUTER_SKEW_S = 2.0
"""The longest time for which a listed replica may be unknown to this process's router, or out of reach."""
_CALL_S = 5.0
"""Time limit of a call to a replica. Its engine has no part in any of them."""

Answer = TypeVar("Answer")


class Successor(Protocol):
    """Another Mell that takes over the requests of this one, as the host `id` of their readers."""

    id: ReplicaId

    def takes(self, spec: RequestSpec, outputs: int) -> bool:
        """True if a request with that many output tokens may be handed over now."""
        ...

    def awaits(self, request: RequestId) -> bool:
        """True if it has the request, and no token of it has come from there yet."""
        ...

    async def submit(self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], model: str | None) -> str:
        """Have it run a request, whose events come by `Streams.take` and `Streams.lose`. Returns its model.

        `model`: the fingerprint of the only model that may serve the request (None: any).

        Raises:
            Refused: it does not run the request.
            PeerLost: it does not answer.
        """
        ...

    def release(self, request: RequestId, hop: int | None) -> None:
        """See `Hosts.release`."""
        ...

    def forget(self, request: RequestId) -> None:
        """The request has ended."""
        ...


class EngineCalls:
    """Implements `migration.protocol.ports.Hosts`. `down` are the listed replicas whose streams cannot be read.

    Requests go to `successor`, if there is one that takes them; `successors` are all there have been.
    """

    def __init__(self, replicas: RemoteReplicas[ServingApi], placer: Placer, clock: Clock = time.monotonic) -> None:
        self.running: tuple[ReplicaId, ...] = ()
        self.down: set[ReplicaId] = set()
        self.successor: Successor | None = None
        self.successors: dict[ReplicaId, Successor] = {}
        self._change = asyncio.Event()
        self._replicas = replicas
        self._placer = placer
        self._clock = clock
        self._submissions: dict[ReplicaId, Coalescer[Submission, str]] = {}

    @property
    def awake(self) -> Collection[ReplicaId]:
        """See `Hosts.awake`."""
        return self._placer.awake(self.running)

    def reachable(self, replica: ReplicaId) -> bool:
        """See `Hosts.reachable`."""
        return replica not in self.down

    async def changed(self, within_s: float) -> bool:
        """See `Hosts.changed`."""
        change = self._change
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await change.wait()
        return change.is_set()

    def follow(self, running: tuple[ReplicaId, ...]) -> None:
        """The list of replicas is now another one."""
        self.running = running
        self._changed()

    def reached(self, replica: ReplicaId) -> None:
        """A replica's streams can be read."""
        if replica in self.down:
            self.down.discard(replica)
            self._changed()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    @property
    def prospects(self) -> Prospects:
        """See `Hosts.prospects`."""
        return self._placer.prospects

    async def place(self, spec: RequestSpec, outputs: int, exclude: AbstractSet[ReplicaId]) -> ReplicaId | None:
        """See `Hosts.place`."""
        successor = self.successor
        if successor is not None and successor.id not in exclude and successor.takes(spec, outputs):
            return successor.id
        return await self._placer.place(spec, outputs, exclude - self.successors.keys())

    async def submit(
        self, replica: ReplicaId, spec: RequestSpec, hop: int, outputs: tuple[int, ...], model: str | None
    ) -> str:
        """See `Hosts.submit`. Submissions that come while one is under way travel together, without media.

        The replica answers a submission with an adapter once the adapter is loaded, so only others with it wait behind.
        """
        if replica in self.successors:
            return await self.successors[replica].submit(spec, hop, outputs, model)

        async def submit(requests: tuple[Submission, ...]) -> Sequence[Exception | str]:
            return await self._call(replica, lambda engine: engine.submit(requests))

        placed = self._placer.take(spec.id, replica)
        if placed.returns:
            spec = dataclasses.replace(spec, returns_to=replica)
        submission = Submission(spec, hop, outputs, model, placed.fetch, placed.then)
        if replica not in self._submissions:
            self._submissions[replica] = Coalescer(submit, lambda each: each.spec.adapter_id)
        # A message has a largest size and a time limit: a request with media has one of its own.
        submitted = Coalescer(submit) if len(spec.body) > 1 else self._submissions[replica]
        try:
            return await submitted(submission)
        except Refused as error:
            if error.cause is Cause.ASLEEP:
                self._placer.found_asleep(replica)
            raise

    async def tasks(self, replica: ReplicaId) -> tuple[str, ...]:
        """The tasks of a replica's model. Raises PeerLost."""
        return await self._call(replica, lambda engine: engine.tasks())

    async def served(self, replica: ReplicaId) -> ModelIdentity:
        """A replica's model. Raises PeerLost."""
        return await self._call(replica, lambda engine: engine.served())

    async def attach(self, replica: ReplicaId, request: RequestId, hop: int, index: int) -> bool:
        """See `Hosts.attach`. A successor repeats nothing: its connection is whole or broken."""
        if replica in self.successors:
            return False
        return await self._call(replica, lambda engine: engine.attach(request, hop, index))

    async def keep(self, replica: ReplicaId, request: RequestId, hop: int, next_hop: int) -> None:
        """See `Hosts.keep`."""
        await self._call(replica, lambda engine: engine.keep(request, hop, next_hop))

    async def release(self, replica: ReplicaId, request: RequestId, hop: int | None) -> None:
        """See `Hosts.release`. It waits for as long as the replica stands still: nobody waits for it."""
        if replica in self.successors:
            self.successors[replica].release(request, hop)
            return
        await self._replicas.at(replica).release(request, hop)

    async def _call(self, replica: ReplicaId, call: Callable[[ServingApi], Awaitable[Answer]]) -> Answer:
        """Call a replica; one that is listed but not routable yet is tried again. Raises PeerLost."""
        deadline = self._clock() + ROUTER_SKEW_S
        while True:
            try:
                async with asyncio.timeout(_CALL_S):
                    return await call(self._replicas.at(replica))
            except TimeoutError:
                raise PeerLost(f"replica {replica} did not answer within {_CALL_S:g} s") from None
            except Unrouted:
                if replica not in self.running or self._clock() > deadline:
                    raise
                await asyncio.sleep(RECONNECT_S)

    def forget(self, replica: ReplicaId) -> None:
        """The replica is gone for good."""
        self.down.discard(replica)
        self._submissions.pop(replica, None)
        self._replicas.forget(replica)

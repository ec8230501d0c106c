"""Injects faults into a running cluster."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from app.client.errors import ClientError
from benchmarks.chaos.faults import ON_REPLICAS, ON_STREAMS, FaultKind, PlannedFault
from benchmarks.chaos.processes import CONTROLLER, SCHEDULER, send
from benchmarks.chaos.server import Server
from benchmarks.chaos.watch import ClusterWatch

NOTHING = "nothing to fault"
ACCEPTED = "HTTP 202"
_SIGNALS = {
    FaultKind.KILL: (signal.SIGKILL, None),
    FaultKind.STALL: (signal.SIGSTOP, signal.SIGCONT),
    FaultKind.HANG: (signal.SIGSTOP, signal.SIGKILL),
}
Victim = TypeVar("Victim")


@dataclass(slots=True)
class InjectedFault:
    """A fault's injection: its time (of the event loop, in seconds), victim, outcome, and the labels of streams hit.

    `migration` is the id of an accepted move.
    """

    fault: PlannedFault
    began_s: float = 0.0
    victim: str = ""
    hit: tuple[str, ...] = ()
    outcome: str = NOTHING
    migration: str | None = None


OpenStreams = dict[str, "asyncio.Task[None]"]
"""The tasks that read streams, by label."""


class FaultInjector:
    """Injects each fault into a victim that exists at the time; without a victim the outcome is `NOTHING`."""

    def __init__(self, server: Server, watch: ClusterWatch, streams: OpenStreams) -> None:
        self._server = server
        self._watch = watch
        self._streams = streams

    async def inject(self, fault: PlannedFault) -> InjectedFault:
        """Inject a fault; returns after its duration."""
        injected = InjectedFault(fault, asyncio.get_running_loop().time())
        try:
            if fault.kind in ON_REPLICAS:
                await self._on_replica(injected)
            elif fault.kind in ON_STREAMS:
                await self._on_stream(injected)
            else:
                self._on_process(injected)
        except ClientError as error:
            injected.outcome = error.kind
        return injected

    async def _on_replica(self, injected: InjectedFault) -> None:
        replica = _choose(self._watch.running(), injected.fault)
        if replica is None:
            return
        if injected.fault.kind is FaultKind.DRAIN:
            _hit(injected, replica)
            await self._server.drain(injected.victim)
            injected.outcome = ACCEPTED
            return
        first, last = _SIGNALS[injected.fault.kind]
        # The replica may have died since the state was read.
        process = next((p for p in self._watch.seen if p.pid == replica["pids"][0]), None)
        if process is None or not send(process, first):
            return
        _hit(injected, replica)
        injected.outcome = first.name
        if last is not None:
            await asyncio.sleep(injected.fault.lasts_s)
            injected.outcome += f", {last.name}" if send(process, last) else ", gone before"

    def _on_process(self, injected: InjectedFault) -> None:
        title = SCHEDULER if injected.fault.kind is FaultKind.SCHEDULER else CONTROLLER
        found = self._watch.processes.titled(title)
        if found and send(found[-1], signal.SIGKILL):
            injected.victim, injected.outcome = title, signal.SIGKILL.name
            injected.hit = tuple(sorted(self._streams))

    async def _on_stream(self, injected: InjectedFault) -> None:
        label = _choose(sorted(self._streams), injected.fault)
        if label is None:
            return
        injected.victim, injected.hit = label, (label,)
        if injected.fault.kind is FaultKind.LEAVE:
            self._streams[label].cancel()
            injected.outcome = "left"
            return
        injected.migration = await self._server.move(label, injected.fault.path)
        injected.outcome = ACCEPTED


def _choose(victims: Sequence[Victim], fault: PlannedFault) -> Victim | None:
    return victims[int(fault.pick * len(victims))] if victims else None


def _hit(injected: InjectedFault, replica: dict[str, Any]) -> None:
    injected.victim = str(replica["id"])
    injected.hit = tuple(str(request["label"]) for request in replica["requests"])

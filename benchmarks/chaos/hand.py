"""Carries out strikes on a running cluster."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from app.client.errors import ClientError
from benchmarks.chaos.processes import CONTROLLER, SCHEDULER, send
from benchmarks.chaos.server import Server
from benchmarks.chaos.strikes import ON_REPLICAS, ON_STREAMS, Kind, Strike
from benchmarks.chaos.watch import Watch

NOTHING = "nothing to strike"
ACCEPTED = "HTTP 202"
_SIGNALS = {
    Kind.KILL: (signal.SIGKILL, None),
    Kind.STALL: (signal.SIGSTOP, signal.SIGCONT),
    Kind.HANG: (signal.SIGSTOP, signal.SIGKILL),
}
Victim = TypeVar("Victim")


@dataclass(slots=True)
class Blow:
    """A strike that was carried out: when (seconds, event loop time), on whom, which streams it hit, what came of it.

    `migration` is the id of a move that was accepted.
    """

    strike: Strike
    began_s: float = 0.0
    victim: str = ""
    hit: tuple[str, ...] = ()
    outcome: str = NOTHING
    migration: str | None = None


class Streams(dict[str, "asyncio.Task[None]"]):
    """The streams that are being read, by their labels."""


class Hand:
    """Strikes what there is by then. A strike that finds nothing is not carried out, and told so."""

    def __init__(self, server: Server, watch: Watch, streams: Streams) -> None:
        self._server = server
        self._watch = watch
        self._streams = streams

    async def strike(self, strike: Strike) -> Blow:
        """Carry it out, to the end of what it lasts."""
        blow = Blow(strike, asyncio.get_running_loop().time())
        try:
            if strike.kind in ON_REPLICAS:
                await self._on_replica(blow)
            elif strike.kind in ON_STREAMS:
                await self._on_stream(blow)
            else:
                self._on_process(blow)
        except ClientError as error:
            blow.outcome = error.kind
        return blow

    async def _on_replica(self, blow: Blow) -> None:
        replica = _choose(self._watch.running(), blow.strike)
        if replica is None:
            return
        if blow.strike.kind is Kind.DRAIN:
            _hit(blow, replica)
            await self._server.drain(blow.victim)
            blow.outcome = ACCEPTED
            return
        first, last = _SIGNALS[blow.strike.kind]
        # The state may be older than the replica's death.
        process = next((p for p in self._watch.seen if p.pid == replica["pids"][0]), None)
        if process is None or not send(process, first):
            return
        _hit(blow, replica)
        blow.outcome = first.name
        if last is not None:
            await asyncio.sleep(blow.strike.lasts_s)
            blow.outcome += f", {last.name}" if send(process, last) else ", gone before"

    def _on_process(self, blow: Blow) -> None:
        title = SCHEDULER if blow.strike.kind is Kind.SCHEDULER else CONTROLLER
        found = self._watch.processes.titled(title)
        if found and send(found[-1], signal.SIGKILL):
            blow.victim, blow.outcome = title, signal.SIGKILL.name
            blow.hit = tuple(sorted(self._streams))

    async def _on_stream(self, blow: Blow) -> None:
        label = _choose(sorted(self._streams), blow.strike)
        if label is None:
            return
        blow.victim, blow.hit = label, (label,)
        if blow.strike.kind is Kind.LEAVE:
            self._streams[label].cancel()
            blow.outcome = "left"
            return
        blow.migration = await self._server.move(label, blow.strike.path)
        blow.outcome = ACCEPTED


def _choose(victims: Sequence[Victim], strike: Strike) -> Victim | None:
    return victims[int(strike.pick * len(victims))] if victims else None


def _hit(blow: Blow, replica: dict[str, Any]) -> None:
    blow.victim = str(replica["id"])
    blow.hit = tuple(str(request["label"]) for request in replica["requests"])

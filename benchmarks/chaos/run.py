"""One run: offers and strikes at their times, then a look at what is left."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from app.client.errors import ClientError
from benchmarks.chaos.hand import Blow, Hand, Streams
from benchmarks.chaos.heard import Heard, Verdict, judge
from benchmarks.chaos.offers import Offer, draw_prompt, undisturbed
from benchmarks.chaos.server import Server, listen
from benchmarks.chaos.strikes import LOSES, Strike
from benchmarks.chaos.watch import Watch

PATIENCE_S = 90.0
"""How long a stream may go on after the last strike; it waits 30 s for a replica at most, as often as it is lost."""
QUIET_S = 60.0
"""How long what is leased may be held after the last stream; leases are 10 s, a replica takes some to be replaced."""

Progress = Callable[[int, int, int], None]
"""Told of how many streams ended, how many run, and how many strikes were carried out."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A request, and how it went."""

    offer: Offer
    verdict: Verdict
    what: str
    heard: Heard


@dataclass(slots=True)
class Result:
    """All that came of a run."""

    judged: list[Judged] = field(default_factory=list)
    blows: list[Blow] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


class Run:
    """A run on a server that this machine runs."""

    def __init__(self, server: Server, progress: Progress = lambda ended, running, struck: None) -> None:
        self._server = server
        self._progress = progress
        self._watch = Watch(server)
        self._streams = Streams()
        self._heard: list[tuple[Offer, Heard]] = []
        self._result = Result()

    async def run(self, offers: Sequence[Offer], strikes: Sequence[Strike]) -> Result:
        """Everything at its time; returns when nothing runs any more. Raises ClientError if there is no server."""
        await self._watch.look()
        watching = asyncio.create_task(self._watch.keep_looking())
        try:
            started = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._offer_all(offers, started))
                hand = Hand(self._server, self._watch, self._streams)
                for strike in strikes:
                    group.create_task(self._strike(hand, strike, started))
            await self._end_streams()
            await self._offer_one(_probe(offers))
            await self._end_streams()
            await self._learn_outcomes()
        finally:
            watching.cancel()
            for task in self._streams.values():
                task.cancel()
        self._result.leaks = await self._watch.leaks(QUIET_S)
        self._judge_all()
        return self._result

    async def _offer_all(self, offers: Sequence[Offer], started: float) -> None:
        for offer in offers:
            await _until(started + offer.at_s)
            await self._offer_one(offer)

    async def _offer_one(self, offer: Offer) -> None:
        heard = Heard()
        self._heard.append((offer, heard))
        task = asyncio.create_task(listen(self._server, offer, heard))
        self._streams[offer.label] = task
        task.add_done_callback(lambda _: self._ended(offer.label))

    def _ended(self, label: str) -> None:
        del self._streams[label]
        self._progress(len(self._heard) - len(self._streams), len(self._streams), len(self._result.blows))

    async def _strike(self, hand: Hand, strike: Strike, started: float) -> None:
        await _until(started + strike.at_s)
        self._result.blows.append(await hand.strike(strike))
        self._progress(len(self._heard) - len(self._streams), len(self._streams), len(self._result.blows))

    async def _end_streams(self) -> None:
        """Read all streams to their ends; those that have none in time are cut, and judged as what they are."""
        if tasks := list(self._streams.values()):
            _, endless = await asyncio.wait(tasks, timeout=PATIENCE_S)
            cut = [heard for offer, heard in self._heard if self._streams.get(offer.label) in endless]
            for heard in cut:
                heard.broken = f"no end {PATIENCE_S:g} s after the last strike"
            for task in endless:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _learn_outcomes(self) -> None:
        """What became of the moves that were accepted; a scheduler that died since does not know all of them."""
        with contextlib.suppress(ClientError):
            outcomes = {m["id"]: m["outcome"] for m in await self._server.migrations()}
            for blow in self._result.blows:
                if blow.migration is not None:
                    blow.outcome = str(outcomes.get(blow.migration) or "unknown to a new scheduler")

    def _judge_all(self) -> None:
        left = {label for blow in self._result.blows if blow.outcome == "left" for label in blow.hit}
        losses = [blow.began_s for blow in self._result.blows if blow.strike.kind in LOSES and blow.victim]
        for offer, heard in self._heard:
            # Who closes the connection when the last word is there already has not left.
            heard.left = offer.label in left and not heard.done
            lost = any(heard.sent_s <= at_s <= heard.ended_s for at_s in losses)
            verdict, what = judge(heard, offer, undisturbed(offer.prompt, offer.output), lost)
            self._result.judged.append(Judged(offer, verdict, what, heard))


def _probe(offers: Sequence[Offer]) -> Offer:
    """One request more, after all: the cluster must serve again."""
    return replace(offers[-1], label="chaos-probe", prompt=draw_prompt(f"probe/{offers[-1].label}", 100), seeded=False)


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - asyncio.get_running_loop().time()))

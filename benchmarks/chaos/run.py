"""One run: requests and faults at their times, then a search for leaks."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from app.client.errors import ClientError
from benchmarks.chaos.answers import StreamedAnswer, StreamVerdict, judge
from benchmarks.chaos.faults import LOSING, PlannedFault
from benchmarks.chaos.injector import FaultInjector, InjectedFault, OpenStreams
from benchmarks.chaos.offers import Offer, draw_prompt, undisturbed
from benchmarks.chaos.server import Server, read_answer
from benchmarks.chaos.watch import ClusterWatch

PATIENCE_S = 90.0
"""Time limit of streams after the last fault; a stream waits up to 30 s for a replica, after each loss of one."""
QUIET_S = 60.0
"""Time limit for releasing resources after the last stream: leases last 10 s, and a replica's replacement takes longer.
"""

Progress = Callable[[int, int, int], None]
"""Called with the numbers of ended streams, running streams and injected faults."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A request, its answer, and the verdict; `what` is the reason for a bad one."""

    offer: Offer
    verdict: StreamVerdict
    what: str
    answer: StreamedAnswer


@dataclass(slots=True)
class ChaosResult:
    """The result of a run."""

    judged: list[Judged] = field(default_factory=list)
    injected: list[InjectedFault] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


class ChaosRun:
    """A run against a server on this machine."""

    def __init__(self, server: Server, progress: Progress = lambda ended, running, struck: None) -> None:
        self._server = server
        self._progress = progress
        self._watch = ClusterWatch(server)
        self._streams = OpenStreams()
        self._answers: list[tuple[Offer, StreamedAnswer]] = []
        self._result = ChaosResult()

    async def run(self, offers: Sequence[Offer], faults: Sequence[PlannedFault]) -> ChaosResult:
        """Send requests and inject faults at their times; returns after the search for leaks.

        Raises:
            ClientError: there is no server.
        """
        await self._watch.look()
        watching = asyncio.create_task(self._watch.keep_looking())
        try:
            started = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._offer_all(offers, started))
                injector = FaultInjector(self._server, self._watch, self._streams)
                for fault in faults:
                    group.create_task(self._inject(injector, fault, started))
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
        answer = StreamedAnswer()
        self._answers.append((offer, answer))
        task = asyncio.create_task(read_answer(self._server, offer, answer))
        self._streams[offer.label] = task
        task.add_done_callback(lambda _: self._ended(offer.label))

    def _ended(self, label: str) -> None:
        del self._streams[label]
        self._progress(len(self._answers) - len(self._streams), len(self._streams), len(self._result.injected))

    async def _inject(self, injector: FaultInjector, fault: PlannedFault, started: float) -> None:
        await _until(started + fault.at_s)
        self._result.injected.append(await injector.inject(fault))
        self._progress(len(self._answers) - len(self._streams), len(self._streams), len(self._result.injected))

    async def _end_streams(self) -> None:
        """Wait for the ends of all streams; a stream without an end in time is cancelled, and judged as it is."""
        if tasks := list(self._streams.values()):
            _, endless = await asyncio.wait(tasks, timeout=PATIENCE_S)
            cut = [answer for offer, answer in self._answers if self._streams.get(offer.label) in endless]
            for answer in cut:
                answer.broken = f"no end {PATIENCE_S:g} s after the last fault"
            for task in endless:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _learn_outcomes(self) -> None:
        """Set the outcomes of accepted moves; a new scheduler has no records of moves before its start."""
        with contextlib.suppress(ClientError):
            outcomes = {m["id"]: m["outcome"] for m in await self._server.migrations()}
            for fault in self._result.injected:
                if fault.migration is not None:
                    fault.outcome = str(outcomes.get(fault.migration) or "no record at a new scheduler")

    def _judge_all(self) -> None:
        injected = self._result.injected
        left = {label for one in injected if one.outcome == "left" for label in one.hit}
        losses = [one.began_s for one in injected if one.fault.kind in LOSING and one.victim]
        for offer, answer in self._answers:
            # A client that closes its connection after the end of the stream has not left early.
            answer.left = offer.label in left and not answer.done
            lost = any(answer.sent_s <= at_s <= answer.ended_s for at_s in losses)
            verdict, what = judge(answer, offer, undisturbed(offer.prompt, offer.output), lost)
            self._result.judged.append(Judged(offer, verdict, what, answer))


def _probe(offers: Sequence[Offer]) -> Offer:
    """One more request after all others: the cluster must serve again."""
    return replace(offers[-1], label="chaos-probe", prompt=draw_prompt(f"probe/{offers[-1].label}", 100), seeded=False)


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - asyncio.get_running_loop().time()))

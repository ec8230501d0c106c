"""The schedule of a replay: every request at its time, whatever became of the ones before.

Three things run beside each other until the last stream has ended or `stop` is set: the schedule, a look at
the endpoint once a second, and, if asked for, moves. What was measured until then is returned in any case.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from app.client.api import ApiClient
from app.client.documents import StateDocument
from app.replay.client import Model, complete
from app.replay.measured import Measured, Moves
from app.replay.state import Sample, moved_between, sample_replica
from app.replay.stream import Stream
from app.replay.trace import Arrival
from app.replay.watch import Watch

LOOK_EVERY_S = 1.0

Show = Callable[[Sample], None]


class Replay:
    """One replay under way."""

    def __init__(self, api: ApiClient, model: Model, seed: int, watch: Watch, show: Show) -> None:
        self._api = api
        self._model = model
        self._seed = seed
        self._watch = watch
        self._show = show
        self._began = time.perf_counter()
        self._streams: list[Stream] = []
        self._samples: list[Sample] = []
        self._state: StateDocument | None = None

    async def run(self, arrivals: Sequence[Arrival], move_every_s: float, stop: asyncio.Event) -> Measured:
        """Send all arrivals and measure, until all have ended or `stop` is set; the watch has begun."""
        self._began = time.perf_counter()
        beside = [asyncio.create_task(every(LOOK_EVERY_S, self._look))]
        if move_every_s:
            beside.append(asyncio.create_task(every(move_every_s, self._watch.ask_for_move)))
        sending = asyncio.create_task(self._send_all(arrivals))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({sending, stopping, *beside}, return_when=asyncio.FIRST_COMPLETED)
        interrupted, until_s = not sending.done(), self._clock()
        for task in (sending, stopping, *beside):
            await _cancel(task)
        await self._look()
        return await self._measured(until_s, interrupted)

    async def _send_all(self, arrivals: Sequence[Arrival]) -> None:
        async with asyncio.TaskGroup() as streams:
            for arrival in arrivals:
                await asyncio.sleep(max(0.0, arrival.at_s - self._clock()))
                stream = Stream(arrival, self._clock())
                self._streams.append(stream)
                streams.create_task(complete(self._api, self._model, self._seed, stream, self._clock))

    async def _look(self) -> None:
        state = await self._watch.look()
        ended = sum(stream.ended_s is not None for stream in self._streams)
        sample = Sample(
            at_s=self._clock(),
            running=len(self._streams) - ended,
            finished=ended,
            errors=sum(stream.fault is not None for stream in self._streams),
            moved=moved_between(self._state, state) if state and self._state else 0,
            replicas=tuple(map(sample_replica, state.replicas)) if state else None,
        )
        self._state = state or self._state
        self._samples.append(sample)
        self._show(sample)

    async def _measured(self, until_s: float, interrupted: bool) -> Measured:
        return Measured(
            records=tuple(stream.record(until_s) for stream in self._streams),
            samples=tuple(self._samples),
            migrations=await self._watch.migrations(),
            moves=Moves(self._watch.asked, self._watch.accepted, tuple(self._watch.rejected)),
            missing=dict(self._watch.missing),
            missed=tuple(self._watch.missed),
            interrupted=interrupted,
        )

    def _clock(self) -> float:
        return time.perf_counter() - self._began


async def every(period_s: float, action: Callable[[], Awaitable[None]]) -> None:
    """Do something at once and then at every multiple of a period, skipping those it was too slow for."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        await action()
        await asyncio.sleep(period_s - (clock() - began) % period_s)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task

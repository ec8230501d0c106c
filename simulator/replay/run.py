"""The open-loop schedule of a replay: every request is sent at its time, whatever the state of earlier ones.

Three tasks run until the last stream has ended or `stop` is set: the schedule, a poll of the cluster every second and,
with `move_every_s`, orders to move. The measurements so far are returned in either case.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from app.client.api import ApiClient
from app.client.documents import StateDocument
from simulator.replay.client import ServedModel, complete
from simulator.replay.measurements import OrderedMoves, ReplayMeasurements, ReplaySample, moved_between, sample_replica
from simulator.replay.probe import MellProbe
from simulator.replay.stream import AnswerStream
from simulator.replay.trace import TraceRequest

POLL_INTERVAL_S = 1.0

Show = Callable[[ReplaySample], None]


class TraceReplay:
    """A running replay."""

    def __init__(self, api: ApiClient, model: ServedModel, seed: int, probe: MellProbe, show: Show) -> None:
        self._api = api
        self._model = model
        self._seed = seed
        self._probe = probe
        self._show = show
        self._began = time.perf_counter()
        self._streams: list[AnswerStream] = []
        self._samples: list[ReplaySample] = []
        self._state: StateDocument | None = None

    async def run(
        self, requests: Sequence[TraceRequest], move_every_s: float, stop: asyncio.Event
    ) -> ReplayMeasurements:
        """Send all requests and measure, until all have ended or `stop` is set. `probe.begin` must have been called."""
        self._began = time.perf_counter()
        background = [asyncio.create_task(every(POLL_INTERVAL_S, self._sample))]
        if move_every_s:
            background.append(asyncio.create_task(every(move_every_s, self._probe.order_move)))
        sending = asyncio.create_task(self._send_all(requests))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({sending, stopping, *background}, return_when=asyncio.FIRST_COMPLETED)
        interrupted, until_s = not sending.done(), self._clock()
        for task in (sending, stopping, *background):
            await _cancel(task)
        await self._sample()
        return await self._measured(until_s, interrupted)

    async def _send_all(self, requests: Sequence[TraceRequest]) -> None:
        async with asyncio.TaskGroup() as streams:
            for request in requests:
                await asyncio.sleep(max(0.0, request.at_s - self._clock()))
                stream = AnswerStream(request, self._clock())
                self._streams.append(stream)
                streams.create_task(complete(self._api, self._model, self._seed, stream, self._clock))

    async def _sample(self) -> None:
        state = await self._probe.state()
        ended = sum(stream.ended_s is not None for stream in self._streams)
        sample = ReplaySample(
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

    async def _measured(self, until_s: float, interrupted: bool) -> ReplayMeasurements:
        return ReplayMeasurements(
            records=tuple(stream.record(until_s) for stream in self._streams),
            samples=tuple(self._samples),
            migrations=await self._probe.migrations(),
            moves=OrderedMoves(self._probe.asked, self._probe.accepted, tuple(self._probe.rejected)),
            missing=dict(self._probe.missing),
            missed=tuple(self._probe.missed),
            interrupted=interrupted,
        )

    def _clock(self) -> float:
        return time.perf_counter() - self._began


async def every(period_s: float, action: Callable[[], Awaitable[None]]) -> None:
    """Call `action` now and at every multiple of the period; a slow call skips the multiples that it overruns."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        await action()
        await asyncio.sleep(period_s - (clock() - began) % period_s)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task

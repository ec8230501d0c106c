"""Forced moves: any request, to any other replica, by any path, several at a time, over and over.

The unit is a round: streams are opened and moved about until they end, every answer is compared with an undisturbed
run's, and the cluster is looked at once it is quiet.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.client.errors import ClientError, ErrorAnswer
from benchmarks.chaos.heard import Heard, judge_among
from benchmarks.chaos.offers import Offer, draw_prompt, undisturbed
from benchmarks.chaos.server import Server, listen
from benchmarks.chaos.watch import Watch

PATHS = ("kv", "tokens", "auto")
POLL_S = 0.2
MOVE_S = 45.0
"""How long a move may take until its outcome counts as lost; the longest that its source waits for anything is 10 s."""
END_S = 180.0
QUIET_S = 45.0
KEPT = ("id", "path", "outcome", "error", "pause_s", "blocks", "bytes")

Expected = Callable[[Offer], Awaitable[Sequence[str]]]
"""The texts of undisturbed runs of a request, where they may differ; the usual one first."""


async def calculated(offer: Offer) -> Sequence[str]:
    """What is expected of a paced engine."""
    return [undisturbed(offer.prompt, offer.output)]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a round does: so many streams, `at_once` moves at a time; ranges of prompts and answers in tokens."""

    streams: int = 12
    at_once: int = 8
    prompt: tuple[int, int] = (20, 1000)
    output: tuple[int, int] = (300, 600)


@dataclass(slots=True)
class Round:
    """What came of one. `moves` are the records of accepted moves, cut to what figures need; `rejected` the statuses of
    the others. `bad` and `leaks` are empty unless something went wrong.
    """

    number: int
    verdicts: list[str]
    moves: list[dict[str, Any]]
    rejected: dict[str, int]
    bad: list[str]
    leaks: list[str]


def draw_offers(seed: object, number: int, shape: Shape) -> list[Offer]:
    """The requests of a round, all due at once."""
    chance = random.Random(f"round/{seed}/{number}")
    return [
        Offer(
            0.0,
            f"soak-{seed}-{number}-{i}",
            draw_prompt(f"soak/{seed}/{number}/{i}", chance.randint(*shape.prompt)),
            chance.randint(*shape.output),
        )
        for i in range(shape.streams)
    ]


class Forcing:
    """Rounds on one server, whose own policy should leave requests alone. `seed` draws requests and moves."""

    def __init__(self, server: Server, watch: Watch, shape: Shape, seed: object, expected: Expected) -> None:
        self._server = server
        self._watch = watch
        self._shape = shape
        self._seed = seed
        self._expected = expected

    async def round(self, number: int, most: int, progress: Callable[[], None] = lambda: None) -> Round:
        """One round of `most` moves at most; `progress` is called for each."""
        offers = draw_offers(self._seed, number, self._shape)
        heard = [Heard() for _ in offers]
        tasks = [asyncio.create_task(listen(self._server, o, h)) for o, h in zip(offers, heard, strict=True)]
        scene = _Scene(self._server, offers, heard, most, progress)
        chance = random.Random(f"moves/{self._seed}/{number}")
        looking = asyncio.create_task(scene.keep_looking())
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*(scene.keep_moving(chance) for _ in range(self._shape.at_once)), *tasks)
        except TimeoutError:
            scene.bad.append(f"the round did not end within {END_S:g} s")
        finally:
            looking.cancel()
            for task in tasks:
                task.cancel()
        verdicts = await self._judge(offers, heard, scene.bad)
        leaks = await self._watch.leaks(QUIET_S)
        return Round(number, verdicts, scene.moves, scene.rejected, scene.bad, leaks)

    async def _judge(self, offers: Sequence[Offer], heard: Sequence[Heard], bad: list[str]) -> list[str]:
        verdicts = []
        expected = await asyncio.gather(*map(self._expected, offers))
        for offer, answer, texts in zip(offers, heard, expected, strict=True):
            verdict, what = judge_among(answer, offer, texts)
            verdicts.append(str(verdict))
            if what:
                bad.append(f"{offer.label}: {verdict}: {what}")
        return verdicts


class _Scene:
    """One round while it is under way: where its requests are, which of them move, and what became of moves."""

    def __init__(
        self,
        server: Server,
        offers: Sequence[Offer],
        heard: Sequence[Heard],
        most: int,
        progress: Callable[[], None],
    ) -> None:
        self._server = server
        self._offers = {offer.label: (offer, answer) for offer, answer in zip(offers, heard, strict=True)}
        self._left = most
        self._progress = progress
        self._hosts: dict[str, str] = {}
        self._replicas: list[str] = []
        self._moving: set[str] = set()
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.moves: list[dict[str, Any]] = []
        self.rejected: dict[str, int] = {}
        self.bad: list[str] = []

    async def keep_looking(self) -> None:
        """Follow requests and moves until cancelled."""
        while True:
            with contextlib.suppress(ClientError):
                state = await self._server.state()
                running = [r for r in state["replicas"] if r["state"] == "RUNNING"]
                self._replicas = [r["id"] for r in running]
                self._hosts = {q["label"]: r["id"] for r in running for q in r["requests"]}
                if self._waiting:
                    self._tell(await self._server.migrations())
            await asyncio.sleep(POLL_S)

    def _tell(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            waiting = self._waiting.get(record["id"])
            if record["outcome"] and waiting is not None and not waiting.done():
                waiting.set_result(record)

    async def keep_moving(self, chance: random.Random) -> None:
        """Move a request at a time until the last has ended, or there have been moves enough."""
        while self._left > 0 and self._live():
            movable = [label for label in self._live() if label in self._hosts and label not in self._moving]
            if not movable or len(self._replicas) < 2:
                await asyncio.sleep(POLL_S)
                continue
            label = chance.choice(movable)
            target = chance.choice([r for r in self._replicas if r != self._hosts[label]])
            self._moving.add(label)
            self._left -= 1
            try:
                await self._move(label, target, chance.choice(PATHS))
            finally:
                self._moving.discard(label)

    def _live(self) -> list[str]:
        return [label for label, (_, heard) in self._offers.items() if not heard.ended_s]

    async def _move(self, label: str, target: str, path: str) -> None:
        try:
            migration = await self._server.move(label, path, target)
        except ErrorAnswer as error:
            self._left += 1
            self.rejected[str(error.status)] = self.rejected.get(str(error.status), 0) + 1
            await asyncio.sleep(POLL_S)
            return
        waiting = self._waiting[migration] = asyncio.get_running_loop().create_future()
        asked = time.monotonic()
        try:
            async with asyncio.timeout(MOVE_S):
                record = await waiting
        except TimeoutError:
            self.bad.append(f"{label}: migration {migration} has no outcome {time.monotonic() - asked:.0f} s after")
            return
        finally:
            del self._waiting[migration]
        self.moves.append({name: record[name] for name in KEPT} | {"asked": path})
        if record["outcome"] == "committed":
            self._hosts[label] = target
        self._progress()

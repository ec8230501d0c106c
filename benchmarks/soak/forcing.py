"""Forced moves: random requests to random other replicas by random paths, several at a time.

The unit is a round: streams are opened and moved until they end, every answer is compared with an undisturbed run's,
and the idle cluster is searched for leaks.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.client.errors import ClientError, ErrorAnswer
from benchmarks.chaos.answers import StreamedAnswer, judge_among
from benchmarks.chaos.offers import Offer, draw_prompt, undisturbed
from benchmarks.chaos.server import Server, read_answer
from benchmarks.chaos.watch import ClusterWatch

PATHS = ("kv", "tokens", "auto")
POLL_S = 0.2
MOVE_S = 45.0
"""Time limit of a move's outcome; the longest time limit of its source is 10 s."""
END_S = 180.0
QUIET_S = 45.0
KEPT = ("id", "path", "outcome", "error", "pause_s", "blocks", "bytes")

Expected = Callable[[Offer], Awaitable[Sequence[str]]]
"""The possible texts of undisturbed runs of a request, the usual one first; none if any text is right."""


async def calculated(offer: Offer) -> Sequence[str]:
    """The expected text of a paced engine."""
    return [undisturbed(offer.prompt, offer.output)]


async def any_text(offer: Offer) -> Sequence[str]:
    """No expected text: an answer only has to be whole."""
    return []


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The size of a round: its streams, `at_once` moves at a time, and the ranges of prompts and answers in tokens.

    With 0 moves at once, a round only serves its streams.
    """

    streams: int = 12
    at_once: int = 8
    prompt: tuple[int, int] = (20, 1000)
    output: tuple[int, int] = (300, 600)


@dataclass(slots=True)
class ForcedRound:
    """The result of a round.

    `moves` are the records of accepted moves, reduced to the members `KEPT`; `rejected` counts rejected orders by HTTP
    status. `bad` are faults of streams and moves, `leaks` those of the idle cluster.
    """

    number: int
    verdicts: list[str]
    moves: list[dict[str, Any]]
    rejected: dict[str, int]
    bad: list[str]
    leaks: list[str]


def draw_offers(seed: object, number: int, shape: RoundShape) -> list[Offer]:
    """The requests of a round, all due at its start."""
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
    """Runs rounds on one server, whose policy should not move requests. `seed` draws requests and moves."""

    def __init__(
        self, server: Server, watch: ClusterWatch, shape: RoundShape, seed: object, expected: Expected
    ) -> None:
        self._server = server
        self._watch = watch
        self._shape = shape
        self._seed = seed
        self._expected = expected

    async def round(self, number: int, most: int, progress: Callable[[], object] = lambda: None) -> ForcedRound:
        """Run a round of at most `most` moves; `progress` is called after each."""
        offers = draw_offers(self._seed, number, self._shape)
        answers = [StreamedAnswer() for _ in offers]
        tasks = [asyncio.create_task(read_answer(self._server, o, a)) for o, a in zip(offers, answers, strict=True)]
        scene = _Scene(self._server, offers, answers, most, progress)
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
        verdicts = await self._judge(offers, answers, scene.bad)
        leaks = await self._watch.leaks(QUIET_S)
        return ForcedRound(number, verdicts, scene.moves, scene.rejected, scene.bad, leaks)

    async def _judge(self, offers: Sequence[Offer], answers: Sequence[StreamedAnswer], bad: list[str]) -> list[str]:
        verdicts = []
        expected = await asyncio.gather(*map(self._expected, offers))
        for offer, answer, texts in zip(offers, answers, expected, strict=True):
            verdict, what = judge_among(answer, offer, texts)
            verdicts.append(str(verdict))
            if what:
                bad.append(f"{offer.label}: {verdict}: {what}")
        return verdicts


class _Scene:
    """A round in progress: the replicas of its requests, the requests being moved, and the ended moves."""

    def __init__(
        self,
        server: Server,
        offers: Sequence[Offer],
        answers: Sequence[StreamedAnswer],
        most: int,
        progress: Callable[[], object],
    ) -> None:
        self._server = server
        self._offers = {offer.label: (offer, answer) for offer, answer in zip(offers, answers, strict=True)}
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
        """Poll requests and moves until cancelled."""
        while True:
            with contextlib.suppress(ClientError):
                state = await self._server.state()
                running = [r for r in state["replicas"] if r["state"] == "RUNNING"]
                self._replicas = [r["id"] for r in running]
                self._hosts = {q["label"]: r["id"] for r in running for q in r["requests"]}
                if self._waiting:
                    self._settle(await self._server.migrations())
            await asyncio.sleep(POLL_S)

    def _settle(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            waiting = self._waiting.get(record["id"])
            if record["outcome"] and waiting is not None and not waiting.done():
                waiting.set_result(record)

    async def keep_moving(self, chance: random.Random) -> None:
        """Move one request at a time until the last one has ended, or all moves have been made."""
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
        return [label for label, (_, answer) in self._offers.items() if not answer.ended_s]

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

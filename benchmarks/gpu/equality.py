"""Steps that compare the texts of moved streams with those of unmoved ones, with controls.

A text can depend on the other requests of the batch, and on whether KV came from the prefix cache. So runs of the same
prompts are compared in pairs that differ in one thing only: all streams of a run start at once, and the runs are

    fresh          the prompts are in no cache
    cached         the same prompts again
    again          and again: its texts against those of `cached` are the control of all moves
    moved          every stream moves once, to a replica that never had the prompt
    moved again    the same moves; now the target has the prompt in its cache, too

Every path has prompts of its own, since a move leaves KV at the target. vLLM's own server gives two more controls:
`alone`, one stream at a time, and `resent`, the second half of the answers when their first half is part of the prompt,
which is all that a move by tokens does.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from app.client.errors import ClientError
from benchmarks.chaos.answers import StreamedAnswer
from benchmarks.chaos.offers import Offer, draw_prompt
from benchmarks.chaos.server import connect, read_answer
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.record import EqualityRow
from benchmarks.instruments.admin import Admin
from benchmarks.servers import MODEL

POLL_S = 0.002
Sampled = Literal["greedy", "seeded"]
Tokens = tuple[int, ...]
Answers = Sequence[StreamedAnswer]


@dataclass(slots=True)
class TimedAnswer(StreamedAnswer):
    """A streamed answer with the times of its chunks, in seconds of the event loop."""

    arrivals: list[float] = field(default_factory=list)

    def take(self, event: object) -> None:
        """See `StreamedAnswer.take`."""
        # Not by `super()` without arguments: a dataclass with slots is another class than the one written here.
        StreamedAnswer.take(self, event)  # type: ignore[arg-type]
        self.arrivals.append(asyncio.get_running_loop().time())

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two chunks."""
        return max((b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0)


def is_whole(answer: StreamedAnswer, offer: Offer) -> bool:
    """True if the answer ended with its last token."""
    return answer.done and answer.finish == "length" and answer.tokens == offer.output


def count_equal(first: Sequence[StreamedAnswer], second: Sequence[StreamedAnswer]) -> int:
    """The number of answers with equal texts that ended without an error in both runs."""
    pairs = zip(first, second, strict=True)
    return sum(a.done and b.done and not a.error and not b.error and a.text == b.text for a, b in pairs)


def draw_offers(name: str, streams: int, prompt: int, output: int, seeded: bool) -> list[Offer]:
    """Requests with prompts of 10 to `prompt` tokens."""
    chance = random.Random(name)
    return [
        Offer(0.0, f"{name}/{i}", draw_prompt(f"{name}/{i}", chance.randint(10, prompt)), output, seeded)
        for i in range(streams)
    ]


async def read_all(port: int, offers: Sequence[Offer], run: str) -> list[TimedAnswer]:
    """Open all streams at once, and read them to their ends. `run` makes their labels unique."""
    answers = [TimedAnswer() for _ in offers]
    async with connect(f"http://127.0.0.1:{port}") as server:
        await asyncio.gather(*(read_answer(server, relabel(o, run), a) for o, a in zip(offers, answers, strict=True)))
    return answers


def relabel(offer: Offer, run: str) -> Offer:
    """The same request under another label."""
    return Offer(offer.at_s, f"{offer.label}/{run}", offer.prompt, offer.output, offer.seeded)


async def read_moved(port: int, offers: Sequence[Offer], run: str, path: str) -> tuple[list[TimedAnswer], list[bool]]:
    """Move every stream once, within the first 60 % of its tokens. The answers, and True for each move by `path`."""
    answers = [TimedAnswer() for _ in offers]
    asked = [relabel(offer, run) for offer in offers]
    chance = random.Random(run)
    places = [chance.randint(3, max(4, offer.output * 6 // 10)) for offer in offers]
    async with connect(f"http://127.0.0.1:{port}") as server, Admin(port) as admin:

        async def move(offer: Offer, answer: TimedAnswer, place: int) -> bool:
            while answer.chunks < place:
                if answer.ended_s:
                    return False
                await asyncio.sleep(POLL_S)
            with contextlib.suppress(ClientError, TimeoutError):
                record = await admin.record(await admin.move(offer.label, path))
                return bool(record["outcome"] == "committed" and record["path"] == path)
            return False

        streams = zip(asked, answers, places, strict=True)
        moves = [asyncio.create_task(move(*stream)) for stream in streams]
        await asyncio.gather(*(read_answer(server, o, a) for o, a in zip(asked, answers, strict=True)))
        return answers, list(await asyncio.gather(*moves))


@dataclass(frozen=True, slots=True)
class CompareMoved:
    """Compare moved with unmoved texts, in rounds with new prompts: one for each path and kind of sampling."""

    streams: int = 16
    prompt: int = 400
    output: int = 400
    rounds: int = 1
    kinds: Sequence[tuple[str, Sampled]] = (("kv", "greedy"), ("tokens", "greedy"), ("kv", "seeded"))
    weight: float = 2.0

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        for turn in bench.time.turns(self.rounds):
            for path, sampling in self.kinds:
                await self._round(bench, path, sampling, f"{bench.part}/{turn}/{path}/{sampling}")

    async def _round(self, bench: Bench, path: str, sampling: Sampled, name: str) -> None:
        offers = draw_offers(name, self.streams, self.prompt, self.output, sampling == "seeded")
        unmoved = {run: await read_all(bench.mell_port, offers, run) for run in ("fresh", "cached", "again")}
        moved, moves = await read_moved(bench.mell_port, offers, "moved", path)
        repeated, more = await read_moved(bench.mell_port, offers, "moved-again", path)

        def compare(first: str, second: str, one: Answers, other: Answers, moves: list[bool] | None = None) -> None:
            where = (bench.conditions, sampling, f"Mell, {bench.transport}")
            moved = None if moves is None else sum(moves)
            bench.record.add(EqualityRow(*where, first, second, len(offers), count_equal(one, other), moved))

        compare("fresh", "cached", unmoved["fresh"], unmoved["cached"])
        compare("cached", "again", unmoved["cached"], unmoved["again"])
        compare("cached", f"moved by {path}", unmoved["cached"], moved, moves)
        compare("cached", f"moved again by {path}", unmoved["cached"], repeated, more)
        texts = {run: [a.text for a in answers] for run, answers in unmoved.items()}
        bench.keep("texts", {"name": name, **texts, "moved": [a.text for a in moved]})
        wrong = [a.error or a.broken for a in (*moved, *repeated) if a.error or a.broken]
        if wrong:
            raise RuntimeError(f"{len(wrong)} moved streams broke, such as: {wrong[0]}")


@dataclass(frozen=True, slots=True)
class CompareStock:
    """Compare the tokens of vLLM's own server with its own, in rounds with new prompts."""

    streams: int = 16
    prompt: int = 400
    output: int = 400
    rounds: int = 1
    alone: int = 4
    weight: float = 1.0

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        for turn in bench.time.turns(self.rounds):
            offers = draw_offers(f"{bench.part}/{turn}/stock", self.streams, self.prompt, self.output, seeded=False)
            runs = {run: await self._tokens(bench, offers) for run in ("fresh", "cached", "again")}
            few = offers[: self.alone]
            alone = [(await self._tokens(bench, [offer]))[0] for offer in few]
            half = self.output // 2
            begun = [
                Offer(0.0, o.label, (*o.prompt, *tokens[:half]), o.output - half)
                for o, tokens in zip(offers, runs["cached"], strict=True)
            ]
            resent = await self._tokens(bench, begun)
            for first, second, one, other in (
                ("fresh", "cached", runs["fresh"], runs["cached"]),
                ("cached", "again", runs["cached"], runs["again"]),
                ("cached", "alone", runs["cached"][: len(few)], alone),
                ("cached", "resent", [tokens[half:] for tokens in runs["cached"]], resent),
            ):
                equal = sum(a == b for a, b in zip(one, other, strict=True))
                row = EqualityRow(bench.conditions, "greedy", "vLLM's own", first, second, len(one), equal)
                bench.record.add(row)

    async def _tokens(self, bench: Bench, offers: Sequence[Offer]) -> list[Tokens]:
        """The output tokens of each request, all at once. Raises ClientError."""
        wanted = {"stream": False, "stream_options": None, "return_token_ids": True}
        async with connect(f"http://127.0.0.1:{bench.bare_port}") as server:
            answers = await asyncio.gather(*(server.complete(offer.body(MODEL) | wanted) for offer in offers))
        return [tuple(answer["choices"][0]["token_ids"]) for answer in answers]

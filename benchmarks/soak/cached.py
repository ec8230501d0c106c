"""Soak of prefix caches: every answer is compared with the one that is computed without a cache.

    python -m benchmarks.soak.cached --out FILE [--requests 10000] [--minutes M] [--seed 0]

Two real engines on the CPU have small KV caches and small tiers of host memory. Prompts begin with one of a few common
prefixes, which change slowly, so blocks are evicted, loaded from host memory and computed again all the time. Some
requests move while they run, some go on with their answer as the second turn of a conversation, and prefixes are copied
from one replica to the other and deleted. Requests sample greedily, with a seed or under penalties, have a grammar or
the schema of a tool's call, or ask for logprobs.

Each request is sent once more with a cache salt that no other has, so nothing of it is cached. Both answers must have
the same tokens, and log-probabilities within `CLOSE`. Rounding depends on the other requests of a batch, so two answers
that are computed may differ, too: an answer that differs is right if one of `TRIES` further ones is equal
(`rounding`), or if the two tokens where it begins to differ are equally likely up to rounding (`tie`).

Every round is a line of the file, and another run with the same file continues it. With `--minutes`, no round begins
after that time. Exit status: 0 if all answers so far were right, 1 if not.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.client.api import ApiClient
from app.client.errors import ClientError, ErrorAnswer
from app.client.sse import Event
from benchmarks.chaos.offers import draw_prompt
from benchmarks.chaos.watch import ClusterWatch
from benchmarks.servers import MODEL, Rig, mell
from benchmarks.soak.report import Line, read_lines, rounds_of
from benchmarks.soak.stock import TIE

PORT = 8109
SETTINGS: Mapping[str, Any] = {
    "engine_kwargs": {"num_gpu_blocks_override": 72, "max_model_len": 1024},
    "cache": {"dram_gib": 0.02, "audit_s": 5.0},
    "ingress": {"frontend_kwargs": {"enable_prompt_tokens_details": True}},
}
"""The application's settings: 72 blocks of 32 tokens per replica, which a dozen of the prompts fill."""
CLOSE = 1e-3
"""The greatest difference of two log-probabilities of a token that rounding explains."""
TRIES = 4
QUIET_S = 45.0
COPY_EVERY_S = 0.7
ANSWER_S = 120.0

CALL: Mapping[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["move"]}, "why": {"type": "string", "minLength": 400}},
    "required": ["name", "why"],
}
"""A call of a tool, as vLLM demands it of an answer."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "grammar": {"temperature": 0, "structured_outputs": {"regex": "(ab|cd|ef){300}"}},
    "call": {"temperature": 0, "structured_outputs": {"json": {"type": "array", "minItems": 1, "items": CALL}}},
    "logprobs": {"temperature": 0, "logprobs": 3},
}


class CachedVerdict(StrEnum):
    """The verdict on an answer."""

    SAME = "same"
    TIE = "tie"
    ROUNDING = "rounding"
    DIFFERENT = "different"


RIGHT = frozenset({CachedVerdict.SAME, CachedVerdict.TIE, CachedVerdict.ROUNDING})


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """A request of a kind for `output` tokens. It moves behind `move_at` of them by `path`, unless that is None."""

    label: str
    kind: str
    prompt: tuple[int, ...]
    output: int
    move_at: int = 0
    path: str | None = None

    def body(self, model: str, salt: str | None, **more: Any) -> dict[str, Any]:
        """The request in OpenAI's API."""
        fixed = {"model": model, "prompt": list(self.prompt), "max_tokens": self.output, "ignore_eos": True}
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        return {**fixed, **streamed, **KINDS[self.kind], **({"cache_salt": salt} if salt else {}), **more}


@dataclass(slots=True)
class CachedAnswer:
    """An answer so far: its tokens, their log-probabilities if they were requested, and the cached prompt tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Mapping[str, float]] = field(default_factory=list)
    cached: int = 0

    def take(self, event: Event) -> None:
        """Add an event. Raises ValueError for an error event."""
        if "error" in event:
            raise ValueError(f"{event['error']}")
        for choice in event["choices"]:
            self.tokens += choice["token_ids"]
            if scores := choice.get("logprobs"):
                self.logprobs += scores["token_logprobs"]
                self.tops += scores["top_logprobs"]
        if usage := event.get("usage"):
            self.cached = (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]


Compute = Callable[[Mapping[str, Any]], Awaitable[CachedAnswer]]
"""The answer to a request that is computed once more without a cache, with these further members."""


@dataclass(frozen=True, slots=True)
class CachedShape:
    """A round: `requests` first turns, `at_once` at a time, of `families` prefixes of these lengths in tokens.

    A share `moving` of the requests moves, and a share `turning` has a second turn.
    """

    requests: int = 40
    at_once: int = 8
    families: int = 12
    prefix: tuple[int, int] = (64, 320)
    message: tuple[int, int] = (1, 60)
    output: tuple[int, int] = (12, 40)
    moving: float = 0.3
    turning: float = 0.3


def draw_requests(seed: object, number: int, shape: CachedShape) -> list[CachedRequest]:
    """The first turns of a round. Every other round, the oldest prefix gives way to a new one."""
    chance, found = random.Random(f"cached/{seed}/{number}"), []
    for place in range(shape.requests):
        prefix, message = common_prefix(seed, number, chance.randrange(shape.families), shape), chance.randrange(4)
        tail = draw_prompt(f"message/{seed}/{message}", shape.message[1])[: chance.randint(*shape.message)]
        output, moves = chance.randint(*shape.output), chance.random() < shape.moving
        found.append(
            CachedRequest(
                f"cached-{seed}-{number}-{place}",
                list(KINDS)[place % len(KINDS)],
                (*prefix, *tail),
                output,
                chance.randint(1, max(1, output // 2)),
                chance.choice(("kv", "tokens", "auto")) if moves else None,
            )
        )
    return found


def common_prefix(seed: object, number: int, family: int, shape: CachedShape) -> tuple[int, ...]:
    """The prefix of a family in a round."""
    name = f"{seed}/family/{number // 2 + family}"
    return draw_prompt(name, random.Random(name).randint(*shape.prefix))


async def compare_cached(
    client: ApiClient, bare: ApiClient, request: CachedRequest, model: str, orders: list[str]
) -> tuple[CachedAnswer, CachedVerdict, str]:
    """Send a request to one server, and to a `bare` one without a cache; the answer, its verdict, and the reason.

    Raises ValueError for an answer that should have been computed and was not, and what the servers answer instead.
    """
    salts = itertools.count()

    async def compute(more: Mapping[str, Any]) -> CachedAnswer:
        salt = f"{request.label}-{time.time_ns()}-{next(salts)}"
        return await ask_cached(bare, request, model, salt, more)

    answer = await ask_cached(client, request, model, orders=orders)
    computed = await compute({})
    if computed.cached:
        raise ValueError(f"{computed.cached} tokens are cached under a salt of its own")
    return answer, *await judge_cached(request, answer, computed, compute)


async def judge_cached(
    request: CachedRequest, answer: CachedAnswer, computed: CachedAnswer, compute: Compute
) -> tuple[CachedVerdict, str]:
    """The verdict on an answer beside a computed one, and the reason for a bad one."""
    if len(answer.tokens) != request.output:
        return CachedVerdict.DIFFERENT, f"{len(answer.tokens)} of {request.output} tokens"
    if answer.tokens == computed.tokens:
        worst = max((abs(a - b) for a, b in zip(answer.logprobs, computed.logprobs, strict=True)), default=0.0)
        return (CachedVerdict.SAME, "") if worst <= CLOSE else (CachedVerdict.DIFFERENT, f"logprobs differ by {worst}")
    place = next(i for i, (a, b) in enumerate(zip(answer.tokens, computed.tokens, strict=True)) if a != b)
    if request.kind in ("greedy", "grammar", "call", "logprobs"):
        again = await compute({"logprobs": 20, "return_tokens_as_token_ids": True})
        if again.tokens[:place] == answer.tokens[:place]:
            one, other = (again.tops[place].get(f"token_id:{each.tokens[place]}") for each in (answer, computed))
            if one is not None and other is not None and abs(one - other) < TIE:
                return CachedVerdict.TIE, ""
    for _ in range(TRIES):
        if (await compute({})).tokens == answer.tokens:
            return CachedVerdict.ROUNDING, ""
    return CachedVerdict.DIFFERENT, f"token {place} of {request.output}, {answer.cached} prompt tokens cached"


@dataclass(slots=True)
class CachedRound:
    """The result of a round, as counts; `bad` are wrong answers and leaks.

    `tokens` are those of prompts: all of the compared requests, and those that were cached.
    """

    number: int
    requests: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def to_json(self) -> Line:
        """A line of the file."""
        counts = {"requests": self.requests, "verdicts": self.verdicts, "tokens": self.tokens}
        return {"number": self.number, **counts, "moves": self.moves, "copies": self.copies, "bad": self.bad}


class CachedSoak:
    """Runs rounds on one server. `seed` draws requests, moves and copies."""

    def __init__(self, client: ApiClient, model: str, shape: CachedShape, seed: object) -> None:
        self._client = client
        self._model = model
        self._shape = shape
        self._seed = seed

    async def round(self, number: int) -> CachedRound:
        """Run a round, to the end of its requests."""
        done, chance = CachedRound(number), random.Random(f"turns/{self._seed}/{number}")
        waiting = draw_requests(self._seed, number, self._shape)[::-1]
        turning = {request.label for request in waiting if chance.random() < self._shape.turning}
        orders: list[str] = []

        async def work() -> None:
            while waiting:
                request = waiting.pop()
                answer = await self._compare(request, orders, done)
                if request.label in turning and answer is not None:
                    await self._compare(second_turn(request, answer, self._seed), orders, done)

        copying = asyncio.create_task(self._keep_copying(number, done))
        try:
            await asyncio.gather(*(work() for _ in range(self._shape.at_once)))
        finally:
            copying.cancel()
            await asyncio.wait([copying])
        records = {record["id"]: record for record in await self._client.migrations()}
        for order in orders:
            record = records.get(order, {})
            done.moves[f"{record.get('path')} {record.get('outcome')}"] += 1
        return done

    async def _compare(self, request: CachedRequest, orders: list[str], done: CachedRound) -> CachedAnswer | None:
        """Send a request, and again without a cache; the answer, None if there is none."""
        try:
            answer, verdict, why = await compare_cached(self._client, self._client, request, self._model, orders)
        except (ClientError, ValueError, LookupError, TimeoutError) as error:
            done.bad.append(f"{request.label}: {error!r}")
            return None
        done.requests[request.kind] += 1
        done.verdicts[str(verdict)] += 1
        done.tokens.update(prompt=len(request.prompt), cached=answer.cached)
        if verdict not in RIGHT:
            done.bad.append(f"{request.label}, {request.kind}: {why}")
        return answer

    async def _keep_copying(self, number: int, done: CachedRound) -> None:
        """Copy common prefixes between replicas, and delete some where they were, until cancelled."""
        chance = random.Random(f"copies/{self._seed}/{number}")
        while True:
            await asyncio.sleep(COPY_EVERY_S)
            family = chance.randrange(self._shape.families)
            prompt = {"prompt": list(common_prefix(self._seed, number, family, self._shape))}
            deletes = chance.random() < 0.5
            try:
                replicas = (await self._client.match(prompt))["replicas"]
                donor, target = sorted(replicas, key=lambda replica: -sum(replica["tokens"].values()))[:2]
                if not sum(donor["tokens"].values()):
                    continue
                # The donor's blocks are in the memory of its host alone, if it has none in its own.
                where = "own memory" if donor["tokens"]["hbm"] else "host"
                record = await self._client.copy(prompt | {"from": donor["id"], "to": target["id"]})
                done.copies[f"{record['outcome']} from {where}"] += 1
                if deletes:
                    await self._client.drop(prompt | {"replica": donor["id"]})
            except ErrorAnswer as error:
                done.copies[f"rejected {error.status}: {error.message}"] += 1
            except ClientError as error:
                done.bad.append(f"copy of family {family}: {error!r}")


async def ask_cached(
    client: ApiClient,
    request: CachedRequest,
    model: str,
    salt: str | None = None,
    more: Mapping[str, Any] = {},
    orders: list[str] | None = None,
) -> CachedAnswer:
    """An answer. With `orders`, its request may move, and the order's id is added to them."""
    answer, moves = CachedAnswer(), request.path is not None and orders is not None
    label = request.label if orders is not None else ""
    async with (
        asyncio.timeout(ANSWER_S),
        client.stream(request.body(model, salt, **more), label) as events,
    ):
        async for event in events:
            answer.take(event)
            if moves and len(answer.tokens) >= request.move_at and orders is not None:
                moves = False
                with contextlib.suppress(ErrorAnswer):  # The request may have ended by now.
                    orders.append(await client.move(label, request.path or "auto"))
    return answer


def second_turn(request: CachedRequest, answer: CachedAnswer, seed: object) -> CachedRequest:
    """The next request of a conversation; it does not move."""
    message = draw_prompt(f"second/{seed}/{request.label}", 20)
    prompt = (*request.prompt, *answer.tokens, *message)
    return CachedRequest(f"{request.label}-second", request.kind, prompt, request.output)


def count_requests(lines: Sequence[Line]) -> int:
    """The number of compared requests."""
    return sum(sum(line["requests"].values()) for line in rounds_of(lines))


def render_cached(lines: Sequence[Line]) -> Iterator[str]:
    """All rounds as text."""
    rounds = rounds_of(lines)
    sums = {name: Counter[str]() for name in ("requests", "verdicts", "tokens", "moves", "copies")}
    for line in rounds:
        for name, counts in sums.items():
            counts.update(line[name])
    yield f"{count_requests(lines)} requests in {len(rounds)} rounds"
    for name, counts in sums.items():
        yield f"  {name:9}" + (", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none")
    yield from (f"BAD: round {line['number']}: {what}" for line in rounds for what in line["bad"])


def main() -> int:
    """Parse the options, continue the rounds, print all of them; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.cached",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="file of rounds, as JSON lines")
    parser.add_argument("--requests", type=int, default=10_000, help="requests in total, including those in the file")
    parser.add_argument("--minutes", type=float, help="begin no round after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = read_lines(options.out) or [{"setting": {"seed": options.seed}}]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if count_requests(lines) < options.requests:
        ends_at = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        with mell(PORT, 2, Rig(), **SETTINGS):
            asyncio.run(_soak(options.out, lines, options.requests, ends_at))
    print("\n".join(render_cached(lines)))
    return 1 if any(line["bad"] for line in rounds_of(lines)) else 0


async def _soak(out: Path, lines: list[Line], goal: int, ends_at: float | None) -> None:
    """Run rounds until there are `goal` requests, the time is over, or a round had a fault."""
    async with ApiClient(f"http://127.0.0.1:{PORT}", timeout_s=60.0) as client:
        watch = ClusterWatch(client)
        await watch.look()
        soak = CachedSoak(client, MODEL, CachedShape(), lines[0]["setting"]["seed"])
        with tqdm(total=goal, initial=count_requests(lines), unit="request", desc="soak") as bar:
            while count_requests(lines) < goal and (ends_at is None or time.monotonic() < ends_at):
                done = await soak.round(len(lines))
                done.bad += await watch.leaks(QUIET_S)
                lines.append(done.to_json())
                with out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                bar.update(count_requests(lines) - bar.n)
                if done.bad:
                    return


if __name__ == "__main__":
    sys.exit(main())

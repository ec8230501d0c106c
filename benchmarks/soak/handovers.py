"""Soak of hand-overs from prefill to decoding, with every setting of `disaggregation.caching`.

    python -m benchmarks.soak.handovers --out FILE [--count 5000] [--minutes M] [--seed 0]
    python -m benchmarks.soak.handovers --noise [--seed 0]

Two real engines on the CPU have small KV caches, one for prefills and the other for decoding. Conversations of some
turns are handed over in each turn; some requests then move on, by KV or by tokens, while others are handed over.
Requests sample greedily, with a seed or under penalties, have a grammar or the schema of a tool's call, or ask for
logprobs. Each setting gets its part of the count, on an application of its own.

Each answer is compared with that of stock vLLM's server, which moves nothing and, under a salt that no other request
has, finds nothing in its cache; they are judged as those of `benchmarks.soak.cached`. With `caching: none`, no prompt
may have cached tokens.

Every round is a line of the file, and another run with the same file continues it. With `--minutes`, no round begins
after that time. Exit status: 0 if all rounds so far were without a fault, 1 if not.

`--noise` checks the check: one round with noise in all blocks that are handed over. Exit status: 0 if answers differ.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.client.api import ApiClient
from app.client.errors import ClientError
from benchmarks.chaos.offers import draw_prompt
from benchmarks.chaos.watch import ClusterWatch
from benchmarks.servers import MODEL, Rig, bare_vllm, mell
from benchmarks.soak.cached import (
    KINDS,
    QUIET_S,
    RIGHT,
    CachedAnswer,
    CachedRequest,
    compare_cached,
)
from benchmarks.soak.report import Line, read_lines, rounds_of
from deployments.config import Caching
from policies.plan import Reason

BARE_PORT, MELL_PORT = 8111, 8110
DETAILS: Mapping[str, Any] = {"enable_prompt_tokens_details": True}
SETTINGS: Mapping[str, Any] = {
    "engine_kwargs": {"num_gpu_blocks_override": 192, "max_model_len": 1024, "max_num_batched_tokens": 128},
    "ingress": {"frontend_kwargs": dict(DETAILS)},
    "scheduler": {"policy": "best_fit", "mode": "act", "epoch_s": 0.5},
}
"""The application's settings: a prefill takes some steps of 128 tokens, and 20 of the conversations fill a replica."""


@dataclass(frozen=True, slots=True)
class HandoverShape:
    """A round: conversations of `turns` turns each, `at_once` at a time, with these lengths in tokens.

    A turn follows `think_s` seconds behind the answer before it, which may have returned by then. A share `moving` of
    the requests moves on behind its hand-over.
    """

    conversations: int = 16
    turns: int = 3
    at_once: int = 6
    prompt: tuple[int, int] = (40, 600)
    message: tuple[int, int] = (5, 60)
    output: tuple[int, int] = (40, 100)
    moving: float = 0.4
    think_s: float = 0.3


def draw_turn(
    seed: object, number: int, place: int, turn: int, context: Sequence[int], shape: HandoverShape
) -> CachedRequest:
    """A turn of the conversation at `place` of a round, whose tokens so far are `context`."""
    name = f"handover-{seed}-{number}-{place}-{turn}"
    chance = random.Random(name)
    message = draw_prompt(name, chance.randint(*(shape.message if turn else shape.prompt)))
    output = chance.randint(*shape.output)
    path = chance.choice(("kv", "tokens", "auto")) if chance.random() < shape.moving else None
    kind = list(KINDS)[(place + turn) % len(KINDS)]
    return CachedRequest(name, kind, (*context, *message), output, chance.randint(2, output // 2), path)


@dataclass(slots=True)
class HandoverRound:
    """The result of a round, as counts; `bad` are wrong answers and leaks.

    `tokens` are those of prompts: all, and those that their replica had. `handovers` and `moves` are counted by path,
    outcome and cause.
    """

    number: int
    caching: Caching
    kinds: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    handovers: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def to_json(self) -> Line:
        """A line of the file."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return {"number": self.number, "caching": str(self.caching), **counts, "bad": self.bad}


COUNTS = ("kinds", "verdicts", "tokens", "handovers", "moves")
"""The members of a round that are counts."""


class HandoverSoak:
    """Runs rounds on one server with this setting, beside one that moves and caches nothing. `seed` draws requests."""

    def __init__(
        self, client: ApiClient, bare: ApiClient, caching: Caching, shape: HandoverShape, seed: object
    ) -> None:
        self._client = client
        self._bare = bare
        self._caching = caching
        self._shape = shape
        self._seed = seed

    async def round(self, number: int) -> HandoverRound:
        """Run a round, to the end of its requests."""
        done, waiting = HandoverRound(number, self._caching), list(range(self._shape.conversations))[::-1]

        async def work() -> None:
            while waiting:
                await self._converse(number, waiting.pop(), done)

        await asyncio.gather(*(work() for _ in range(self._shape.at_once)))
        for record in await self._client.migrations():
            if record["label"].startswith(f"handover-{self._seed}-{number}-"):
                counts = done.handovers if record["trigger"] == Reason.DISAGGREGATE else done.moves
                cause = f" {record['cause']}" if record["cause"] else ""
                counts[f"{record['path']} {record['outcome']}{cause}"] += 1
        return done

    async def _converse(self, number: int, place: int, done: HandoverRound) -> None:
        context: tuple[int, ...] = ()
        for turn in range(self._shape.turns):
            request = draw_turn(self._seed, number, place, turn, context, self._shape)
            answer = await self._compare(request, done)
            if answer is None:
                return
            context = (*request.prompt, *answer.tokens)
            await asyncio.sleep(self._shape.think_s)

    async def _compare(self, request: CachedRequest, done: HandoverRound) -> CachedAnswer | None:
        """Send a request to both servers; the answer, None if there is none."""
        try:
            answer, verdict, why = await compare_cached(self._client, self._bare, request, MODEL, [])
        except (ClientError, ValueError, LookupError, TimeoutError) as error:
            done.bad.append(f"{request.label}: {error!r}")
            return None
        done.kinds[request.kind] += 1
        done.verdicts[str(verdict)] += 1
        done.tokens.update(prompt=len(request.prompt), cached=answer.cached)
        if verdict not in RIGHT:
            done.bad.append(f"{request.label}, {request.kind}: {why}")
        if answer.cached and self._caching is Caching.NONE:
            done.bad.append(f"{request.label}: {answer.cached} prompt tokens are cached")
        return answer


def count_handovers(lines: Sequence[Line], caching: Caching | None = None) -> int:
    """The number of hand-overs by KV in the file, with that setting or any."""
    rounds = (line for line in rounds_of(lines) if caching in (None, line["caching"]))
    return sum(line["handovers"].get("kv committed", 0) for line in rounds)


def render_handovers(lines: Sequence[Line]) -> Iterator[str]:
    """All rounds as text, setting by setting."""
    rounds = rounds_of(lines)
    yield f"{count_handovers(lines)} hand-overs by KV in {len(rounds)} rounds"
    for caching in Caching:
        found = [line for line in rounds if line["caching"] == caching]
        yield f"{caching}: {count_handovers(lines, caching)} in {len(found)} rounds"
        for name in COUNTS:
            counts = sum((Counter(line[name]) for line in found), Counter[str]())
            yield f"  {name:10}" + (", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none")
    yield from (f"BAD: round {line['number']}, {line['caching']}: {what}" for line in rounds for what in line["bad"])


def main() -> int:
    """Parse the options, continue the rounds, print all of them; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak.handovers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="file of rounds, as JSON lines")
    parser.add_argument("--noise", action="store_true", help="check the check, without a file")
    parser.add_argument("--count", type=int, default=5000, help="hand-overs in total, including those in the file")
    parser.add_argument("--minutes", type=float, help="begin no round after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.noise == (options.out is not None):
        parser.error("write either --out FILE or --noise")
    if options.noise:
        return _check_noise(options.seed)
    lines = read_lines(options.out) or [{"setting": {"seed": options.seed}}]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = {caching: options.count * (at + 1) // 4 - options.count * at // 4 for at, caching in enumerate(Caching)}
    left = [caching for caching, part in parts.items() if count_handovers(lines, caching) < part]
    ends_at = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    if left and not _is_bad(lines):
        with bare_vllm(BARE_PORT, Rig(extra=dict(DETAILS))):
            for caching in left:
                with mell(MELL_PORT, 2, Rig(), **_settings(caching)):
                    asyncio.run(_soak(options.out, lines, caching, parts[caching], ends_at))
                if _is_bad(lines) or (ends_at is not None and time.monotonic() > ends_at):
                    break
    print("\n".join(render_handovers(lines)))
    return 1 if _is_bad(lines) else 0


def _settings(caching: Caching) -> dict[str, Any]:
    return {**SETTINGS, "disaggregation": {"mode": "static", "caching": str(caching)}}


def _is_bad(lines: Sequence[Line]) -> bool:
    return any(line["bad"] for line in rounds_of(lines))


async def _soak(out: Path, lines: list[Line], caching: Caching, part: int, ends_at: float | None) -> None:
    """Run rounds until the setting has `part` hand-overs, the time is over, or a round had a fault."""
    async with (
        ApiClient(f"http://127.0.0.1:{MELL_PORT}", timeout_s=60.0) as client,
        ApiClient(f"http://127.0.0.1:{BARE_PORT}", timeout_s=60.0) as bare,
    ):
        await _until_roles(client)
        watch = ClusterWatch(client)
        await watch.look()
        soak = HandoverSoak(client, bare, caching, HandoverShape(), lines[0]["setting"]["seed"])
        with tqdm(total=part, initial=count_handovers(lines, caching), unit="hand-over", desc=str(caching)) as bar:
            while bar.n < part and (ends_at is None or time.monotonic() < ends_at):
                done = await soak.round(len(lines))
                done.bad += await watch.leaks(QUIET_S)
                lines.append(done.to_json())
                with out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                bar.update(count_handovers(lines, caching) - bar.n)
                if done.bad:
                    return


async def _until_roles(client: ApiClient) -> None:
    """Wait until one replica is for prefills: before that, requests stay where they are placed."""
    async with asyncio.timeout(60):
        while True:
            if any(replica["role"] == "prefill" for replica in (await client.state())["replicas"]):
                return
            await asyncio.sleep(0.2)


def _check_noise(seed: int) -> int:
    """A round with damaged blocks; 0 if answers differ."""

    async def check() -> HandoverRound:
        async with (
            ApiClient(f"http://127.0.0.1:{MELL_PORT}", timeout_s=60.0) as client,
            ApiClient(f"http://127.0.0.1:{BARE_PORT}", timeout_s=60.0) as bare,
        ):
            await _until_roles(client)
            return await HandoverSoak(client, bare, Caching.DECODE, HandoverShape(), seed).round(0)

    settings = _settings(Caching.DECODE) | {"migration": {"transport": "benchmarks.soak.noise:make"}}
    with (
        bare_vllm(BARE_PORT, Rig(extra=dict(DETAILS))),
        mell(MELL_PORT, 2, Rig(), **settings),
    ):
        done = asyncio.run(check())
    differ = sum(count for verdict, count in done.verdicts.items() if verdict not in RIGHT)
    print(f"{differ} of {done.verdicts.total()} answers differ; hand-overs: {dict(done.handovers)}")
    return 0 if differ else 1


if __name__ == "__main__":
    sys.exit(main())

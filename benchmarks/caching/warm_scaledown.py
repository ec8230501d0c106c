"""Hit rates of conversations before and after the scale-down of the replica that has most of them.

    python -m benchmarks.caching.warm_scaledown [--blocks 2048 640] [--systems auto off none] [--seed 1] [--json FILE]

Conversations run through four paced engines (`deployments.engine.paced`), each with that many blocks. After 90 s the
replica with the most cached blocks is drained, so that its requests move away and it stops. A system is a value of
`cache.copies`: with `auto`, the replica copies its cache to the others first. With `none` no replica stops, and copies
are `auto`: the hit rate drifts by itself. All systems get the same conversations.

The hit rate is the share of cached tokens in the prompts that were sent in a minute, the one before the scale-down or
the one after it.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from app.client.api import ApiClient
from benchmarks.load import percentile, stream
from benchmarks.routing.case import RoutedRequest
from benchmarks.routing.live import send
from benchmarks.servers import MODEL, mell
from deployments.engine.tokens import expected
from simulator.workload.sessions import SessionShape, Texts, sessions

PORT = 8100
REPLICAS = 4
ENGINE: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "decode_s": 0.05,
    "decode_s_per_seq": 1 / 4000,
    "prefill_tokens_per_s": 2500.0,
}
SHAPE = SessionShape(turns=6, varies=True, message=120.0, output=60.0, think_s=10.0)
RATE = 0.8
"""Conversations that begin per second."""
CLOSED_S = 90.0
WINDOW_S = 60.0
"""The times of the scale-down, and of the windows before and after it, in seconds."""
ANSWER_S = 25.0
"""Longer than any answer takes, in seconds; conversations end with the last window."""
GONE_S = 60.0
"""The longest wait for the end of the replica, in seconds."""


@dataclass(frozen=True, slots=True)
class TurnSample:
    """A turn of a conversation: the time of its request since the begin, its prompt and the cached part of that in
    tokens, and the seconds to its first token.
    """

    at_s: float
    prompt: int
    cached: int
    first_s: float


@dataclass(frozen=True, slots=True)
class ScaledownRun:
    """One run. The replica was gone `gone_s` seconds after the order; None: no replica was drained."""

    system: str
    blocks: int
    seed: int
    turns: tuple[TurnSample, ...]
    gone_s: float | None

    def window(self, after: bool) -> list[TurnSample]:
        """The turns of the minute before or after the scale-down."""
        begin = CLOSED_S if after else CLOSED_S - WINDOW_S
        return [turn for turn in self.turns if begin <= turn.at_s < begin + WINDOW_S]

    def hit_rate(self, after: bool) -> float:
        """The share of cached tokens in that minute's prompts."""
        turns = self.window(after)
        return sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns)

    def first_s(self, after: bool, share: float) -> float:
        """That quantile of the times to first tokens of that minute's turns."""
        return percentile([turn.first_s for turn in self.window(after)], share)


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2048, 640], help="of 16 tokens, per replica")
    parser.add_argument("--systems", nargs="+", default=["auto", "off", "none"], choices=["auto", "off", "none"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(_HEAD, flush=True)
    runs = []
    for blocks in options.blocks:
        for system in options.systems:
            runs.append(_run(system, blocks, options.seed))
            print(_line(runs[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(run) for run in runs]))


def conversations(seed: int) -> list[RoutedRequest]:
    """The requests of all conversations that begin until the end of the last window."""
    chance, at_s = Random(f"scaledown-{seed}"), 0.0
    begins: list[float] = []
    while (at_s := at_s + chance.expovariate(RATE)) < CLOSED_S + WINDOW_S:
        begins.append(at_s)
    texts, found = Texts(f"scaledown-{seed}"), []
    for each in sessions(SHAPE, begins, seed):
        prompt = tuple(texts.tokens(each.prompt))
        texts.known[each.answer] = list(expected(prompt, each.output))
        found.append(RoutedRequest(each.session, each.at_s, each.think_s, prompt, each.output))
    return found


def _run(system: str, blocks: int, seed: int) -> ScaledownRun:
    settings: dict[str, Any] = {
        "engine": "paced",
        "engine_kwargs": {"num_gpu_blocks_override": blocks, **ENGINE},
        "scheduler": {"policy": "worst_fit", "mode": "off", "epoch_s": 0.5},
        "deployment_config": {
            "num_cpus": 0.05,
            "graceful_shutdown_timeout_s": 10.0,
            "autoscaling_config": {"min_replicas": 1, "initial_replicas": REPLICAS, "max_replicas": REPLICAS},
        },
        "ingress": {"frontend_kwargs": {"enable_prompt_tokens_details": True}},
        "cache": {"copies": "off" if system == "off" else "auto"},
    }
    with mell(PORT, REPLICAS, **settings):
        return asyncio.run(_measure(system, blocks, seed))


async def _measure(system: str, blocks: int, seed: int) -> ScaledownRun:
    began, turns = time.perf_counter(), []

    async def ask(request: RoutedRequest) -> None:
        at_s = time.perf_counter() - began
        if at_s >= CLOSED_S + WINDOW_S:
            return
        more = {"stream_options": {"include_usage": True}}
        taken = await stream(PORT, MODEL, list(request.prompt), request.output, more=more)
        turns.append(TurnSample(at_s, len(request.prompt), taken.cached_tokens, taken.ttft))

    closing = None if system == "none" else asyncio.create_task(_close_one())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSED_S + WINDOW_S + ANSWER_S):
            await send(conversations(seed), ask)
    return ScaledownRun(system, blocks, seed, tuple(turns), None if closing is None else await closing)


async def _close_one() -> float:
    """Drain the replica with the most cached blocks; the seconds until it has gone. Raises TimeoutError."""
    await asyncio.sleep(CLOSED_S)
    async with ApiClient(f"http://127.0.0.1:{PORT}", timeout_s=30.0) as client:
        replicas: list[dict[str, Any]] = []
        while not replicas:  # As long as a busy scheduler has never answered.
            await asyncio.sleep(0.1)
            replicas = (await client.state())["replicas"]
        fullest = max(replicas, key=lambda r: r["cache"]["hbm"]["active"] + r["cache"]["hbm"]["historical"])["id"]
        ordered = time.perf_counter()
        await client.drain(fullest)
        while any(replica["id"] == fullest for replica in (await client.state())["replicas"]):
            await asyncio.sleep(0.1)
            if time.perf_counter() - ordered > GONE_S:
                raise TimeoutError(f"replica {fullest} is still there after {GONE_S:g} s")
        return time.perf_counter() - ordered


_HEAD = (
    f"{'blocks':>6} {'system':6}{'turns':>10}{'hit rate':>17}{'after/before':>13}"
    f"{'TTFT p50, ms':>16}{'p99, ms':>16}{'gone, s':>9}"
)


def _line(run: ScaledownRun) -> str:
    """The figures before and after the scale-down."""

    def both(values: Sequence[str]) -> str:
        return " -> ".join(values)

    sides = (False, True)
    before, after = (run.hit_rate(side) for side in sides)
    turns = both([str(len(run.window(side))) for side in sides])
    p50, p99 = (both([f"{run.first_s(side, share) * 1e3:.0f}" for side in sides]) for share in (0.5, 0.99))
    gone = "-" if run.gone_s is None else f"{run.gone_s:.1f}"
    rates = both([f"{before:.1%}", f"{after:.1%}"])
    return f"{run.blocks:6} {run.system:6}{turns:>10}{rates:>17}{after / before:13.3f}{p50:>16}{p99:>16}{gone:>9}"


if __name__ == "__main__":
    main()

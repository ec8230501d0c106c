"""Soak: thousands of forced migrations, without a wrong token, a leak or a growing process.

    python -m benchmarks.soak --moves 10000 --out soak.jsonl [--engine vllm|paced] [--replicas 2] [--at-once 4]
                              [--seed 0]

In every round, streams are opened, and until they end random ones move to random other replicas by random paths,
several at a time. Then every answer is compared with an undisturbed run's, and the idle cluster's state and the memory
of its processes are checked. Undisturbed answers of real engines (vLLM on the CPU, the default) come from stock vLLM's
own server, in whose cache nothing was ever moved; those of paced engines are computed. If two tokens are equally likely
up to rounding in stock vLLM, either is right (`benchmarks.soak.stock`), and counted separately.

Every round is one line of the file. Another run with the same file continues it. Exit status: 0 if all moves so far
were without a fault, 1 if not, 2 if the file has other settings.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.client.api import ApiClient
from benchmarks.chaos.offers import Offer
from benchmarks.chaos.server import connect
from benchmarks.chaos.watch import ClusterWatch
from benchmarks.servers import MODEL, bare_vllm, mell, paced
from benchmarks.soak.forcing import Forcing, RoundShape, calculated
from benchmarks.soak.report import Line, count_moves, is_good, read_lines, render, rounds_of
from benchmarks.soak.stock import stock_texts

BARE_PORT, MELL_PORT = 8107, 8106
PER_ROUND = 400
"""The largest number of moves of a round: the scheduler keeps the records of a thousand."""


def main() -> int:
    """Parse the options, continue the rounds, print the results of all rounds; the exit status."""
    options = _options()
    setting = {name: getattr(options, name) for name in ("engine", "replicas", "at_once", "seed")}
    lines = read_lines(options.out)
    if lines and lines[0].get("setting") != setting:
        print(f"{options.out} has the setting {lines[0].get('setting')}, not {setting}", file=sys.stderr)
        return 2
    if not lines:
        lines = [{"setting": setting}]
    fresh = options.out.with_suffix(".new")
    fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fresh.replace(options.out)
    if count_moves(lines) < options.moves:
        with _servers(options):
            asyncio.run(_soak(options, lines))
    print("\n".join(render(lines)))
    return 0 if is_good(lines) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moves", type=int, default=10_000, help="moves in total, including those in the file")
    parser.add_argument("--out", type=Path, required=True, help="file of rounds, as JSON lines")
    parser.add_argument("--engine", choices=["vllm", "paced"], default="vllm")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=4, help="moves at a time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.replicas < 2:
        parser.error("--replicas must be at least 2")
    return options


@contextlib.contextmanager
def _servers(options: argparse.Namespace) -> Iterator[None]:
    """Mell, with a policy that never moves requests; for real engines, stock vLLM in addition."""
    with contextlib.ExitStack() as stack:
        if options.engine == "paced":
            both = (options.replicas, options.replicas)
            stack.enter_context(paced(MELL_PORT, both, scheduler={"policy": "best_fit", "mode": "off"}))
        else:
            stack.enter_context(bare_vllm(BARE_PORT))
            stack.enter_context(mell(MELL_PORT, options.replicas, scheduler={"mode": "off"}))
        yield


async def _soak(options: argparse.Namespace, lines: list[Line]) -> None:
    """Run rounds until all moves have been made, or one had a fault."""
    start = 1 + max((line["run"] for line in rounds_of(lines)), default=0)
    async with connect(f"http://127.0.0.1:{MELL_PORT}") as server:
        watch = ClusterWatch(server)
        await watch.look()
        expected = calculated if options.engine == "paced" else _stock
        forcing = Forcing(server, watch, RoundShape(at_once=options.at_once), options.seed, expected)
        with tqdm(total=options.moves, initial=count_moves(lines), unit="move", desc="soak") as bar:
            while (left := options.moves - count_moves(lines)) > 0 and is_good(lines):
                done = await forcing.round(len(lines), min(PER_ROUND, left), lambda: _advance(bar))
                line = {"run": start, "memory_mb": watch.processes.memory_mb(), **asdict(done)}
                lines.append(line)
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def _advance(bar: Any) -> None:
    bar.update()


async def _stock(offer: Offer) -> list[str]:
    async with ApiClient(f"http://127.0.0.1:{BARE_PORT}", timeout_s=120.0) as server:
        return await stock_texts(server, MODEL, offer)


if __name__ == "__main__":
    sys.exit(main())

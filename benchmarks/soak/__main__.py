"""Soak: thousands of forced migrations, without a wrong token, a leak or a growing process.

    python -m benchmarks.soak --moves 10000 --out soak.jsonl [--engine vllm|paced] [--replicas 2] [--at-once 4]
                              [--seed 0] [--device cuda]
    python -m benchmarks.soak --control-of soak.jsonl --out control.jsonl

In every round, streams are opened, and until they end random ones move to random other replicas by random paths,
several at a time. Then every answer is compared with an undisturbed run's, and the idle cluster's state and the memory
of its processes are checked. Undisturbed answers of real engines (vLLM on the CPU, the default) come from stock vLLM's
own server, in whose cache nothing was ever moved; those of paced engines are computed. If two tokens are equally likely
up to rounding in stock vLLM, either is right (`benchmarks.soak.stock`), and counted separately. On GPUs, where a text
depends on the batch and on the prefix cache, answers have to be whole, and their texts are not compared.

The control of a soak serves the same requests in as many rounds and moves none: memory that grows there as well does
not grow because of moves. Its report has both.

Every round is one line of the file. Another run with the same file continues it. Exit status: 0 if all rounds so far
were without a fault, 1 if not, 2 if the file has other settings.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from app.client.api import ApiClient
from benchmarks.chaos.offers import Offer
from benchmarks.chaos.server import connect
from benchmarks.chaos.watch import ClusterWatch
from benchmarks.servers import MODEL, Rig, add_rig_options, bare_vllm, mell, paced
from benchmarks.soak.forcing import Forcing, RoundShape, any_text, calculated
from benchmarks.soak.report import Line, count_moves, is_good, read_lines, render, rounds_of
from benchmarks.soak.stock import stock_texts

BARE_PORT, MELL_PORT = 8107, 8106
SETTING = ("engine", "replicas", "at_once", "seed")
"""The options that are the same in all rounds of a file. A control has 0 moves at once."""
PER_ROUND = 400
"""The largest number of moves of a round: the scheduler keeps the records of a thousand."""


def main() -> int:
    """Parse the options, continue the rounds, print the results of all rounds; the exit status."""
    options = _options()
    rig = Rig.of(options)
    soak = read_lines(options.control_of) if options.control_of else []
    setting = soak[0]["setting"] | {"at_once": 0} if soak else {name: getattr(options, name) for name in SETTING}
    if rig.device == "cuda":
        setting["conditions"] = str(rig)
    lines = read_lines(options.out)
    if lines and lines[0].get("setting") != setting:
        print(f"{options.out} has the setting {lines[0].get('setting')}, not {setting}", file=sys.stderr)
        return 2
    if not lines:
        lines = [{"setting": setting}]
    fresh = options.out.with_suffix(".new")
    fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fresh.replace(options.out)
    goal = Goal("round", len(rounds_of(soak)), lambda: len(rounds_of(lines)))
    if not soak:
        goal = Goal("move", options.moves, lambda: count_moves(lines))
    if goal.left > 0:
        with _servers(setting["engine"], setting["replicas"], rig):
            asyncio.run(_soak(options.out, lines, goal))
    print("\n".join(render(soak or lines, control=lines if soak else ())))
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
    parser.add_argument(
        "--control-of", type=Path, metavar="FILE", help="serve the rounds of that soak, by its settings, without moves"
    )
    add_rig_options(parser)
    options = parser.parse_args()
    if options.engine == "paced" and options.device == "cuda":
        parser.error("--engine paced has no device")
    if options.replicas < 2:
        parser.error("--replicas must be at least 2")
    return options


@contextlib.contextmanager
def _servers(engine: str, replicas: int, rig: Rig) -> Iterator[None]:
    """Mell, with a policy that never moves requests; for real engines on a CPU, stock vLLM in addition."""
    with contextlib.ExitStack() as stack:
        if engine == "paced":
            stack.enter_context(paced(MELL_PORT, (replicas, replicas), scheduler={"policy": "best_fit", "mode": "off"}))
        else:
            if rig.device == "cpu":
                stack.enter_context(bare_vllm(BARE_PORT))
            stack.enter_context(mell(MELL_PORT, replicas, rig.sharing(replicas), scheduler={"mode": "off"}))
        yield


@dataclass(frozen=True, slots=True)
class Goal:
    """The size of a soak: a number of units, and the count of those in its file."""

    unit: str
    total: int
    count: Callable[[], int]

    @property
    def left(self) -> int:
        """The number of units that are not in the file yet."""
        return self.total - self.count()


async def _soak(out: Path, lines: list[Line], goal: Goal) -> None:
    """Run rounds until the goal is reached, or one had a fault."""
    start = 1 + max((line["run"] for line in rounds_of(lines)), default=0)
    setting = lines[0]["setting"]
    async with connect(f"http://127.0.0.1:{MELL_PORT}") as server:
        watch = ClusterWatch(server)
        await watch.look()
        stock = any_text if "conditions" in setting else _stock
        expected = calculated if setting["engine"] == "paced" else stock
        forcing = Forcing(server, watch, RoundShape(at_once=setting["at_once"]), setting["seed"], expected)
        with tqdm(total=goal.total, initial=goal.count(), unit=goal.unit, desc="soak") as bar:
            while goal.left > 0 and is_good(lines):
                done = await forcing.round(len(lines), min(PER_ROUND, goal.left), bar.update)
                line = {"run": start, "memory_mb": watch.processes.memory_mb(), **asdict(done)}
                lines.append(line)
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                bar.update(goal.count() - bar.n)


async def _stock(offer: Offer) -> list[str]:
    async with ApiClient(f"http://127.0.0.1:{BARE_PORT}", timeout_s=120.0) as server:
        return await stock_texts(server, MODEL, offer)


if __name__ == "__main__":
    sys.exit(main())

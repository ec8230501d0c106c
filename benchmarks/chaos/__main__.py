"""Chaos: replicas die, stop, drain and migrate requests under a replayed trace; clients may see no more than a pause.

    python -m benchmarks.chaos --minutes 5 [--seed 0] [--every 5] [--trace FILE.csv.gz] [--json FILE]

A server with paced engines (no model, no GPU; the next token is a function of the context, so every answer can be
computed) serves a trace: a small one drawn from the seed, or the first minutes of a file in the format of
`simulator.replay`. Meanwhile faults are injected: SIGKILL of a replica, SIGSTOP of one for some seconds or for good,
SIGKILL of the Scheduler and of Serve's controller, clients that leave, drains and moves by hand. A seed determines the
faults and their times; their victims depend on the state of the cluster.

Every stream must end with exactly the tokens of an undisturbed run. The only exception is promised: seeded sampling
ends with an error event if its replica is lost after its first token. Afterwards no replica may hold a request, a KV
block, reserved room or a staging slot, and no process of a dead replica may remain. Exit status: 0 if so, 1 if not.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.chaos.faults import draw_faults
from benchmarks.chaos.offers import draw_trace, make_offers
from benchmarks.chaos.report import is_good, make_document, render
from benchmarks.chaos.run import ChaosResult, ChaosRun
from benchmarks.chaos.server import connect
from benchmarks.servers import PACED, paced
from simulator.errors import BadInput
from simulator.replay.trace import LengthScaling, TraceRequest, TraceWindow, cut, fit, read_trace

PORT = 8105
CONTEXT = int(PACED["max_model_len"])


def main() -> int:
    """Parse the options, run, report; the exit status."""
    options = _options()
    try:
        arrivals = _arrivals(options)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    with paced(PORT, (1, 4)):
        result = asyncio.run(_run(options, arrivals))
    document = make_document(result, {name: str(value) for name, value in vars(options).items()})
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(render(document))
    return 0 if is_good(result) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="mean time between faults")
    parser.add_argument("--trace", type=Path, help="a trace in a known format (docs/simulation.md)")
    parser.add_argument("--max-output", type=int, default=600, help="longest answer of a trace's requests, in tokens")
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args()
    if not (options.minutes > 0 and options.every > 0):
        parser.error("--minutes and --every must be greater than 0")
    return options


def _arrivals(options: argparse.Namespace) -> tuple[TraceRequest, ...]:
    if options.trace is None:
        return draw_trace(options.seed, 60 * options.minutes)
    window, lengths = TraceWindow(options.minutes), LengthScaling(context=CONTEXT, max_output=options.max_output)
    return fit(cut(read_trace(options.trace).requests, window), lengths)


async def _run(options: argparse.Namespace, arrivals: tuple[TraceRequest, ...]) -> ChaosResult:
    offers = make_offers(arrivals, options.seed)
    faults = draw_faults(options.seed, 60 * options.minutes, options.every)
    async with connect(f"http://127.0.0.1:{PORT}") as server:
        with tqdm(total=len(offers) + 1, unit="stream", desc="chaos") as bar:
            return await ChaosRun(server, lambda *now: _show(bar, *now)).run(offers, faults)


def _show(bar: Any, ended: int, running: int, struck: int) -> None:
    bar.n = ended
    bar.set_postfix(running=running, struck=struck)


if __name__ == "__main__":
    sys.exit(main())

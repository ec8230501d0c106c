"""The command line of a replay: `python -m simulator.replay --trace FILE.csv.gz --minutes N`.

Exit status: 0 for a complete replay, even with failed requests; 2 if it could not start; 130 if it was interrupted,
with a report of the measurements so far.
"""

import argparse
import asyncio
import json
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from app.client.api import STATE
from simulator.errors import BadInput
from simulator.replay.client import ServedModel, connect, find_model
from simulator.replay.measurements import ReplayMeasurements, ReplaySample
from simulator.replay.page import NamedReport
from simulator.replay.page import render as render_page
from simulator.replay.plot import draw
from simulator.replay.probe import TIMEOUT_S, MellProbe
from simulator.replay.report import Document, ReplaySetup, document
from simulator.replay.run import TraceReplay
from simulator.replay.text import render
from simulator.replay.trace import LengthScaling, TraceRequest, TraceWindow, cut, fit, read_trace
from simulator.traces.formats import TRACE_HELP

BAD_INPUT, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a trace and report; the exit status."""
    options = _parser().parse_args(argv)
    try:
        setup, requests = _prepare(options)
        setup, requests, measured = asyncio.run(_replay(setup, requests, options.admin_key))
    except BadInput as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    report = document(setup, requests, measured)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(render(report))
    _draw(options.png, options.html, setup, measured, report)
    return INTERRUPTED if measured.interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator.replay", description="Replay a trace of LLM requests.")
    add = parser.add_argument
    add("--trace", required=True, type=Path, help=TRACE_HELP)
    add("--minutes", required=True, type=float, help="length of the replayed window, in trace time")
    add("--start-minute", default=0.0, type=float, help="start of the window in the trace (default: 0)")
    add(
        "--time-scale",
        default=1.0,
        type=float,
        help="factor on arrival times; 0.5 is twice as fast (default: 1)",
    )
    add("--token-scale", default=1.0, type=float, help="factor on token counts (default: 1)")
    add(
        "--max-output",
        type=int,
        help="maximum length of an answer in tokens, after scaling (default: the context)",
    )
    add(
        "--context",
        type=int,
        help="maximum length of prompt and answer in tokens (default: the endpoint's max_model_len)",
    )
    add(
        "--url",
        default="http://127.0.0.1:8000",
        help="endpoint, without /v1 (default: http://127.0.0.1:8000)",
    )
    add("--admin-key", help="bearer key for the /mell routes")
    add("--seed", default=0, type=int, help="seed of the random prompts (default: 0)")
    add(
        "--move-every",
        default=0.0,
        type=float,
        metavar="SECONDS",
        help="interval of orders to move a random request (default: none)",
    )
    add("--json", default=Path("replay.json"), type=Path, help="JSON report (default: replay.json)")
    add("--png", default=Path("replay.png"), type=Path, help="plot (default: replay.png)")
    add("--html", default=Path("replay.html"), type=Path, help="HTML page (default: replay.html)")
    return parser


def _prepare(options: argparse.Namespace) -> tuple[ReplaySetup, tuple[TraceRequest, ...]]:
    """Check all options first: a replay of an hour must not fail for an output path."""
    window = TraceWindow(options.minutes, options.start_minute, options.time_scale)
    lengths = LengthScaling(options.token_scale, options.context, options.max_output)
    if not options.move_every >= 0:
        raise BadInput(f"The interval of moves must not be negative, got {options.move_every:g}.")
    for path in (options.json, options.png, options.html):
        if path.is_dir() or not path.parent.is_dir():
            raise BadInput(
                f"{path} cannot be written: it is a directory, or its directory {path.parent} does not exist."
            )
    read = read_trace(options.trace, options.start_minute + options.minutes)
    setup = ReplaySetup(
        options.trace.name, options.url, "", window, lengths, options.seed, options.move_every, read.account
    )
    return setup, cut(read.requests, window)


async def _replay(
    setup: ReplaySetup, requests: Sequence[TraceRequest], admin_key: str | None
) -> tuple[ReplaySetup, tuple[TraceRequest, ...], ReplayMeasurements]:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    _allow_many_connections()
    async with connect(setup.url) as api, connect(setup.url, admin_key, TIMEOUT_S) as mell:
        model = await find_model(api)
        setup = _complete(setup, model)
        fitted = fit(requests, setup.lengths)
        probe = MellProbe(mell, setup.seed)
        await probe.begin()
        if setup.move_every_s and STATE in probe.missing:
            raise BadInput(f"Moves are not possible, since {STATE} is not offered: {probe.missing[STATE]}.")
        with tqdm(total=len(fitted), unit="req", desc="replay") as bar:
            replay = TraceReplay(api, model, setup.seed, probe, lambda now: _show(bar, now))
            measured = await replay.run(fitted, setup.move_every_s, stop)
    return setup, fitted, measured


def _complete(setup: ReplaySetup, model: ServedModel) -> ReplaySetup:
    """The setup with the endpoint's model and, unless given, its context."""
    lengths = setup.lengths
    return replace(setup, model=model.id, lengths=replace(lengths, context=lengths.context or model.context))


def _show(bar: "tqdm[None]", now: ReplaySample) -> None:
    bar.n = now.finished
    bar.set_postfix(running=now.running, errors=now.errors)


def _allow_many_connections() -> None:
    """Raise the soft limit on open files, often 1,024, to the hard limit: each running request needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _draw(png: Path, html: Path, setup: ReplaySetup, measured: ReplayMeasurements, report: Document) -> None:
    name = f"{setup.trace} on {setup.model}"
    try:
        draw(png, name, measured)
        html.write_text(render_page([NamedReport(name, report)]))
    except ImportError:
        print(f"{png} and {html} were not written: matplotlib is not installed.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

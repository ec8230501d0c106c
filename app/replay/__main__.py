"""The command line of a replay: `python -m app.replay --trace FILE.csv.gz --minutes N`.

Exit status: 0 when the window was replayed, whatever the endpoint made of it; 2 when it could not be begun;
130 when it was interrupted, with the report of what was measured until then.
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
from app.replay.client import Model, connect, find_model
from app.replay.errors import BadInput
from app.replay.measured import Measured
from app.replay.page import Run
from app.replay.page import render as render_page
from app.replay.plot import draw
from app.replay.report import Document, Setup, document
from app.replay.run import Replay
from app.replay.state import Sample
from app.replay.text import render
from app.replay.trace import Arrival, Lengths, Window, cut, fit, read_trace
from app.replay.watch import TIMEOUT_S, Watch

BAD_INPUT, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a trace and report; the exit status."""
    options = _parser().parse_args(argv)
    try:
        setup, arrivals = _prepare(options)
        setup, arrivals, measured = asyncio.run(_replay(setup, arrivals, options.admin_key))
    except BadInput as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    report = document(setup, arrivals, measured)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(render(report))
    _draw(options.png, options.html, setup, measured, report)
    return INTERRUPTED if measured.interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m app.replay", description="Replay a trace of LLM requests.")
    add = parser.add_argument
    add("--trace", required=True, type=Path, help="csv.gz with arrival_s,prompt_tokens,output_tokens")
    add("--minutes", required=True, type=float, help="how much of the trace to replay, in trace time")
    add("--start-minute", default=0.0, type=float, help="where in the trace to begin (default: 0)")
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
        help="longest answer in tokens, after scaling (default: as the context allows)",
    )
    add("--context", type=int, help="longest prompt and answer in tokens (default: what the endpoint says)")
    add(
        "--url",
        default="http://127.0.0.1:8000",
        help="endpoint, without /v1 (default: http://127.0.0.1:8000)",
    )
    add("--admin-key", help="key for the /mell paths, sent as a bearer token")
    add("--seed", default=0, type=int, help="seed of the random prompts (default: 0)")
    add(
        "--move-every",
        default=0.0,
        type=float,
        metavar="SECONDS",
        help="ask for a move so often (default: never)",
    )
    add("--json", default=Path("replay.json"), type=Path, help="report (default: replay.json)")
    add("--png", default=Path("replay.png"), type=Path, help="picture (default: replay.png)")
    add("--html", default=Path("replay.html"), type=Path, help="page (default: replay.html)")
    return parser


def _prepare(options: argparse.Namespace) -> tuple[Setup, tuple[Arrival, ...]]:
    """Check all that can be checked at once: an hour of replay must not end in a path that is not there."""
    window = Window(options.minutes, options.start_minute, options.time_scale)
    lengths = Lengths(options.token_scale, options.context, options.max_output)
    if not options.move_every >= 0:
        raise BadInput(f"The time between moves must not be negative, got {options.move_every:g}.")
    for path in (options.json, options.png, options.html):
        if path.is_dir() or not path.parent.is_dir():
            raise BadInput(f"{path} cannot be written: there is no directory {path.parent}, or it is one itself.")
    setup = Setup(options.trace.name, options.url, "", window, lengths, options.seed, options.move_every)
    return setup, cut(read_trace(options.trace), window)


async def _replay(
    setup: Setup, arrivals: Sequence[Arrival], admin_key: str | None
) -> tuple[Setup, tuple[Arrival, ...], Measured]:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    _allow_many_connections()
    async with connect(setup.url) as api, connect(setup.url, admin_key, TIMEOUT_S) as mell:
        model = await find_model(api)
        setup = _settle(setup, model)
        fitted = fit(arrivals, setup.lengths)
        watch = Watch(mell, setup.seed)
        await watch.begin()
        if setup.move_every_s and STATE in watch.missing:
            raise BadInput(f"No moves can be asked for, since {STATE} is not offered: {watch.missing[STATE]}.")
        with tqdm(total=len(fitted), unit="req", desc="replay") as bar:
            replay = Replay(api, model, setup.seed, watch, lambda now: _show(bar, now))
            measured = await replay.run(fitted, setup.move_every_s, stop)
    return setup, fitted, measured


def _settle(setup: Setup, model: Model) -> Setup:
    """The setup with what only the endpoint knows: its model and, unless given, its context."""
    lengths = setup.lengths
    return replace(setup, model=model.id, lengths=replace(lengths, context=lengths.context or model.context))


def _show(bar: "tqdm[None]", now: Sample) -> None:
    bar.n = now.finished
    bar.set_postfix(running=now.running, errors=now.errors)


def _allow_many_connections() -> None:
    """Lift the soft limit on open files, often 1,024: each running request is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _draw(png: Path, html: Path, setup: Setup, measured: Measured, report: Document) -> None:
    name = f"{setup.trace} on {setup.model}"
    try:
        draw(png, name, measured)
        html.write_text(render_page([Run(name, report)]))
    except ImportError:
        print(f"{png} and {html} were not drawn: matplotlib is not installed.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

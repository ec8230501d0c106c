"""Raw runs on disk, each under a digest of everything that determines its outcome, so that no run is repeated."""

import hashlib
import json
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from benchmarks.evaluation.runs.case import Case, expected_requests
from benchmarks.evaluation.runs.perform import Raw, perform
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.sources import fingerprint
from simulator.costs.costs import SHIPPED


class FailedRun(Exception):
    """A case could not be carried out; the text has the case and the reason."""


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of raw runs; `traces` is the folder of their workloads."""

    folder: Path
    traces: Path

    def path(self, case: Case) -> Path:
        """The path of a case's raw run, existing or not."""
        content = {
            "case": asdict(case),
            "files": {file: _digest(self.traces / file) for file in case.files},
            "costs": _digest(SHIPPED / f"{case.physics.costs}.json"),
            "code": fingerprint(case.policy),
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{key[:24]}.json"

    def load(self, case: Case) -> Raw | None:
        """The raw run of a case, or None if it has not been carried out."""
        path = self.path(case)
        if not path.is_file():
            return None
        kept = json.loads(path.read_text())
        return Raw(kept["metrics"], kept["cpu_s"])

    def save(self, case: Case, raw: Raw) -> None:
        """Write a raw run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(case)
        half = path.with_suffix(".part")
        half.write_text(json.dumps({"case": asdict(case), **asdict(raw)}, indent=1) + "\n")
        half.replace(path)


def carry_out(store: Store, cases: Iterable[Case], processes: int, quiet: bool = False) -> Results:
    """The results of all cases; cases missing in the store are carried out, the longest first.

    A progress bar counts simulated requests. Raises `FailedRun`; the runs ended by then are kept.
    """
    wanted = list(dict.fromkeys(cases))
    raws = {case: raw for case in wanted if (raw := store.load(case))}
    missing = {case: expected_requests(case, store.traces) for case in wanted if case not in raws}
    ordered = sorted(missing, key=lambda case: -missing[case])
    with tqdm(total=round(sum(missing.values())), unit=" requests", desc="simulated", disable=quiet) as bar:

        def done(case: Case, raw: Raw) -> None:
            store.save(case, raw)
            raws[case] = raw
            bar.update(round(missing[case]))

        _run(ordered, store.traces, processes, done)
    return Results({case: raws[case].metrics for case in wanted}, {case: raws[case].cpu_s for case in wanted})


def _run(cases: list[Case], traces: Path, processes: int, done: Callable[[Case, Raw], None]) -> None:
    if processes == 1 or len(cases) < 2:
        for case in cases:
            done(*_perform((case, traces)))
        return
    # Spawned, so that no state of this process affects a result; leaving the block ends running workers.
    with get_context("spawn").Pool(processes, _ignore_interrupts) as pool:
        for case, raw in pool.imap_unordered(_perform, [(case, traces) for case in cases]):
            done(case, raw)


def _perform(job: tuple[Case, Path]) -> tuple[Case, Raw]:
    case, traces = job
    try:
        return case, perform(case, traces)
    except Exception as error:
        raise FailedRun(f"{type(error).__name__}: {error}, in {case}") from error


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C, which the terminal sends to all processes: only the parent acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@cache
def _digest(path: Path) -> str:
    """The digest of a file; empty for a missing one, since the costs `ideal` have no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

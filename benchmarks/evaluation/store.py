"""Raw runs on disk, each under a digest of all that decides its outcome: what is there need not be run again."""

import hashlib
import json
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from app.simulator.costs import SHIPPED
from benchmarks.evaluation.case import Case, expected_requests
from benchmarks.evaluation.perform import Raw, perform
from benchmarks.evaluation.results import Results
from benchmarks.evaluation.sources import fingerprint


class FailedRun(Exception):
    """A case could not be carried out; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of raw runs of workloads in the folder `traces`."""

    folder: Path
    traces: Path

    def path(self, case: Case) -> Path:
        """Where the raw run of a case is, or would be."""
        content = {
            "case": asdict(case),
            "files": {file: _digest(self.traces / file) for file in case.files},
            "costs": _digest(SHIPPED / f"{case.physics.costs}.json"),
            "code": fingerprint(case.policy),
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{key[:24]}.json"

    def load(self, case: Case) -> Raw | None:
        """The raw run of a case, if it has been carried out."""
        path = self.path(case)
        if not path.is_file():
            return None
        kept = json.loads(path.read_text())
        return Raw(kept["metrics"], kept["cpu_s"])

    def save(self, case: Case, raw: Raw) -> None:
        """Keep a raw run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(case)
        half = path.with_suffix(".part")
        half.write_text(json.dumps({"case": asdict(case), **asdict(raw)}, indent=1) + "\n")
        half.replace(path)


def carry_out(store: Store, cases: Iterable[Case], processes: int, quiet: bool = False) -> Results:
    """The outcome of every case; those that the store does not have are run, the longest first.

    A bar shows how many of the requests have been simulated. Raises `FailedRun`; what was done by then is kept.
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
    # Spawned, so that nothing of this process leaks into a result; leaving the block ends what still runs.
    with get_context("spawn").Pool(processes, _deaf_to_interrupts) as pool:
        for case, raw in pool.imap_unordered(_perform, [(case, traces) for case in cases]):
            done(case, raw)


def _perform(job: tuple[Case, Path]) -> tuple[Case, Raw]:
    case, traces = job
    try:
        return case, perform(case, traces)
    except Exception as error:
        raise FailedRun(f"{type(error).__name__}: {error}, in {case}") from error


def _deaf_to_interrupts() -> None:
    """Ctrl-C reaches all of a terminal's processes: only the one that waits for them acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@cache
def _digest(path: Path) -> str:
    """Of a file's content; the costs `ideal` have no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

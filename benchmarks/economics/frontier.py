"""The best settings of every contender in a window: a plan of the window, in the conditions of its runs.

The plan is that of `mell plan`: it sweeps every contender's settings, on simulated engines with the step times of the
paced ones, and with the requests of the runs.
"""

import csv
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.economics.case import LiveCase
from benchmarks.economics.predict import SERVE_STARTS_S, usual_costs
from simulator.errors import BadInput
from simulator.planning.__main__ import main as plan
from simulator.replay.trace import TraceRequest
from simulator.traces.formats import MELL_COLUMNS


def print_frontier(case: LiveCase, due: Sequence[TraceRequest]) -> None:
    """Print the plan of a case's window, whose requests are `due`. Raises `BadInput` without a service level."""
    conditions, pace = case.conditions, case.conditions.pace
    if conditions.level is None:
        raise BadInput("A plan needs a service level: give --slo.")
    costs = usual_costs(pace, sum(SERVE_STARTS_S) / 2)
    with TemporaryDirectory() as folder:
        trace, file = Path(folder, f"{case.window.trace}.csv.gz"), Path(folder, "paced.json")
        file.write_text(json.dumps(asdict(costs)))
        with gzip.open(trace, "wt", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(MELL_COLUMNS)
            rows.writerows((each.at_s, each.prompt_tokens, each.output_tokens) for each in due)
        options = {
            "--costs": file,
            "--capacity-tokens": pace.num_gpu_blocks_override * pace.block_size,
            "--max-gpus": conditions.max_replicas,
            "--gpus-per-node": conditions.max_replicas,
            "--warmup": conditions.warmup_s,
            "--horizon": conditions.until_s,
            "--ttft-p99": conditions.ttft_p99_s,
            "--itl-p99": conditions.itl_p99_ms,
        }
        given = [str(word) for option in options.items() if option[1] is not None for word in option]
        if plan([str(trace), "--no-cap", *given]):
            raise BadInput(f"{case.window.name} cannot be planned.")

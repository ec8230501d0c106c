"""Sessions of runs, their sending, and the figures and tables of runs."""

import asyncio
import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.instruments.runs import append_runs, read_runs
from benchmarks.routing.case import (
    MOONCAKE,
    PACE,
    RATES,
    RoutedRequest,
    RoutingCase,
    System,
    case,
    part_of_trace,
    session_requests,
    with_answers,
)
from benchmarks.routing.live import RoutedAnswer, RoutingRun, send
from benchmarks.routing.predict import predict
from benchmarks.routing.report import compare, figures, render
from deployments.engine.tokens import expected
from simulator.errors import BadInput
from simulator.workload.workload import Recorded
from tests.virtual_time import virtual_loop


def run(system: System = System.TREE, seed: int = 0, scale: float = 1.0, **counted: float) -> RoutingRun:
    answers = tuple(RoutedAnswer(scale * n, scale * 2 * n, 100, 50) for n in range(1, 101))
    return RoutingRun(system, "react_like", seed, 0.0, answers, **counted)


@pytest.mark.parametrize("workload", RATES)
def test_prompts_have_the_answers_that_engines_give(workload: str) -> None:
    planned = session_requests(workload, 3)
    sent = with_answers(planned, workload, 3)
    assert sent == with_answers(session_requests(workload, 3), workload, 3)
    assert max(len(each.prompt) + each.output for each in sent) <= PACE.max_model_len
    chained = 0
    for before, following in pairwise(sent):
        whole = (*before.prompt, *expected(before.prompt, before.output))
        if before.session == following.session and workload != "loogle_like":
            chained += 1
            assert following.prompt[: len(whole)] == whole and following.think_s > 0
    assert chained or workload == "loogle_like"


@pytest.mark.virtual_time
async def test_a_request_is_sent_after_the_answer_before_it() -> None:
    requests = [RoutedRequest(name, at, think, (1,), 1) for name, at, think in (("a", 1, 0), ("a", 1, 2), ("b", 4, 0))]
    began, sent = virtual_loop().time(), []

    async def ask(request: RoutedRequest) -> RoutedAnswer:
        sent.append((request.session, virtual_loop().time() - began))
        await asyncio.sleep(5.0)
        return RoutedAnswer(0.1, 5.0, 1, 0)

    assert len(await send(requests, ask)) == 3
    assert [name for name, _ in sent] == ["a", "b", "a"]
    assert [at for _, at in sent] == pytest.approx([1.0, 4.0, 8.0], abs=0.1)


def test_figures_of_a_run() -> None:
    found = figures(run(predicted=100.0, delivered=97.0)).values
    assert found["hit rate, %"] == 0.5 and found["not delivered, %"] == pytest.approx(0.03)
    assert (found["TTFT p50, ms"], found["TTFT p99, ms"], found["completion mean, s"]) == (51, 100, 101)
    assert figures(run(predicted=100.0, delivered=103.0)).values["not delivered, %"] == 0.0
    assert "not delivered, %" not in figures(run(System.RAY_POW2)).values


def test_ratios_are_of_runs_with_the_same_seed() -> None:
    runs = [run(), run(System.RAY_POW2, scale=3.0), run(seed=1, scale=2.0), run(System.RAY_POW2, seed=1, scale=2.0)]
    (line,) = [line for line in render(runs, System.TREE).splitlines() if line.startswith("ray_pow2 / tree")]
    assert line.split()[3:6] == ["2.00", "[1.00,", "3.00]"]


def test_predictions_stand_beside_measurements() -> None:
    text = compare([run(), run(System.RAY_POW2)], [run(scale=1.5)])
    (line,) = [line for line in text.splitlines() if line.startswith("react_like")]
    assert line.split()[1:] == ["tree", "50.0", "50.0", "51000", "76500", "+50"]


def test_runs_are_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert read_runs(path, RoutingRun) == []
    append_runs(path, run())
    append_runs(path, run(System.RAY_PREFIX))
    assert read_runs(path, RoutingRun) == [run(), run(System.RAY_PREFIX)]
    path.write_text("{}")
    with pytest.raises(BadInput, match="is not a file of runs"):
        read_runs(path, RoutingRun)


def test_the_simulator_plays_a_run() -> None:
    some = RoutingCase("loogle_like", 0, tuple(session_requests("loogle_like", 0)[:50]))
    tree, load = (predict(system, some) for system in (System.TREE, System.LEAST_LOAD))
    assert len(tree.answers) == len(load.answers) == 50
    assert figures(tree).values["hit rate, %"] > 0.6 > figures(load).values["hit rate, %"]
    with pytest.raises(AssertionError, match="not simulated"):
        predict(System.RAY_POW2, some)


def test_a_part_of_a_trace_has_equal_texts_for_equal_blocks() -> None:
    rows = [Recorded(599.0, 512, 16, (1,)), Recorded(600.0, 1008, 160, (1, 2))]
    rows += [Recorded(630.0, 1536, 0, (1, 2, 3)), Recorded(840.0, 512, 16, (1,))]
    first, second = with_answers(part_of_trace(rows, 0), MOONCAKE, 0)
    assert (first.at_s, len(first.prompt), first.output) == (0.0, 63, 10)
    assert (second.at_s, len(second.prompt), second.output) == (10.0, 96, 1)
    assert first.session != second.session and second.prompt[:63] == first.prompt
    longest = next(part_of_trace([Recorded(1200.0, 120_000, 1, tuple(range(240)))], 1))
    assert longest.prompt_tokens == 3000
    with pytest.raises(BadInput, match="needs --traces"):
        case(MOONCAKE, 0)


def test_a_part_beyond_the_end_of_a_trace_is_refused(tmp_path: Path) -> None:
    row = {"arrival_s": 0.0, "prompt_tokens": 512, "output_tokens": 1, "hash_ids": [0]}
    (tmp_path / "mooncake_conversation.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    with pytest.raises(BadInput, match="Seed 3 is beyond the end"):
        case(MOONCAKE, 3, tmp_path)

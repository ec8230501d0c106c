"""Making the requests of a run."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from policies.model import Tokens
from simulator.errors import BadInput
from simulator.outcome.statistics import mean
from simulator.workload.lengths import Resampled
from simulator.workload.workload import ArrivalTrace, Poisson, Recipe, Recorded, draw, read_trace

TRACE = ArrivalTrace((Recorded(0.0, 10, 20), Recorded(2.5, 30, 40), Recorded(9.0, 50, 60)))
CHATS = Resampled(((5.0, 7.0),))


def recipe(arrivals: Poisson | ArrivalTrace = TRACE, **given: Any) -> Recipe:
    options: dict[str, Any] = {"lengths": None, "horizon_s": 100.0, "capacity": Tokens(1000), **given}
    return Recipe(arrivals, **options)


def rows(recipe: Recipe, seed: int = 0) -> list[tuple[float, int, int]]:
    return [(job.arrival_s, job.prompt, job.output) for job in draw(recipe, seed).jobs]


def test_a_trace_is_taken_as_it_is_up_to_the_horizon() -> None:
    assert rows(recipe()) == [(0.0, 10, 20), (2.5, 30, 40), (9.0, 50, 60)]
    assert rows(recipe(horizon_s=9.0)) == [(0.0, 10, 20), (2.5, 30, 40)]


def test_times_and_lengths_are_scaled() -> None:
    assert rows(recipe(time_scale=2.0, length_scale=0.5, horizon_s=10)) == [(0.0, 5, 10), (5.0, 15, 20)]


def test_lengths_replace_those_of_a_trace_and_keep_its_arrivals() -> None:
    assert rows(recipe(lengths=CHATS, length_scale=10)) == [(0.0, 50, 70), (2.5, 50, 70), (9.0, 50, 70)]


def test_no_length_is_scaled_to_nothing() -> None:
    assert rows(recipe(length_scale=1e-6))[0] == (0.0, 1, 1)


@pytest.mark.parametrize(
    ("prompt", "output", "kept"),
    [
        (50, 50, (50, 50)),
        (51, 1, (50, 1)),
        (50, 51, (50, 50)),
        (10, 91, (10, 90)),
        (500, 500, (50, 50)),
    ],
    ids=["as long as can be", "prompt", "output", "long answer", "both"],
)
def test_a_prompt_is_cut_to_half_of_the_capacity_and_the_total_to_all_of_it(
    prompt: int, output: int, kept: tuple[int, int]
) -> None:
    workload = draw(recipe(ArrivalTrace((Recorded(0.0, prompt, output),)), capacity=Tokens(100)), 0)
    assert (workload.jobs[0].prompt, workload.jobs[0].output) == kept
    assert workload.capped == (kept != (prompt, output))


def test_without_the_cap_a_request_may_fill_a_replica_but_not_exceed_it() -> None:
    fits = recipe(ArrivalTrace((Recorded(0.0, 90, 10),)), capacity=Tokens(100), cap=False)
    assert rows(fits) == [(0.0, 90, 10)]
    with pytest.raises(BadInput, match="Request 0 needs 101 tokens, more than the 100 of a replica"):
        draw(replace(fits, arrivals=ArrivalTrace((Recorded(0.0, 90, 11),))), 0)


def gaps(times: Iterable[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *times])]


def test_poisson_arrivals_have_the_rate_and_the_spread_they_should() -> None:
    between = gaps(at_s for at_s, _, _ in rows(recipe(Poisson(2.0), lengths=CHATS, horizon_s=10_000)))
    assert mean(between) == pytest.approx(0.5, rel=0.03)
    assert mean([gap**2 for gap in between]) == pytest.approx(2 * 0.5**2, rel=0.06)


def test_a_seed_decides_everything() -> None:
    poisson = recipe(Poisson(1.0), lengths=Resampled(((1.0, 1.0), (2.0, 2.0))))
    assert draw(poisson, 3) == draw(poisson, 3)
    assert rows(poisson, 3) != rows(poisson, 4)


def test_rows_of_a_file_are_put_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n2.5,30,3\n0,10,1\n")
    assert list(read_trace(path).rows) == [Recorded(0.0, 10, 1), Recorded(2.5, 30, 3)]


def test_a_trace_may_have_classes(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,class,prompt_tokens,output_tokens\n0,chat,10,1\n1,,10,1\n")
    trace = read_trace(path)
    assert [row.service_class for row in trace.rows] == ["chat", ""]
    assert [job.service_class for job in draw(recipe(trace), 0).jobs] == ["chat", "default"]


def test_shares_decide_about_requests_without_a_class() -> None:
    poisson = recipe(Poisson(100.0), lengths=CHATS, shares={"chat": 0.2, "batch": 0.5})
    counts = Counter(job.service_class for job in draw(poisson, 0).jobs)
    shares = {name: count / counts.total() for name, count in counts.items()}
    assert shares == pytest.approx({"chat": 0.2, "batch": 0.5, "default": 0.3}, abs=0.03)
    plain = recipe(Poisson(100.0), lengths=CHATS)
    assert rows(poisson) == rows(plain), "classes change no other draw"
    assert {job.service_class for job in draw(plain, 0).jobs} == {"default"}


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n")
    with pytest.raises(BadInput, match="has no requests"):
        read_trace(path)


def test_a_horizon_before_the_first_arrival_is_refused() -> None:
    with pytest.raises(BadInput, match="No request arrives in the first 2 s"):
        draw(recipe(ArrivalTrace((Recorded(2.0, 1, 1),)), horizon_s=2.0), 0)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"horizon_s": 0.0}, "horizon must be a number greater than 0"),
        ({"time_scale": -1.0}, "time scale must be"),
        ({"length_scale": float("nan")}, "length scale must be"),
        ({"capacity": Tokens(7)}, "capacity must be 8 tokens or more, got 7"),
        ({"arrivals": Poisson(1.0)}, "give --lengths"),
    ],
    ids=["horizon", "time scale", "length scale", "capacity", "no lengths"],
)
def test_a_recipe_that_makes_no_sense_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        recipe(**given)


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(BadInput, match="Poisson rate must be a number greater than 0, got -1"):
        Poisson(-1.0)

"""Estimates of long simulations."""

import re
from pathlib import Path
from typing import Any

import pytest

from simulator.command import estimate
from simulator.command.estimate import in_words, require_affordable
from simulator.command.options import plan_options
from simulator.command.order import read_order
from simulator.errors import BadInput
from simulator.planning.perform import sample_runs

LEVEL = ("--ttft-p99", "3", "--processes", "2")


class Slept:
    """A clock that goes on by this many seconds whenever it is read."""

    def __init__(self, step_s: float) -> None:
        self._now, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        self._now += self._step_s
        return self._now


@pytest.fixture
def week(tmp_path: Path) -> Path:
    """A request every ten minutes for a week, and one a second for ten minutes on the third day."""
    path = tmp_path / "week.csv"
    times = sorted([*range(0, 7 * 86_400, 600), *range(2 * 86_400, 2 * 86_400 + 600)])
    path.write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at_s},50,{5 + n % 7}\n" for n, at_s in enumerate(times))
    )
    return path


def require(path: Path, *options: str) -> None:
    require_affordable(read_order(plan_options([str(path), *LEVEL, *options])), 66, sample_runs)


@pytest.mark.slow
def test_a_week_is_refused_with_an_estimate_and_a_part(week: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "perf_counter", Slept(2.0))
    with pytest.raises(BadInput) as refused:
        require(week)
    found = re.fullmatch(
        r"week\.csv: (\d+) runs of 1,608 requests in 7 days take about [\d.]+ (days|hours) on 2 processors\. Give a "
        r"part: its busiest .* (minutes|seconds) are --start (\d+) --horizon \d+\. With --horizon 604201 all of it is "
        r"simulated\.",
        str(refused.value),
    )
    assert found and int(found[1]) > 50 and 2 * 86_400 - 3600 < int(found[4]) < 2 * 86_400 + 600


@pytest.mark.slow
def test_an_explicit_horizon_is_obeyed(
    week: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimate, "perf_counter", Slept(2.0))
    require(week, "--horizon", "604201")
    assert "1,608 requests in 7 days take about" in capsys.readouterr().err


def test_a_short_simulation_is_begun_at_once(week: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread() -> Any:
        raise AssertionError("a sample was taken")

    monkeypatch.setattr(estimate, "perf_counter", unread)
    require(week, "--horizon", "600")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(30, "30 seconds"), (119, "119 seconds"), (150, "2.5 minutes"), (7200, "2 hours"), (8 * 86_400, "8 days")],
)
def test_times_are_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words

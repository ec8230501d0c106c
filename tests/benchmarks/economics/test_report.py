"""Tables."""

import pytest

from benchmarks.economics.case import RunWindow
from benchmarks.economics.report import RunFigures, compare, judge, render
from tests.benchmarks.economics.made_up import WINDOW, case

OTHER = RunWindow("other", 2.0)


def result(
    variant: str, gpu_seconds: float, repeat: int = 0, window: RunWindow = WINDOW, **figures: float
) -> RunFigures:
    return RunFigures(case(variant, window, repeat), {"gpu_seconds": gpu_seconds, **figures})


def lines(text: str, title: str) -> list[str]:
    """The line of a figure and the one below it, with cells separated by a space."""
    found = text.splitlines()
    at = next(i for i, line in enumerate(found) if line.startswith(title))
    return [" ".join(line.split()) for line in found[at : at + 2]]


def test_ratios_are_computed_by_pair() -> None:
    results = [result("worst_fit", v, i) for i, v in enumerate((100.0, 200.0, 400.0))]
    results += [result("mell", v, i) for i, v in enumerate((90.0, 100.0, 300.0))]
    values, ratios = lines(render(results, "worst_fit"), "GPU-seconds")
    assert values == "GPU-seconds 200 [100, 400] 100 [90, 300]"
    assert ratios == "0.75 [0.50, 0.90]"


def test_runs_without_a_partner_have_no_ratio() -> None:
    results = [result("worst_fit", 100.0, 0), result("mell", 50.0, 1), result("mell", 80.0, 0)]
    assert lines(render(results, "worst_fit"), "GPU-seconds")[1] == "0.80 [0.80, 0.80]"


def test_every_window_has_a_table_and_all_together_one() -> None:
    results = [result(v, 100.0, window=w) for w in (WINDOW, OTHER) for v in ("mell", "worst_fit")]
    text = render(results, "worst_fit")
    assert [line.split(":")[0] for line in text.splitlines() if "Median" in line] == ["trace", "other", "all windows"]
    assert render(results[:2], "worst_fit").count("Median") == 1


def test_missing_figure_is_a_dash() -> None:
    text = render([RunFigures(case(), {"gpu_seconds": 1.0, "ttft_p50": None})], "worst_fit")
    assert lines(text, "time to first token, p50, ms")[0] == "time to first token, p50, ms -"


def test_figures_are_in_their_units() -> None:
    text = render([RunFigures(case(), {"ttft_p50": 0.25, "cpu": 0.5})], "worst_fit")
    assert lines(text, "time to first token, p50, ms")[0].endswith("250 [250, 250]")
    assert lines(text, "processors busy, %")[0].endswith("50 [50, 50]")


def test_errors_of_predictions_are_per_run_and_signed() -> None:
    pairs = [
        RunFigures(case(repeat=i), {"gpu_seconds": was}, {"gpu_seconds": guess})
        for i, (was, guess) in enumerate(((100.0, 110.0), (200.0, 150.0), (100.0, 100.0)))
    ]
    (line, *_) = lines(compare(pairs), "GPU-seconds")
    assert line == "GPU-seconds 100 [100, 200] 110 [100, 150] 0 [-25, 10]"


def test_figures_without_a_prediction_are_not_compared() -> None:
    pair = RunFigures(
        case(), {"gpu_seconds": 1.0, "cpu": 0.5, "preemptions": 0.0}, {"gpu_seconds": 1.0, "preemptions": 2}
    )
    text = compare([pair, RunFigures(case("serve"), {"gpu_seconds": 1.0})])
    assert "processors" not in text
    assert "serve" not in text
    assert lines(text, "preemptions")[0] == "preemptions 0 [0, 0] 2 [2, 2] -"


def judged(moves: float = 100.0, gpu_s: float = 1000.0) -> list[str]:
    """The lines about two runs and a prediction of two seeds, one of them a tenth above these means."""

    def made(repeat: int, gpu_seconds: float, migrations: float) -> RunFigures:
        parts = {"migrations_kv": 0.0, "migrations_tokens": migrations}
        return RunFigures(case(repeat=repeat), {"gpu_seconds": gpu_seconds, "migrations": migrations, **parts})

    runs = [made(0, 990.0, 90.0), made(1, 1010.0, 110.0)]
    seeds = [made(number, gpu_s * factor, moves * factor) for number, factor in enumerate((0.9, 1.1))]
    text = judge(runs, seeds)
    return [lines(text, title)[0] for title in ("GPU-seconds", "migrations, committed")]


@pytest.mark.parametrize(("moves", "agrees"), [(76.0, False), (77.0, True), (126.0, True), (127.0, False)])
def test_moves_agree_in_the_widened_range(moves: float, agrees: bool) -> None:
    assert judged(moves=moves)[1] == (
        f"migrations, committed 100 [90, 110] {moves:.1f} 76.5, 126.5 {'agrees' if agrees else 'DIFFERS'}"
    )


@pytest.mark.parametrize(("gpu_s", "agrees"), [(979.0, False), (980.0, True), (1020.0, True), (1021.0, False)])
def test_gpu_seconds_agree_within_a_share_of_their_mean(gpu_s: float, agrees: bool) -> None:
    assert judged(gpu_s=gpu_s)[0].endswith("980.0, 1,020.0 " + ("agrees" if agrees else "DIFFERS"))


def test_only_runs_of_the_same_case_are_compared() -> None:
    text = judge([result("mell", 1.0, window=OTHER)], [result("mell", 1.0)])
    assert text == "There are no runs of these cases to compare with."

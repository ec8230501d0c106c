"""Drawing request lengths from quantiles and from traces."""

from pathlib import Path
from random import Random

import pytest

from simulator.errors import BadInput
from simulator.workload.lengths import SHIPPED, Curve, Quantiles, Resampled, read_lengths

HEADER = "percentile,tail_prompt_tokens,tail_output_tokens\n"


def write(folder: Path, text: str) -> str:
    path = folder / "lengths.csv"
    path.write_text(text)
    return str(path)


@pytest.fixture
def quantiles(tmp_path: Path) -> Quantiles:
    lengths = read_lengths(write(tmp_path, HEADER + "20,5,100\n50,10,200\n90,50,1000\n"))
    assert isinstance(lengths, Quantiles)
    return lengths


@pytest.mark.parametrize(("share", "tokens"), [(0.2, 5), (0.5, 10), (0.9, 50)])
def test_quantiles_are_hit(quantiles: Quantiles, share: float, tokens: float) -> None:
    assert quantiles.prompt.at(share) == pytest.approx(tokens)
    assert quantiles.output.at(share) == pytest.approx(20 * tokens)


@pytest.mark.parametrize(
    ("share", "tokens"),
    [(0.0, 1), (0.1, 3), (0.7, 30), (0.95, 55), (1.0, 60)],
    ids=["least", "below the first", "between", "above the last", "most"],
)
def test_lines_connect_the_quantiles_and_the_last_goes_on(quantiles: Quantiles, share: float, tokens: float) -> None:
    assert quantiles.prompt.at(share) == pytest.approx(tokens)


def test_a_table_up_to_100_percent_has_no_tail(tmp_path: Path) -> None:
    lengths = read_lengths(write(tmp_path, HEADER + "50,10,20\n100,30,40\n"))
    assert isinstance(lengths, Quantiles)
    assert lengths.prompt == Curve((0.0, 0.5, 1.0), (1.0, 10.0, 30.0))


@pytest.mark.parametrize("name", ["prompt", "output"])
def test_the_shipped_curves_never_fall(name: str) -> None:
    curve: Curve = getattr(read_lengths(SHIPPED), name)
    values = [curve.at(step / 1000) for step in range(1001)]
    assert values == sorted(values)
    assert values[0] >= 1


def test_the_shipped_table_has_the_documented_medians() -> None:
    chance, lengths = Random(1), read_lengths(SHIPPED)
    drawn = [lengths.draw(chance) for _ in range(10_000)]
    medians = [sorted(values)[5_000] for values in zip(*drawn, strict=True)]
    assert medians == pytest.approx([32, 200], rel=0.05)


def test_prompt_and_output_are_drawn_independently(quantiles: Quantiles) -> None:
    chance = Random(1)
    drawn = [quantiles.draw(chance) for _ in range(4_000)]
    both_long = sum(prompt > 10 and output > 200 for prompt, output in drawn)
    assert both_long == pytest.approx(1_000, rel=0.1)


def test_equal_seeds_draw_equal_lengths(quantiles: Quantiles) -> None:
    first, again, other = ([quantiles.draw(chance) for _ in range(9)] for chance in map(Random, (1, 1, 2)))
    assert first == again != other


def test_rows_of_a_trace_keep_prompt_and_output_together(tmp_path: Path) -> None:
    lengths = read_lengths(write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n0,10,1\n1,20,2\n"))
    chance = Random(1)
    assert isinstance(lengths, Resampled)
    assert {lengths.draw(chance) for _ in range(50)} == {(10, 1), (20, 2)}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (HEADER, "has no rows"),
        ("percentile,tail_prompt_tokens\n50,1\n", r"lacks the column\(s\) tail_output_tokens"),
        ("prompt_tokens,total\n1,2\n", "is no trace: it has no output tokens .* Its columns are prompt_tokens, total"),
        (HEADER + "50,1,x\n", "line 2: percentile, tail_prompt_tokens, tail_output_tokens are not all numbers"),
        (HEADER + "0,1,1\n", "percentiles must rise from above 0"),
        (HEADER + "50,1,1\n50,2,2\n", "percentiles must rise"),
        (HEADER + "50,1,1\n101,2,2\n", "to 100 at most"),
        (HEADER + "50,9,1\n90,8,2\n", "quantiles must not fall"),
    ],
    ids=["empty", "no column", "neither kind", "word", "zero", "twice", "above 100", "falling"],
)
def test_a_bad_table_is_refused_with_a_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        read_lengths(write(tmp_path, text))

"""The soak's file, and its report."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.forcing import RoundShape, draw_offers
from benchmarks.soak.report import count_moves, is_good, read_lines, render

SETTING = {"setting": {"engine": "paced", "seed": 0}}


def move(outcome: str = "committed", path: str = "kv", pause_s: float | None = 0.01, error: str | None = None) -> Any:
    return {"id": "m", "asked": path, "path": path, "outcome": outcome, "pause_s": pause_s, "error": error}


def round_of(*moves: Any, number: int = 1, bad: list[str] | None = None, leaks: list[str] | None = None) -> Any:
    return {
        "run": 1,
        "number": number,
        "memory_mb": {"Engine 1": {"anonymous": 100.0 + number, "shared": 1.0}},
        "verdicts": ["exact"],
        "moves": list(moves),
        "rejected": {"422": 1},
        "bad": bad or [],
        "leaks": leaks or [],
    }


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "soak.jsonl"
    assert read_lines(file) == []
    file.write_text('{"setting": 1}\n{"moves": [1, 2]}\n{"moves": [3')
    lines = read_lines(file)
    assert lines == [{"setting": 1}, {"moves": [1, 2]}]
    assert count_moves(lines) == 2


def test_other_malformed_line_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "soak.jsonl"
    file.write_text('{"setting": 1}\n{"moves": [1\n{"moves": []}\n')
    with pytest.raises(ValueError, match="delimiter"):
        read_lines(file)


def test_fault_of_any_round_makes_the_soak_bad() -> None:
    assert is_good([SETTING, round_of(move()), round_of(move(), number=2)])
    assert not is_good([SETTING, round_of(move(), bad=["s: wrong tokens"]), round_of(move(), number=2)])
    assert not is_good([SETTING, round_of(move()), round_of(move(), number=2, leaks=["1 staging slots"])])


def test_report_has_moves_by_path_and_outcome() -> None:
    refused = move("refused", pause_s=None, error="no room for 900 tokens")
    lines = [
        SETTING,
        round_of(move(pause_s=0.01), move(pause_s=0.03)),
        round_of(refused, move(path="tokens"), number=2),
    ]
    page = "\n".join(render(lines))
    assert page.startswith("4 moves in 2 rounds; streams: 2 x exact")
    assert "kv ordered, by kv     committed       2   pause ms p50 30.0, p90 30.0, p99 30.0, max 30.0" in page
    assert "1 x no room for 900 tokens" in page
    assert "2 x 422" in page
    assert "anonymous     101.0    102.0\n" in page


def test_report_has_the_memory_of_the_control_beside_it() -> None:
    soak = [SETTING, *(round_of(number=number) for number in range(1, 8))]
    control = [SETTING, *(round_of(number=10 * number) for number in range(1, 5))]
    page = "\n".join(render(soak, control))
    assert "  Engine 1                        anonymous     101.0    103.0    105.0    107.0   (" in page
    assert "(110.0    120.0    130.0    140.0)" in page
    assert "in brackets: of the control, of 4 rounds" in page


def test_memory_is_that_of_the_newest_run() -> None:
    page = "\n".join(render([SETTING, round_of() | {"run": 1}, round_of(number=5) | {"run": 2}]))
    assert "of 1 rounds" in page and "101.0" not in page and "105.0" in page


def test_report_of_no_rounds() -> None:
    assert next(iter(render([SETTING]))) == "0 moves in 0 rounds; streams: none"


def test_requests_of_rounds_are_unique() -> None:
    shape = RoundShape(streams=5)
    assert draw_offers(0, 1, shape) == draw_offers(0, 1, shape)
    offers = [*draw_offers(0, 1, shape), *draw_offers(0, 2, shape), *draw_offers(1, 1, shape)]
    assert len({offer.prompt for offer in offers}) == len({offer.label for offer in offers}) == 15

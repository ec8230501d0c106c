"""The picture of the dashboard: its queries, what counts as data, and the file."""

import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.dashboard import Series, ask, draw, legends, query_of


def prometheus(*results: tuple[dict[str, str], list[float]]) -> httpx.Client:
    """One that answers every query with these series, a value every 2 s from second 0."""
    found = [
        {"metric": labels, "values": [[2 * at, str(value)] for at, value in enumerate(values)]}
        for labels, values in results
    ]
    answer: dict[str, Any] = {"data": {"result": found}}
    return httpx.Client(base_url="http://x", transport=httpx.MockTransport(lambda _: httpx.Response(200, json=answer)))


def test_no_variable_of_grafana_is_left_in_a_query() -> None:
    queries = [query_of(expression, 300) for expression in legends()]
    assert not [query for query in queries if "$" in query] and any("[300s]" in query for query in queries)


def test_a_series_without_numbers_is_no_data() -> None:
    with prometheus(({"path": "kv"}, [math.nan, math.nan]), ({"path": "tokens"}, [math.nan, 1.5])) as http:
        assert ask(http, "q", "p50 {{path}}", 2.0, 300) == [Series("p50 tokens", (0.0,), (1.5,))]


@pytest.mark.slow
def test_the_picture_has_every_panel(tmp_path: Path) -> None:
    series = [Series("a", (-2.0, 0.0), (1.0, 2.0)), Series("b", (0.0,), (3.0,))]
    draw(tmp_path / "a.png", {expression: series for expression in legends()}, 300)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

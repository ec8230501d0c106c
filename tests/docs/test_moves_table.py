"""The table "What moves how" of docs/limits.md has the rows that the tests run."""

import pytest

from tests.docs.markdown import ROOT
from tests.integration.models.rows import ROWS, Row, table

TESTED = [row for row in ROWS if row.test is not None]
UNTESTED = [row for row in ROWS if row.test is None]


def test_the_page_has_the_rows_that_the_tests_run() -> None:
    assert table() in (ROOT / "docs/limits.md").read_text(), "copy the output of table() into the page"


def test_a_feature_has_one_row() -> None:
    assert len({row.feature for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", TESTED, ids=lambda row: row.feature)
def test_a_row_is_in_its_test(row: Row) -> None:
    assert row.test is not None
    assert f'"{row.feature}"' in (ROOT / row.test).read_text()


@pytest.mark.parametrize("row", UNTESTED, ids=lambda row: row.feature)
def test_a_row_without_a_test_is_marked(row: Row) -> None:
    assert row.tested == "not run"

"""Records: every row survives its file, and a record is continued only by the same version on the same machine."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from benchmarks.gpu.record import OriginRow, OtherOrigin, PartRow, Row, RunRecord, Spread
from tests.benchmarks.gpu.rows import ORIGIN, ROWS


def written(path: Path) -> RunRecord:
    record = RunRecord.resume(path, ORIGIN)
    for row in ROWS[1:]:
        record.add(row)
    return record


def test_every_type_of_row_is_written_and_read(tmp_path: Path) -> None:
    assert {type(row) for row in ROWS} == set(get_args(Row))
    written(tmp_path / "results.jsonl")
    assert RunRecord.read(tmp_path / "results.jsonl").rows == list(ROWS)


def test_record_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    written(path)
    path.write_text(path.read_text() + '{"kind": "par')
    record = RunRecord.resume(path, replace(ORIGIN, date="another day"))
    assert record.origin == ORIGIN and record.done == {"moves"}
    record.add(PartRow("texts", "whole", 1.0))
    assert RunRecord.read(path).rows == [*ROWS, PartRow("texts", "whole", 1.0)]


@pytest.mark.parametrize("change", [{"commit": "other"}, {"device": "cpu"}, {"machine": ["A100"]}], ids=str)
def test_record_of_another_origin_is_refused(tmp_path: Path, change: dict[str, str]) -> None:
    written(tmp_path / "results.jsonl")
    with pytest.raises(OtherOrigin, match=r"commit abc1234 on cuda \(H100"):
        RunRecord.resume(tmp_path / "results.jsonl", OriginRow(**(vars_of(ORIGIN) | change)))  # type: ignore[arg-type]


def vars_of(row: OriginRow) -> dict[str, object]:
    return {name: getattr(row, name) for name in ("date", "commit", "device", "machine", "software")}


def test_failed_part_is_not_done() -> None:
    parts = [PartRow("a", "whole", 1), PartRow("b", "cut", 1), PartRow("c", "failed", 1)]
    assert RunRecord([ORIGIN, *parts]).done == {"a", "b"}


def test_line_that_is_no_row_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "r").write_text('{"kind": "made up"}\n')
    with pytest.raises(ValidationError):
        RunRecord.read(tmp_path / "r")
    with pytest.raises(ValueError, match="begins with its origin"):
        _ = RunRecord(ROWS[1:]).origin


def test_spread() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3, 1, 2.000004]) == Spread(3, 2.0, 1.0, 3.0)

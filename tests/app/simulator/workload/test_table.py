"""Reading columns of numbers from CSV files."""

import gzip
from pathlib import Path

import pytest
from app.simulator.workload.table import read_table

from app.simulator.errors import BadInput

TEXT = "b,a,c\n1,2.5,x\n3,4,y\n"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["no mark", "byte order mark"])
def test_columns_are_found_by_name(tmp_path: Path, pack: type[bytes], mark: bytes) -> None:
    path = tmp_path / "table"
    path.write_bytes(pack(mark + TEXT.encode()))
    assert read_table(path).numbers("a", "b") == [(2.5, 1.0), (4.0, 3.0)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a\n1\n", r"lacks the column\(s\) b"),
        (b"", r"lacks the column\(s\) a, b"),
        (b"a,b\n1,2\n1,two\n", r"row 1 is not all numbers \(a, b\)"),
        (b"a,b\n1\n", "row 0 is not all numbers"),
        (b"a,b\n1,-2\n", "row 0 has a negative or infinite value"),
        (b"a,b\nnan,2\n", "row 0 has a negative or infinite value"),
        (b"a,b\n\xff,2\n", "is damaged"),
        (gzip.compress(b"a,b\n" * 99)[:-9], "is damaged"),
    ],
    ids=["no column", "empty", "word", "short row", "negative", "nan", "binary", "cut off"],
)
def test_a_bad_file_is_refused_with_a_reason(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=complaint):
        read_table(path).numbers("a", "b")


@pytest.mark.parametrize(("name", "reason"), [("nowhere.csv", "No such file"), (".", "Is a directory")])
def test_a_path_that_is_no_file_is_refused_by_name(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(BadInput, match=f"{tmp_path / name} cannot be read: {reason}"):
        read_table(tmp_path / name)

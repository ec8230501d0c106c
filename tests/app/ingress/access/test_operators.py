"""The admin key of a file: it is read again when it has changed, and no invalid file opens or closes anything."""

import logging
from pathlib import Path

import pytest
from starlette.requests import Request

from app.ingress.access.keys import InvalidKeys
from app.ingress.access.operators import OperatorAccess, parse_admin_key, read_admin_key
from app.ingress.errors import ApiError

FIRST, SECOND = "first-secret", "second-secret"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "admin.key"
    path.write_text(f"{FIRST}\n")
    return path


def call(key: str, address: str = "10.0.0.1") -> Request:
    headers = [(b"authorization", f"Bearer {key}".encode())]
    return Request({"type": "http", "headers": headers, "client": (address, 1)})


def admits(access: OperatorAccess, key: str) -> bool:
    try:
        access.check(call(key))
    except ApiError:
        return False
    return True


def test_a_changed_file_replaces_the_key(path: Path) -> None:
    access = OperatorAccess(file=str(path))
    assert admits(access, FIRST) and not admits(access, SECOND)
    path.write_text(SECOND)
    access.reload()
    assert admits(access, SECOND) and not admits(access, FIRST)


def test_a_mounted_secret_that_is_replaced_as_a_link_is_read_again(tmp_path: Path) -> None:
    """As Kubernetes does it: the file is a link through a link to a folder, and that link is replaced."""
    for name, key in (("1", FIRST), ("2", SECOND)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "admin.key").write_text(key)
    data, file = tmp_path / "data", tmp_path / "admin.key"
    data.symlink_to("1")
    file.symlink_to("data/admin.key")
    access = OperatorAccess(file=str(file))
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").rename(data)
    access.reload()
    assert admits(access, SECOND) and not admits(access, FIRST)


@pytest.mark.parametrize("text", ["", "short", "two\nlines-of-it", None])
def test_an_invalid_change_is_logged_once_and_changes_nothing(
    path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    access = OperatorAccess(file=str(path))
    path.unlink() if text is None else path.write_text(text)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        access.reload()
        access.reload()
    assert admits(access, FIRST) and not admits(access, "")
    (record,) = caplog.records
    assert "the admin key remains unchanged" in record.message and str(path) in record.message


@pytest.mark.parametrize("text", ["", "   ", "seven77", "with\nnewline", "schlüssel-geheim"])
def test_an_invalid_key_is_refused_without_its_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "admin.key"
    path.write_text(text)
    for read in (lambda: read_admin_key(str(path)), lambda: OperatorAccess(file=str(path))):
        with pytest.raises(InvalidKeys, match="8 or more printable ASCII") as error:
            read()
        assert not text.strip() or text not in str(error.value)


def test_blanks_around_a_key_are_no_part_of_it() -> None:
    assert parse_admin_key(f"  {FIRST} \n", "here") == FIRST

"""The command lines in docs/cli.md are valid, and the page shows every command."""

import re
import shlex
from pathlib import Path

import pytest

from tests.app.cli.shown import commands, takes

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
SHOWN = re.findall(r"^\$ mell (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("shown", SHOWN)
def test_a_documented_command_line_is_valid(shown: str) -> None:
    takes(shlex.split(re.split(r" \||>>", shown)[0], comments=True))


@pytest.mark.parametrize("words", [["statsu"], ["status", "--jsn"], ["move"], ["--versoin"]], ids=" ".join)
def test_an_invalid_command_line_would_be_found(words: list[str]) -> None:
    with pytest.raises(BaseException):  # noqa: B017, PT011
        takes(words)


def test_every_command_is_documented() -> None:
    assert {shown.split()[0] for shown in SHOWN} >= commands()

"""The command lines in docs/cli.md are valid, and the page shows every command."""

import re
import shlex
from pathlib import Path

import pytest
from rich.console import Group

from app.cli.models import model_rows, render_models
from app.cli.status import device_tables, memory_of_nodes, memory_table
from app.client.documents import parse_state
from tests.app.cli.conftest import drawn
from tests.app.cli.shown import commands, takes
from tests.app.client.sample import NOW, SHARING

DOCS = Path(__file__).parents[3] / "docs"
PAGE, MEMORY = ((DOCS / name).read_text("utf-8") for name in ("cli.md", "memory.md"))
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


def test_the_examples_of_memory_are_what_the_commands_show_of_one_state() -> None:
    state = parse_state(SHARING)
    models = drawn(render_models(state, model_rows(state), NOW), 100)
    seats = {seat.replica: seat for node in state.nodes for seat in node.seats}
    memory = f"{drawn(memory_table(state.replicas, seats), 100)}\n{drawn(memory_of_nodes(state.nodes))}"
    assert f"$ mell models\n{models}\n$ mell memory\n{memory}\n```" in MEMORY
    assert f"```\n{drawn(Group(*device_tables(state, headed=True)[1:]))}\n```" in MEMORY
    assert f"$ mell models\n{models}\n```" in PAGE

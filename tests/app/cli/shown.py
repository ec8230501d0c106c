"""Parses documented command lines of `mell` without running them."""

from collections.abc import Sequence
from typing import Any

import typer

from app.cli.__main__ import app


def commands() -> set[str]:
    """The names of all commands."""
    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def takes(words: Sequence[str]) -> None:
    """Parse the arguments of a `mell` command line. Raises the parser's error."""
    whole = typer.main.get_command(app)
    if words[0].startswith("-"):
        assert words[0] in [name for option in whole.get_params(typer.Context(whole)) for name in option.opts]
        return
    command: Any = whole
    while hasattr(command, "commands"):
        command, name, words = command.commands[words[0]], words[0], words[1:]
    command.make_context(name, list(words))

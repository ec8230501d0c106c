"""The terminal of a command: its output, and the clock of its waits."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import typer
from rich.console import Console, RenderableType

from app.cli.errors import CliError, NotThere

PATIENCE_S = 10.0
"""Longest silence of an endpoint during a wait."""
WAIT_INTERVAL_S = 0.5
"""Interval of polls during a wait for an order."""
WATCH_INTERVAL_S = 1.0
"""Interval of polls of `mell top` and `mell migrations --follow`."""
INTERRUPTED = 130

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Terminal:
    """Writes text or, with `as_json`, JSON documents to standard output. `clock` and `sleep` are in seconds."""

    as_json: bool = False
    console: Console = field(default_factory=lambda: Console(highlight=False))
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def show(self, *lines: RenderableType, wraps: bool = True) -> None:
        """Write text, unless `as_json`. It `wraps` at the width of the terminal, or does not, as in a log."""
        if not self.as_json:
            for line in lines:
                self.console.print(line, soft_wrap=not wraps)

    def write(self, document: Mapping[str, Any] | Iterable[Any] | str) -> None:
        """Write a document on one line, if `as_json`; a string is written unchanged."""
        if self.as_json:
            text = document if isinstance(document, str) else json.dumps(document)
            self.console.file.write(text + "\n")
            self.console.file.flush()

    def poll(self, call: Callable[[], Answer], interval_s: float, patience_s: float = PATIENCE_S) -> Iterator[Answer]:
        """Call the endpoint repeatedly. Raises NotThere once it has not answered for more than `patience_s`."""
        answered_s = self.clock()
        while True:
            try:
                answer = call()
            except NotThere:
                if self.clock() - answered_s > patience_s:
                    raise
            else:
                answered_s = self.clock()
                yield answer
            self.sleep(interval_s)


@contextmanager
def exit_status(terminal: Terminal, on_interrupt: int = INTERRUPTED) -> Iterator[None]:
    """Turn an error inside the block into the command's message and exit status."""
    try:
        yield
    except CliError as error:
        terminal.write(error.body)
        if not terminal.as_json:
            print(f"mell: {error}", file=sys.stderr)
        raise typer.Exit(error.status) from None
    except KeyboardInterrupt:
        raise typer.Exit(on_interrupt) from None

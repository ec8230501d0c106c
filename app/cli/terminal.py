"""The operator's side of a command: where it writes, and the clock it waits by."""

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
"""How long an endpoint that has answered before may be silent while something is waited for."""
INTERRUPTED = 130

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Terminal:
    """Text, or with `as_json` documents, to standard output. `clock` and `sleep` are in seconds."""

    as_json: bool = False
    console: Console = field(default_factory=lambda: Console(highlight=False))
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def show(self, *lines: RenderableType) -> None:
        """Write text; nothing where documents are wanted."""
        if not self.as_json:
            for line in lines:
                self.console.print(line)

    def tell(self, document: Mapping[str, Any] | Iterable[Any] | str) -> None:
        """Write a document on a line of its own, a text as it is; nothing where text is wanted."""
        if self.as_json:
            text = document if isinstance(document, str) else json.dumps(document)
            self.console.file.write(text + "\n")
            self.console.file.flush()

    def looks(self, ask: Callable[[], Answer], every_s: float, patience_s: float = PATIENCE_S) -> Iterator[Answer]:
        """Ask again and again. Raises NotThere once nobody has answered for more than `patience_s`."""
        heard_s = self.clock()
        while True:
            try:
                answer = ask()
            except NotThere:
                if self.clock() - heard_s > patience_s:
                    raise
            else:
                heard_s = self.clock()
                yield answer
            self.sleep(every_s)


@contextmanager
def told(terminal: Terminal, on_interrupt: int = INTERRUPTED) -> Iterator[None]:
    """End the command with the status and the message of the error that ended the block."""
    try:
        yield
    except CliError as error:
        terminal.tell(error.body)
        if not terminal.as_json:
            print(f"mell: {error}", file=sys.stderr)
        raise typer.Exit(error.status) from None
    except KeyboardInterrupt:
        raise typer.Exit(on_interrupt) from None

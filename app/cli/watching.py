"""The commands that look: status, migrations, timeline, top."""

import json
import math
import time
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live

from app.cli.endpoint import Endpoint
from app.cli.errors import CliError, Failed
from app.cli.following import Follower
from app.cli.rates import Looks
from app.cli.terminal import Terminal
from app.cli.views.migrations import show_migrations
from app.cli.views.status import show_status
from app.cli.views.timeline import ended
from app.cli.views.timeline import timeline as timeline_of
from app.cli.views.top import Picture, show_top
from app.client.documents import Records

EVERY_S = 1.0


def status(endpoint: Endpoint, terminal: Terminal) -> None:
    """The replicas, once."""
    if terminal.as_json:
        terminal.tell(endpoint.state_document())
        return
    state, records = endpoint.state(), endpoint.migrations()
    terminal.show(show_status(endpoint.url, state, records, time.time()))


def migrations(endpoint: Endpoint, terminal: Terminal, last: int) -> None:
    """The newest migrations, newest first."""
    records = endpoint.migrations()[:last]
    terminal.tell({"migrations": [record.to_json() for record in records]})
    terminal.show(*show_migrations(records, terminal.console.width))


def timeline(endpoint: Endpoint, terminal: Terminal, file: Path) -> None:
    """All migrations that are remembered, in a file that trace viewers open."""
    records = ended(endpoint.migrations())
    try:
        file.write_text(json.dumps(timeline_of(records)) + "\n")
    except OSError as error:
        raise Failed(f"{file} cannot be written: {error.strerror}") from error
    terminal.tell({"file": str(file), "migrations": len(records)})
    terminal.show(f"{len(records)} migrations in {file}; Perfetto and chrome://tracing open it")


def follow(endpoint: Endpoint, terminal: Terminal, last: int) -> None:
    """The newest migrations, oldest first, then each as it ends, until interrupted."""
    follower = Follower()
    ended = tuple(record for record in endpoint.migrations() if record.outcome is not None)
    follower.skip(ended[last:])
    terminal.show(*show_migrations((), terminal.console.width))
    for records in terminal.looks(endpoint.migrations, EVERY_S, math.inf):
        _tell_each(terminal, follower.feed(records))


def _tell_each(terminal: Terminal, records: Records) -> None:
    for record in records:
        terminal.tell(record.to_json())
        terminal.show(*show_migrations((record,), terminal.console.width, headed=False))


def top(endpoint: Endpoint, terminal: Terminal) -> None:
    """The cluster as it is, until interrupted; with JSON, the document at `/mell/state` every second."""
    if terminal.as_json:
        endpoint.state()  # only who was there once is waited for
        for document in terminal.looks(endpoint.state_document, EVERY_S, math.inf):
            terminal.tell(document)
    watch = Watch(endpoint, terminal)
    # The screen is drawn anew by a thread, so that it goes on counting while an answer is waited for.
    screen = terminal.console.is_terminal
    with Live(get_renderable=watch.render, console=terminal.console, screen=screen, refresh_per_second=2) as live:
        while True:
            terminal.sleep(EVERY_S)
            watch.look()
            live.refresh()


class Watch:
    """Looks at an endpoint again and again. Raises CliError if the first look already fails."""

    def __init__(self, endpoint: Endpoint, terminal: Terminal) -> None:
        self._endpoint = endpoint
        self._terminal = terminal
        self._looks = Looks()
        self.picture = self._seen()

    def look(self) -> None:
        """Have a new picture, or the old one with what is amiss."""
        try:
            self.picture = self._seen()
        except CliError as error:
            seen = self.picture
            self.picture = Picture(seen.state, seen.records, seen.rates, seen.seen_s, str(error))

    def _seen(self) -> Picture:
        state, records = self._endpoint.state(), self._endpoint.migrations()
        now_s = self._terminal.clock()
        return Picture(state, records, self._looks.add(now_s, state), now_s)

    def render(self) -> RenderableType:
        """The page as of now."""
        terminal = self._terminal
        return show_top(self._endpoint.url, self.picture, terminal.clock(), time.time(), terminal.console.height)

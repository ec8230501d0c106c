"""`mell doctor` as a command."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from app.cli.doctor.examine import examine, examine_config, examine_endpoint
from app.cli.doctor.findings import Finding, Level
from app.cli.doctor.machine import Machine, Probes
from app.cli.endpoint import Endpoint
from app.cli.errors import NotThere
from app.cli.terminal import Terminal
from app.cli.views.numbers import plural
from app.client.api import check_url, is_loopback

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def diagnose(endpoint: Endpoint, terminal: Terminal, config: Path | None, probes: Probes | None = None) -> None:
    """Check everything and show it. Raises typer.Exit with status 1 if there are problems."""
    found = list(_findings(endpoint, config, probes or Machine()))
    terminal.tell({"findings": [asdict(finding) for finding in found]})
    terminal.show(show_findings(found), Text(), summary(found))
    if any(finding.level is Level.PROBLEM for finding in found):
        raise typer.Exit(1)


def _findings(endpoint: Endpoint, config: Path | None, probes: Probes) -> Iterator[Finding]:
    yield from examine(probes)
    if config is not None:
        yield examine_config(config)
    url = check_url(endpoint.url)
    port = (url.port or (443 if url.scheme == "https" else 80)) if is_loopback(endpoint.url) else None
    answers, trouble = _health(endpoint)
    yield from examine_endpoint(probes, endpoint.url, port, answers, trouble)


def _health(endpoint: Endpoint) -> tuple[bool, str | None]:
    """Whether somebody answers, and why requests cannot be served, None if they can."""
    try:
        return True, endpoint.health()
    except NotThere as error:
        return False, str(error)


def show_findings(found: Iterable[Finding]) -> Table:
    """A row for each, with the remedy below what was seen."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for finding in found:
        remedy = (f"\n→ {finding.remedy}", "bold") if finding.remedy else ""
        table.add_row(
            Text(finding.level, _STYLES[finding.level]), Text(finding.name), Text.assemble(finding.message, remedy)
        )
    return table


def summary(found: Iterable[Finding]) -> Text:
    """How many of which."""
    levels = [finding.level for finding in found]
    problems, warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    return Text(f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}")

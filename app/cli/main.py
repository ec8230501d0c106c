"""`mell`: the command line, its options and its exit status.

Exit status: 0 when it was done; 1 when it was refused, failed, or problems were found; 2 for wrong usage; 3 when there
is no Mell at the URL; 130 when a wait was interrupted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from app.cli import ordering, passing, watching
from app.cli.doctor.command import diagnose
from app.cli.endpoint import Endpoint
from app.cli.terminal import Terminal, told
from app.client.api import check_url
from app.versions import VERSION
from migration.messages import PathRequest

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(
    name="mell",
    help="Look at a running Mell, move its requests, and check an installation.",
    epilog="Exit status: 0 done, 1 refused or failed, 2 wrong usage, 3 no Mell at the URL, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _check_url(url: str) -> str:
    try:
        check_url(url)
    except ValueError:
        raise typer.BadParameter(f"{url!r} is not an address like {DEFAULT_URL}") from None
    return url


def _check_key(key: str | None) -> str | None:
    if key is not None and not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("an admin key holds printable ASCII characters only")
    return key


Url = Annotated[str, typer.Option(envvar="MELL_URL", callback=_check_url, help="Where Mell listens, without /v1.")]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="MELL_ADMIN_KEY", callback=_check_key, help="ingress.admin_key, where one is set."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs; errors too.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end, which the exit status tells.")]
Rest = Annotated[list[str] | None, typer.Argument(metavar="...", help="What the program takes; see its --help.")]
_REST = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mell {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version, and end.")
    ] = False,
) -> None:
    pass


@app.command()
def status(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Show replicas and what they hold.

    --json prints the document at /mell/state.
    """
    with told(terminal := Terminal(as_json)), Endpoint(url, admin_key) as endpoint:
        watching.status(endpoint, terminal)


@app.command()
def top(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Watch replicas, rates and moves.

    Looks every second until Ctrl-C; --json prints the document at /mell/state, one per line.
    """
    with told(terminal := Terminal(as_json), on_interrupt=0), Endpoint(url, admin_key) as endpoint:
        watching.top(endpoint, terminal)


@app.command()
def migrations(
    last: Annotated[int, typer.Option(min=0, help="At most so many of those that have been.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with each that ends, until Ctrl-C.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """List migrations.

    Newest first; with --follow as they end, and --json prints one record per line.
    """
    with told(terminal := Terminal(as_json), on_interrupt=0), Endpoint(url, admin_key) as endpoint:
        (watching.follow if follow else watching.migrations)(endpoint, terminal, last)


@app.command()
def timeline(
    file: Annotated[Path, typer.Argument(help="Where to write it; what is there is replaced.")] = Path("mell.json"),
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Write migrations as a timeline.

    In the format of `ray timeline`, for Perfetto or chrome://tracing: a row for each replica that requests left.
    """
    with told(terminal := Terminal(as_json)), Endpoint(url, admin_key) as endpoint:
        watching.timeline(endpoint, terminal, file)


@app.command()
def move(
    request: Annotated[str, typer.Argument(help="Id or X-Request-Id of the request.")],
    target: Annotated[str | None, typer.Argument(help="Id of a replica; without it, the policy chooses.")] = None,
    path: Annotated[PathRequest, typer.Option(help="How its context gets there.")] = PathRequest.AUTO,
    wait: Wait = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Move a request to another replica."""
    with told(terminal := Terminal(as_json)), Endpoint(url, admin_key) as endpoint:
        ordering.move(endpoint, terminal, request, target, path, wait)


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="Id of the replica.")],
    wait: Wait = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Empty a replica, and stop it.

    Its requests move to others while they run.
    """
    with told(terminal := Terminal(as_json)), Endpoint(url, admin_key) as endpoint:
        ordering.drain(endpoint, terminal, replica, wait)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="A serve_config.yaml to check, too.")] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Check this installation.

    Says what to do about what it finds; the exit status is 1 if there are problems.
    """
    with told(terminal := Terminal(as_json)), Endpoint(url) as endpoint:
        diagnose(endpoint, terminal, config)


@app.command(context_settings=_REST)
def replay(rest: Rest = None) -> None:
    """Replay a trace (app.replay)."""
    passing.become("app.replay", passing.at_url(rest or ()))


@app.command(context_settings=_REST)
def simulate(rest: Rest = None) -> None:
    """Simulate a workload (app.simulator)."""
    passing.become("app.simulator", rest or ())


@app.command(context_settings=_REST)
def keys(rest: Rest = None) -> None:
    """Make an API key (app.keys)."""
    passing.become("app.keys", rest or ())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; ends the process."""
    # A terminal that cannot show a character shows a question mark.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(args=arguments, prog_name="mell")

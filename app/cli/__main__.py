"""`mell`: the command line, its options and its exit status.

Exit status: 0 for success; 1 if refused or failed, or for problems found; 2 for wrong usage; 3 without Mell at the URL;
130 for an interrupted wait.
"""

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli import cache as cache_commands
from app.cli import migrations as migrations_command
from app.cli import models as models_command
from app.cli import orders, programs
from app.cli import status as status_command
from app.cli import timeline as timeline_command
from app.cli import top as top_command
from app.cli import watch as watch_command
from app.cli.doctor.command import diagnose
from app.cli.endpoint import MellEndpoint
from app.cli.terminal import Terminal, exit_status
from app.client.api import check_url
from app.versions import VERSION
from app.vllm_cli.help import short_help
from migration.protocol.messages import PathRequest
from policies.precedence import DEFAULT_CLASS

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(
    name="mell",
    help="Watch a running Mell, move its requests, and check an installation.",
    epilog="Exit status: 0 success, 1 refused or failed, 2 wrong usage, 3 no Mell at the URL, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
node = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(node, name="node", help="Empty a node that goes away.")
app.add_typer(cache, name="cache", help="Look into the prefix caches, copy between them, pin and delete blocks.")


def _check_url(url: str) -> str:
    try:
        check_url(url)
    except ValueError:
        raise typer.BadParameter(f"{url!r} is not a URL like {DEFAULT_URL}") from None
    return url


def _check_to(url: str | None) -> str | None:
    return None if url is None else _check_url(url)


def _check_key(key: str | None) -> str | None:
    if key is not None and not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("an admin key consists of printable ASCII characters")
    return key


Url = Annotated[str, typer.Option(envvar="MELL_URL", callback=_check_url, help="URL of the ingress, without /v1.")]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="MELL_ADMIN_KEY", callback=_check_key, help="The ingress.admin_key, if one is set."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the outcome; the exit status reflects it.")]
Rest = Annotated[list[str] | None, typer.Argument(metavar="...", help="Arguments of the program; see its --help.")]
_REST = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mell {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def status(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Show the replicas and their load.

    --json prints the document at /mell/state.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        status_command.status(endpoint, terminal)


@app.command()
def models(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Show the models: their replicas, requests and memory."""
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        models_command.models(endpoint, terminal)


@app.command()
def top(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Watch replicas, rates and migrations.

    Refreshed every second until Ctrl-C; --json prints the document at /mell/state, one per line.
    """
    with exit_status(terminal := Terminal(as_json), on_interrupt=0), MellEndpoint(url, admin_key) as endpoint:
        top_command.top(endpoint, terminal)


@app.command()
def migrations(
    last: Annotated[int, typer.Option(min=0, help="Maximum number of past migrations.")] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then show each migration as it ends, until Ctrl-C.")
    ] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """List migrations.

    Newest first; with --follow in the order of their ends, and --json prints one record per line.
    """
    with exit_status(terminal := Terminal(as_json), on_interrupt=0), MellEndpoint(url, admin_key) as endpoint:
        (migrations_command.follow if follow else migrations_command.migrations)(endpoint, terminal, last)


@app.command()
def timeline(
    file: Annotated[Path, typer.Argument(help="Output file; an existing file is overwritten.")] = Path("mell.json"),
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Write migrations as a timeline.

    In the format of `ray timeline`, for Perfetto or chrome://tracing: one row per source replica.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        timeline_command.timeline(endpoint, terminal, file)


@app.command()
def move(
    request: Annotated[str, typer.Argument(help="Id or X-Request-Id of the request.")],
    target: Annotated[
        str | None, typer.Argument(help="Id of the target replica; by default the policy's choice.")
    ] = None,
    path: Annotated[PathRequest, typer.Option(help="Path of the migration.")] = PathRequest.AUTO,
    wait: Wait = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Move a request to another replica."""
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.move(endpoint, terminal, request, target, path, wait)


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="Id of the replica.")],
    wait: Wait = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Drain a replica, then stop it.

    Its requests move to others while they run.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.drain(endpoint, terminal, replica, wait)


@node.command("drain")
def drain_node(
    name: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="The node's id in Ray, its address or its host name.")
    ] = None,
    this: Annotated[bool, typer.Option("--self", help="The node that this command runs on.")] = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0, metavar="S", help="Wait until no replica is there, at most S seconds; then the node ends."),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Drain a node that goes away.

    Its replicas are replaced on other nodes, and their requests move while they run. Ray starts nothing more there, and
    ends the node once it is empty.
    """
    if this == (name is not None):
        raise typer.BadParameter("give NODE, or --self")
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.drain_node(endpoint, terminal, name or socket.gethostname(), wait)


@node.command("watch")
def watch_node(
    name: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="The node, as for `drain`; by default, this one.")
    ] = None,
    source: Annotated[watch_command.Cloud | None, typer.Option(help="Where notices come from.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="With --source file, or without: a file that appears is the notice.")
    ] = None,
    metadata_url: Annotated[
        str, typer.Option(callback=_check_url, help="URL of the cloud's metadata service.")
    ] = watch_command.METADATA_URL,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Drain a node when its cloud announces its end.

    Until Ctrl-C. A notice leads to one order, as of `mell node drain`, with the notice's deadline.
    """
    if source is None and file is not None:
        source = watch_command.Cloud.FILE
    if source is None or (source is watch_command.Cloud.FILE) != (file is not None):
        raise typer.BadParameter("give --source ec2, gce or azure, or --file PATH")
    with (
        exit_status(terminal := Terminal(as_json), on_interrupt=0),
        watch_command.source_of(source, metadata_url, file) as notices,
        MellEndpoint(url, admin_key) as endpoint,
    ):
        watch_command.watch(endpoint, terminal, name or socket.gethostname(), notices)


@app.command("hand-over")
def hand_over(
    to: Annotated[
        str | None,
        typer.Option(callback=_check_to, metavar="URL", help="URL of the other Mell's ingress, without /v1."),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Hand no more requests over.")] = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0, metavar="S", help="Wait until no request runs here, at most S seconds."),
    ] = None,
    to_admin_key: Annotated[
        str | None,
        typer.Option(
            envvar="MELL_TO_ADMIN_KEY", callback=_check_key, help="The other Mell's key. Unset: that of this Mell."
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Hand all requests over to another Mell.

    They continue there by tokens while clients keep their connections to this one, and new ones begin there. What
    cannot be continued exactly stays. Without --to and --undo, show the hand-over.
    """
    if undo and (to is not None or wait is not None):
        raise typer.BadParameter("--undo takes neither --to nor --wait")
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.hand_over(endpoint, terminal, to, to_admin_key or admin_key, undo, wait)


@app.command()
def role(
    replica: Annotated[str, typer.Argument(help="Id of the replica.")],
    role: Annotated[orders.RoleChoice, typer.Argument(help="The role; auto: the one that Mell assigns.")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Set a replica's role in prefill and decoding.

    It holds until it is taken back by auto, or the replica ends.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.set_role(endpoint, terminal, replica, role)


def _check_blocks(value: str | None) -> str | None:
    if value in (None, orders.AUTO) or (value.isdecimal() and int(value) > 0):
        return value
    raise typer.BadParameter(f"{value!r} is no number of blocks: write a whole number above 0, or {orders.AUTO}")


@app.command()
def memory(
    replica: Annotated[str | None, typer.Argument(help="Id of the replica; without it, all are shown.")] = None,
    blocks: Annotated[
        str | None,
        typer.Option(callback=_check_blocks, metavar="N|auto", help="Size of the KV pool; auto: Mell sizes it."),
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Show the memory of replicas, or set the size of one's KV pool.

    The pool changes its size under running requests. It needs memory.budget_mib.
    """
    if blocks is not None and replica is None:
        raise typer.BadParameter("--blocks needs a replica")
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.memory(endpoint, terminal, replica, blocks)


@app.command()
def sleep(
    name: Annotated[str, typer.Argument(metavar="MODEL|REPLICA", help="Name of a model, or id of a replica.")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Have a model, or one replica, fall asleep: its parameters and KV pool are dropped.

    Its requests leave first. A request wakes it again, or mell wake. It needs memory.budget_mib.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.set_asleep(endpoint, terminal, name, asleep=True)


@app.command()
def wake(
    name: Annotated[str, typer.Argument(metavar="MODEL|REPLICA", help="Name of a model, or id of a replica.")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Wake a replica that sleeps, or one of a model."""
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.set_asleep(endpoint, terminal, name, asleep=False)


@app.command()
def pair(
    lower: Annotated[str, typer.Argument(help="Id of the replica that keeps the lower layers.")],
    upper: Annotated[str, typer.Argument(help="Id of the replica that keeps the upper ones.")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Have two replicas give each other layers, and use the memory for KV.

    Their requests run on, each through both replicas. It needs memory.budget_mib.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.pair(endpoint, terminal, lower, upper)


@app.command()
def unpair(
    replica: Annotated[str, typer.Argument(help="Id of one of the two replicas.")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Undo a pair: both replicas load all layers again."""
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.unpair(endpoint, terminal, replica)


@app.command()
def mode(
    mode: Annotated[
        orders.ModeChoice | None, typer.Argument(help="The mode; without it, the present one is shown.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Stop the scheduler's moves, or let it move again.

    The mode holds until it is set again, or the application is deployed again.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.mode(endpoint, terminal, mode)


@app.command()
def bounds(
    least: Annotated[int, typer.Argument(metavar="MIN", help="Minimum number of replicas.")],
    most: Annotated[int, typer.Argument(metavar="MAX", help="Maximum number of replicas.")],
    model: Annotated[str | None, typer.Option(help="The model, if there are several.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Set the bounds on the number of replicas, without a restart.

    They hold until Serve ends, or a configuration with other bounds is applied.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.set_bounds(endpoint, terminal, least, most, model)


@app.command()
def level(
    ttft_p99: Annotated[
        float | None, typer.Option(metavar="S", help="Longest time to a first token, in seconds.")
    ] = None,
    itl_p99: Annotated[float | None, typer.Option(metavar="MS", help="Longest time between tokens, in ms.")] = None,
    service_class: Annotated[str, typer.Option("--class", help="The service class.")] = DEFAULT_CLASS,
    model: Annotated[str | None, typer.Option(help="The model, if there are several.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Set the service level of a class, for 99 % of its requests and tokens, without a restart.

    It holds until Serve ends, or a configuration with other levels is applied.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        orders.set_level(endpoint, terminal, service_class, ttft_p99, itl_p99, model)


@cache.command()
def match(
    prompt: Annotated[list[str] | None, typer.Argument(help="The prompt: a text or, with --ids, token ids.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is given as token ids.")] = False,
    messages: Annotated[Path | None, typer.Option(help="A JSON file with the messages of a chat.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name or that of an adapter.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="The salt of the prompt's requests.")] = None,
    session: Annotated[str | None, typer.Option(help="The session of the prompt's requests.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Look a prompt up in all prefix caches.

    Shows the tokens that each replica has, and the placement that a request would get now; nothing is placed.
    """
    others = {"model": model, "cache_salt": cache_salt, "prompt_cache_key": session}
    body = _prompt(prompt or (), ids, messages) | _given(others)
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        cache_commands.match(endpoint, terminal, body)


@cache.command()
def copy(
    source: Annotated[str, typer.Option("--from", help="Id of the replica that has the prompt's blocks.")],
    target: Annotated[str, typer.Option("--to", help="Id of the replica that is to get them.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="The prompt: a text or, with --ids, token ids.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is given as token ids.")] = False,
    messages: Annotated[Path | None, typer.Option(help="A JSON file with the messages of a chat.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name or that of an adapter.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="The salt of the prompt's requests.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Copy the cached blocks of a prompt from one replica to another.

    Only blocks that the target lacks are sent.
    """
    others = {"model": model, "cache_salt": cache_salt, "from": source, "to": target}
    body = _prompt(prompt or (), ids, messages) | _given(others)
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        cache_commands.copy(endpoint, terminal, body)


@cache.command()
def pin(
    prompt: Annotated[list[str] | None, typer.Argument(help="The prompt: a text or, with --ids, token ids.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is given as token ids.")] = False,
    messages: Annotated[Path | None, typer.Option(help="A JSON file with the messages of a chat.")] = None,
    ttl: Annotated[float, typer.Option(help="Seconds until the pin expires; 0 ends it now.")] = 600.0,
    model: Annotated[str | None, typer.Option(help="The model's name or that of an adapter.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="The salt of the prompt's requests.")] = None,
    replica: Annotated[str | None, typer.Option(help="The only replica to pin them on; by default all.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Keep the blocks of a prompt in host memory.

    They are those that replicas have there.
    """
    others = {"model": model, "cache_salt": cache_salt, "replica": replica, "ttl_s": ttl}
    body = _prompt(prompt or (), ids, messages) | _given(others)
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        cache_commands.pin(endpoint, terminal, body)


@cache.command()
def drop(
    prompt: Annotated[list[str] | None, typer.Argument(help="The prompt: a text or, with --ids, token ids.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is given as token ids.")] = False,
    messages: Annotated[Path | None, typer.Option(help="A JSON file with the messages of a chat.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Instead of a prompt's blocks, all blocks.")] = False,
    model: Annotated[str | None, typer.Option(help="The model's name or that of an adapter.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="The salt of the prompt's requests.")] = None,
    replica: Annotated[str | None, typer.Option(help="The only replica to delete them on; by default all.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Delete the blocks of a prompt from the prefix caches.

    Running requests keep the blocks that they use.
    """
    if everything and (prompt or ids or messages):
        raise typer.BadParameter("--all is without a prompt")
    others = {"model": model, "cache_salt": cache_salt, "replica": replica}
    chosen = {} if everything else _prompt(prompt or (), ids, messages)
    body = chosen | _given(others)
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url, admin_key) as endpoint:
        cache_commands.drop(endpoint, terminal, body)


def _given(members: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a body that the command line has."""
    return {name: value for name, value in members.items() if value is not None}


def _prompt(words: Sequence[str], ids: bool, messages: Path | None) -> dict[str, Any]:
    """The prompt as a member of a body. Raises typer.BadParameter."""
    if (messages is None) != bool(words) or (messages is not None and ids):
        raise typer.BadParameter("give a text, --ids with token ids, or --messages FILE")
    try:
        if messages is not None:
            return {"messages": json.loads(messages.read_text("utf-8"))}
        if ids:
            return {"prompt": [int(word) for word in words]}
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    if len(words) > 1:
        raise typer.BadParameter("put the text in quotes")
    return {"prompt": words[0]}


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option(help="A serve_config.yaml to check as well.")] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Check this installation.

    Shows a remedy for each finding; the exit status is 1 if there are problems.
    """
    with exit_status(terminal := Terminal(as_json)), MellEndpoint(url) as endpoint:
        diagnose(endpoint, terminal, config)


@app.command(context_settings=_REST | {"allow_interspersed_args": False})  # so that each `--` remains
def serve(rest: Rest = None) -> None:
    """Serve models, by the flags of `vllm serve` (app.vllm_cli)."""
    if rest in (["--help"], ["-h"]):
        print(short_help(), end="")
    else:
        programs.execute("serve", rest or ())


@app.command(context_settings=_REST)
def convert(rest: Rest = None) -> None:
    """Write Mell's configuration, from vLLM's flags or Ray Serve LLM's YAML (app.convert)."""
    programs.execute("convert", rest or ())


@app.command(context_settings=_REST)
def replay(rest: Rest = None) -> None:
    """Replay a trace (simulator.replay)."""
    programs.execute("replay", programs.with_url(rest or ()))


@app.command(context_settings=_REST)
def simulate(rest: Rest = None) -> None:
    """Simulate a workload (simulator)."""
    programs.execute("simulate", rest or ())


@app.command(context_settings=_REST)
def plan(rest: Rest = None) -> None:
    """Plan the GPUs for a trace and a service level (simulator.planning)."""
    programs.execute("plan", rest or ())


@app.command(context_settings=_REST)
def keys(rest: Rest = None) -> None:
    """Make an API key (app.keys)."""
    programs.execute("keys", rest or ())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit the process."""
    # Characters that the terminal cannot show become question marks.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(args=arguments, prog_name="mell")


if __name__ == "__main__":
    main()

"""`mell cache match`, `copy`, `pin` and `drop`: the blocks of a prompt in prefix caches, and orders about them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.cli.endpoint import MellEndpoint
from app.cli.errors import Failed
from app.cli.formatting import duration, plural
from app.cli.terminal import Terminal
from app.client.documents import BlocksDocument, CopyDocument, MatchDocument, MatchedReplicaDocument

_GROUNDS: Mapping[str | None, str] = {
    "content": "by content: the policy chose among the favoured replicas",
    "session": "by session",
    "policy": "by the policy alone",
}


def match(endpoint: MellEndpoint, terminal: Terminal, prompt: Mapping[str, Any]) -> None:
    """Show the match of a prompt, the body of a call; as JSON, the document at `/mell/cache/match`."""
    found, document = endpoint.match(prompt)
    terminal.write(document)
    terminal.show(render_match(found))


def copy(endpoint: MellEndpoint, terminal: Terminal, order: Mapping[str, Any]) -> None:
    """Copy blocks by the body of a call; as JSON, the copy's record."""
    copied, document = endpoint.copy(order)
    terminal.write(document)
    terminal.show(render_copy(copied))


def render_copy(copied: CopyDocument) -> str:
    """The whole output; pure."""
    sent = f"{copied.blocks} of {plural(copied.held, 'block')} sent"
    return f"{sent}, {copied.bytes / 1e6:,.1f} MB in {duration(copied.duration_s)}"


def pin(endpoint: MellEndpoint, terminal: Terminal, order: Mapping[str, Any]) -> None:
    """Keep blocks in host memory by the body of a call. Raises Failed, after the output, if a replica has no room."""
    pinned, document = endpoint.pin(order)
    _report(terminal, pinned, document, "pinned" if order["ttl_s"] else "pinned no more")


def drop(endpoint: MellEndpoint, terminal: Terminal, order: Mapping[str, Any]) -> None:
    """Delete blocks by the body of a call. Raises Failed, after the output, if a replica has not carried it out."""
    dropped, document = endpoint.drop(order)
    _report(terminal, dropped, document, "deleted")


def _report(terminal: Terminal, answer: BlocksDocument, document: dict[str, Any], done: str) -> None:
    lines = render_blocks(answer, done)
    if answer.failed:
        raise Failed("\n".join(lines), document)
    terminal.write(document)
    terminal.show(*lines)


def render_blocks(answer: BlocksDocument, done: str) -> list[str]:
    """One line per replica; pure."""
    lines = {replica: f"{plural(count, 'block')} {done}" for replica, count in answer.blocks.items()}
    return [f"{replica}: {text}" for replica, text in sorted({**lines, **answer.failed}.items())]


def render_match(found: MatchDocument) -> RenderableType:
    """The whole output; pure."""
    blocks = plural(found.full_blocks, "full block")
    lines = [Text(f"{plural(found.prompt_tokens, 'token')}, {blocks} of {found.block_size}")]
    if found.off:
        lines.append(Text(f"not routed by content: {found.off}", "yellow"))
    return Group(*lines, Text(), _table(found.replicas, found.replica), Text(), _choice(found))


def _table(replicas: Sequence[MatchedReplicaDocument], chosen: str | None) -> Table:
    """One row per running replica, the best score first."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("REPLICA", no_wrap=True)
    for name in ("HBM", "DRAM", "WAIT", "FIRST TOKEN", "SCORE"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for replica in sorted(replicas, key=lambda each: (each.score_s, each.id)):
        notes = {"chosen": replica.id == chosen, "favoured": replica.favoured, "no room": not replica.fits}
        notes["copies"] = replica.copies_from is not None
        table.add_row(
            Text(replica.id, "bold" if replica.id == chosen else ""),
            *(Text(f"{tokens:,}") for tokens in (replica.hbm, replica.dram)),
            *(Text(duration(seconds)) for seconds in (replica.wait_s, replica.first_token_s, replica.score_s)),
            Text(", ".join(note for note, holds in notes.items() if holds)),
        )
    return table


def _choice(found: MatchDocument) -> Text:
    """The replica of the placement, and its basis."""
    if found.replica is None:
        return Text("no replica accepts requests", "yellow")
    queues = "; it fits nowhere, and would wait there" if found.queues else ""
    return Text(f"{found.replica}, {_GROUNDS.get(found.by, str(found.by))}{queues}", "yellow" if found.queues else "")

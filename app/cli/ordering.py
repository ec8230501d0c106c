"""The commands that act: move, drain."""

from app.cli.endpoint import Endpoint
from app.cli.errors import Failed
from app.cli.terminal import PATIENCE_S, Terminal
from app.cli.views.migrations import sentence
from app.cli.views.numbers import plural
from app.client.documents import ReplicaDocument
from migration.record import MigrationRecord, Outcome

EVERY_S = 0.5
_LOOKS_WITHOUT = 2
"""In so many fresh looks, one after the other, a replica has to be missing to be gone."""


def move(endpoint: Endpoint, terminal: Terminal, request: str, target: str | None, path: str, wait: bool) -> None:
    """Order a move. With `wait`, raises Failed unless the request moved."""
    id = endpoint.move(request, target, path)
    terminal.show(f"migration {id} has begun")
    if not wait:
        terminal.tell({"id": id})
        return
    record = _ended(endpoint, terminal, id)
    if record.outcome is not Outcome.COMMITTED:
        raise Failed(sentence(record).plain, record.to_json())
    terminal.tell(record.to_json())
    terminal.show(sentence(record))


def _ended(endpoint: Endpoint, terminal: Terminal, id: str) -> MigrationRecord:
    """The record of a migration once it has ended."""
    known_s = terminal.clock()
    for records in terminal.looks(endpoint.migrations, EVERY_S):
        record = next((record for record in records if record.id == id), None)
        if record is not None:
            known_s = terminal.clock()
            if record.outcome is not None:
                return record
        elif terminal.clock() - known_s > PATIENCE_S:
            break
    raise Failed(f"nobody knows of migration {id} any more: the scheduler or the source may have died")


def drain(endpoint: Endpoint, terminal: Terminal, replica: str, wait: bool) -> None:
    """Order that a replica be emptied and stopped."""
    answer = endpoint.drain(replica)
    terminal.show(f"{replica} drains: its requests move to others, then it stops")
    if wait:
        _gone(endpoint, terminal, replica)
        answer |= {"state": "GONE"}
        terminal.show(f"{replica} is gone")
    terminal.tell(answer)


def _gone(endpoint: Endpoint, terminal: Terminal, id: str) -> None:
    """Wait until a replica is gone, and say how many requests are left on it."""
    left: int | None = None
    without, as_of = 0, 0.0
    for state in terminal.looks(endpoint.state, EVERY_S):
        # While the scheduler is away, an ingress shows what it last knew: maybe nothing.
        if state.as_of <= as_of:
            continue
        as_of = state.as_of
        found = state.replica(id)
        without = without + 1 if found is None else 0
        if without == _LOOKS_WITHOUT:
            return
        if found is not None and len(found.requests) != left:
            left = len(found.requests)
            terminal.show(_left(found))


def _left(replica: ReplicaDocument) -> str:
    return f"{plural(len(replica.requests), 'request')} left on {replica.id}, which is {replica.state}"

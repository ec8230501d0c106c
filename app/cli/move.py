"""`mell move`: orders a migration and, with --wait, waits for its outcome."""

from app.cli.endpoint import MellEndpoint
from app.cli.errors import Failed
from app.cli.migrations import summary
from app.cli.terminal import PATIENCE_S, WAIT_INTERVAL_S, Terminal
from migration.protocol.record import MigrationRecord, Outcome


def move(endpoint: MellEndpoint, terminal: Terminal, request: str, target: str | None, path: str, wait: bool) -> None:
    """Order a move. With `wait`, raises Failed unless it commits."""
    id = endpoint.move(request, target, path)
    terminal.show(f"migration {id} has begun")
    if not wait:
        terminal.write({"id": id})
        return
    record = _ended(endpoint, terminal, id)
    if record.outcome is not Outcome.COMMITTED:
        raise Failed(summary(record).plain, record.to_json())
    terminal.write(record.to_json())
    terminal.show(summary(record))


def _ended(endpoint: MellEndpoint, terminal: Terminal, id: str) -> MigrationRecord:
    """Wait for the end of a migration; its record."""
    listed_s = terminal.clock()
    for records in terminal.poll(endpoint.migrations, WAIT_INTERVAL_S):
        record = next((record for record in records if record.id == id), None)
        if record is not None:
            listed_s = terminal.clock()
            if record.outcome is not None:
                return record
        elif terminal.clock() - listed_s > PATIENCE_S:
            break
    raise Failed(f"migration {id} is no longer listed: the scheduler or the source may have died")

"""`mell drain`: orders that a replica be drained and, with --wait, waits until it is gone."""

from app.cli.endpoint import MellEndpoint
from app.cli.formatting import plural
from app.cli.terminal import WAIT_INTERVAL_S, Terminal
from app.client.documents import ReplicaDocument

_MISSING_STATES = 2
"""A replica is gone once it is missing from this many successive states; a slow one may be missing from one."""


def drain(endpoint: MellEndpoint, terminal: Terminal, replica: str, wait: bool) -> None:
    """Order that a replica be drained."""
    answer = endpoint.drain(replica)
    terminal.show(f"{replica} drains: its requests move to others, then it stops")
    if wait:
        _wait_until_gone(endpoint, terminal, replica)
        answer |= {"state": "GONE"}
        terminal.show(f"{replica} is gone")
    terminal.write(answer)


def _wait_until_gone(endpoint: MellEndpoint, terminal: Terminal, id: str) -> None:
    """Wait until a replica is gone, and show the number of its remaining requests whenever it changes."""
    remaining: int | None = None
    missing, as_of = 0, 0.0
    for state in terminal.poll(endpoint.state, WAIT_INTERVAL_S):
        # While the scheduler is unavailable, an ingress returns an old state, possibly an empty one.
        if state.as_of <= as_of:
            continue
        as_of = state.as_of
        replica = state.replica(id)
        missing = missing + 1 if replica is None else 0
        if missing == _MISSING_STATES:
            return
        if replica is not None and len(replica.requests) != remaining:
            remaining = len(replica.requests)
            terminal.show(_progress(replica))


def _progress(replica: ReplicaDocument) -> str:
    return f"{plural(len(replica.requests), 'request')} left on {replica.id}, which is {replica.state}"

"""Ports that the ingresses of one service share on a node, and no other service.

With SO_REUSEPORT, the kernel lets all sockets of one user share a port, and a second service would get half of the
calls of the first. Therefore each listening socket has a claim beside it: an abstract Unix socket whose name has the
port and the service. An ingress without a claim of its own service must find the port free for a socket that shares it
with none. Claims end with their processes, and belong to the same network namespace as the ports.
"""

import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
"""The kernel detects a vanished client after two minutes of silence."""


class ClaimedSocket(socket.socket):
    """A listening socket with its claim, which is closed with it."""

    claim: socket.socket | None = None

    def close(self) -> None:
        """Close both sockets."""
        if self.claim is not None:
            self.claim.close()
        super().close()


def open_port(host: str, port: int, service: str, backlog: int) -> ClaimedSocket:
    """A listening socket; other ingresses of the service may share its port. Port 0: any free one.

    Raises:
        OSError: something else listens there, or opens the port at this moment.
    """
    with _opening(port):
        if port and not _is_claimed(port, service):
            _bind(host, port, shared=False).close()
        listening = _bind(host, port, shared=True)
        try:
            listening.claim = _abstract(f"{_claims(listening.getsockname()[1], service)}{os.getpid()}.{id(listening)}")
            listening.listen(backlog)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
        return listening


def _bind(host: str, port: int, shared: bool) -> ClaimedSocket:
    bound = ClaimedSocket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Accepted connections inherit these options.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        bound.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        bound.bind((host, port))
        if not shared:
            bound.listen(1)  # only then does the kernel compare it with other listening sockets
    except OSError:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def _opening(port: int) -> Iterator[None]:
    """One process at a time opens a port. Raises OSError for the others."""
    lock = _abstract(f"mell-opens-{port}-" if port else f"mell-opens-0-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield
    finally:
        lock.close()


def _abstract(name: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.bind(f"\0{name}")
    except OSError:
        bound.close()
        raise
    return bound


def _claims(port: int, service: str) -> str:
    """The beginning of the names of a service's claims."""
    return f"mell-port-{port}-{hashlib.sha256(service.encode()).hexdigest()[:16]}-"


def _is_claimed(port: int, service: str) -> bool:
    """True also without a list of sockets, as in some sandboxes: a service then shares its ports with others."""
    try:
        return f"@{_claims(port, service)}" in Path("/proc/net/unix").read_text("utf-8", "replace")
    except OSError:
        return True

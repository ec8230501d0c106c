"""A collective backend for Ray: pairwise gloo groups with time-outs, created and dropped on demand.

Ray's own GLOO backend makes the first group the default group of the process, which limits a replica to one peer, and
its transfers wait half an hour for a silent peer. The groups of this backend are process groups of two ranks, none of
them a default group.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ray.util import get_node_ip_address

from migration.transport import pair_group, rendezvous

if TYPE_CHECKING:
    from ray.util.collective.types import RecvOptions, SendOptions

BACKEND = "MELL_GLOO"


class GlooPair(pair_group.PairGroup):
    """A pair over gloo, between host memories."""

    name = BACKEND

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._lock = threading.Lock()
        self._group: Any = None
        self._key = f"rendezvous/{group_name}"

    @classmethod
    def check_backend_availability(cls) -> bool:
        """True if torch was built with gloo."""
        return bool(dist.is_gloo_available())

    def send(self, tensors: list[torch.Tensor], options: "SendOptions") -> None:
        """Send one tensor to the other rank."""
        group = self._timed(self._connect)
        self._timed(lambda: group.send([tensors[0]], options.dst_rank, 0).wait(self._limit))

    def recv(self, tensors: list[torch.Tensor], options: "RecvOptions") -> None:
        """Receive one tensor from the other rank, in place."""
        group = self._timed(self._connect)
        self._timed(lambda: group.recv([tensors[0]], options.src_rank, 0).wait(self._limit))

    def destroy_group(self) -> None:
        """Drop the connection; the other end's transfers fail."""
        self._group = None
        # Of either rank, since the one that has set it may have died.
        rendezvous.delete(self._key)

    def _timed(self, step: Callable[[], Any]) -> Any:
        """Run a step of a transfer; raises TimeoutError if it fails after the time limit.

        torch raises RuntimeError both for a time-out and for a lost peer, so the clock decides.
        """
        began = time.monotonic()
        try:
            return step()
        except RuntimeError as error:
            if time.monotonic() - began < self.timeout_s:
                raise
            raise TimeoutError(f"timed out after {self.timeout_s} s: {error}") from error

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def _connect(self) -> Any:
        with self._lock:
            if self._group is None:
                address = get_node_ip_address()
                store = self._create_store(address) if self.rank == 0 else self._find_store()
                self._group = dist.ProcessGroupGloo(store, self.rank, 2, _options(address, self._limit))
            return self._group

    def _create_store(self, address: str) -> Any:
        store = dist.TCPStore(address, 0, 2, True, self._limit, wait_for_workers=False)
        rendezvous.put(self._key, f"{address}:{store.port}".encode())
        return store

    def _find_store(self) -> Any:
        found = rendezvous.wait_for(self._key, time.monotonic() + self.timeout_s)
        address, port = found.decode().rsplit(":", 1)
        return dist.TCPStore(address, int(port), 2, False, self._limit)


def _options(address: str, limit: timedelta) -> Any:
    """Options for listening on the node's address, or on the interface `GLOO_SOCKET_IFNAME`.

    By default gloo listens on the address that the host's name resolves to: on many machines a loopback address, which
    other nodes cannot reach.
    """
    create, interface = dist.ProcessGroupGloo.create_device, os.environ.get("GLOO_SOCKET_IFNAME")
    options = dist.ProcessGroupGloo._Options()
    options._timeout = limit
    options._devices = [create(interface=interface) if interface else create(hostname=address)]
    return options


def register(timeout_s: float) -> None:
    """Register the backend with Ray in this process."""
    pair_group.register(GlooPair, timeout_s)

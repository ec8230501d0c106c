"""A collective backend for Ray: pairwise gloo groups with time-outs, made and dropped on demand.

Ray's own GLOO backend makes the first group the world of the process, so a replica could talk to one peer
only, and its transfers wait half an hour for a silent peer. This one holds a process group of two that is
nobody's default group.

`init_collective_group` holds a process-wide lock around the constructor, so the constructor only notes what it
was given; the two ends find each other at the first transfer, in whatever thread makes it.
"""

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.util import get_node_ip_address
from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import RecvOptions, SendOptions

BACKEND = "MELL_GLOO"
_NAMESPACE = b"mell"
_POLL_S = 0.005


class PairGroup(BaseGroup):
    """Two ranks, point to point. Any other collective is refused."""

    timeout_s = 10.0
    """Of the rendezvous and of every transfer; set once per process by `register`."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        if world_size != 2:
            raise ValueError(f"{BACKEND} groups have two ranks, not {world_size}")
        self._lock = threading.Lock()
        self._group: Any = None
        self._key = f"rendezvous/{group_name}".encode()

    @classmethod
    def backend(cls) -> str:
        """The backend's name."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Whether torch was built with gloo."""
        return bool(dist.is_gloo_available())

    def send(self, tensors: list[torch.Tensor], options: SendOptions) -> None:
        """Send one tensor to the other rank. Raises RuntimeError on time-out or when the peer is gone."""
        self._connect().send([tensors[0]], options.dst_rank, 0).wait(self._limit)

    def recv(self, tensors: list[torch.Tensor], options: RecvOptions) -> None:
        """Receive one tensor from the other rank, in place. Raises as `send` does."""
        self._connect().recv([tensors[0]], options.src_rank, 0).wait(self._limit)

    def destroy_group(self) -> None:
        """Drop the connection; the other end's transfers fail."""
        self._group = None
        if self.rank == 0:
            _internal_kv_del(self._key, namespace=_NAMESPACE)

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def _connect(self) -> Any:
        with self._lock:
            if self._group is None:
                store = self._offer() if self.rank == 0 else self._find()
                self._group = dist.ProcessGroupGloo(store, self.rank, 2, self._limit)
            return self._group

    def _offer(self) -> Any:
        address = get_node_ip_address()
        store = dist.TCPStore(address, 0, 2, True, self._limit, wait_for_workers=False)
        _internal_kv_put(self._key, f"{address}:{store.port}".encode(), overwrite=True, namespace=_NAMESPACE)
        return store

    def _find(self) -> Any:
        deadline = time.monotonic() + self.timeout_s
        while (value := _internal_kv_get(self._key, namespace=_NAMESPACE)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the peer of {self.group_name} did not appear within {self.timeout_s} s")
            time.sleep(_POLL_S)
        address, port = value.decode().rsplit(":", 1)
        return dist.TCPStore(address, int(port), 2, False, self._limit)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{BACKEND} groups only send and receive")

    allreduce = barrier = reduce = broadcast = allgather = reducescatter = _refuse


def register(timeout_s: float) -> None:
    """Make the backend known to Ray in this process, once; every process that uses it must."""
    PairGroup.timeout_s = timeout_s
    if not _global_registry.is_registered(BACKEND):
        register_collective_backend(BACKEND, PairGroup)

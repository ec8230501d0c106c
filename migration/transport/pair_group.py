"""The common base of Mell's collective backends for Ray: groups of two ranks that only send and receive.

Ray's `init_collective_group` holds a process-wide lock around a backend's constructor, so a constructor only stores its
arguments; the ranks connect in the first transfer, in the thread that makes it.
"""

from typing import Any

from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup


class PairGroup(BaseGroup):
    """Two ranks, point to point. Collective operations raise NotImplementedError.

    `send` and `recv` raise TimeoutError after `timeout_s`, and RuntimeError if the peer has ended.
    """

    name: str
    """The backend's name in Ray's registry."""

    timeout_s = 10.0
    """Time limit of the rendezvous and of every transfer; set once per process by `register`."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        if world_size != 2:
            raise ValueError(f"{self.name} groups have two ranks, not {world_size}")

    @classmethod
    def backend(cls) -> str:
        """The backend's name."""
        return cls.name

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name} groups only send and receive")

    allreduce = barrier = reduce = broadcast = allgather = reducescatter = _refuse


def register(group: type[PairGroup], timeout_s: float) -> None:
    """Register a backend with Ray in this process; every process that uses the backend has to.

    A repeated call only sets the time limit.
    """
    group.timeout_s = timeout_s
    if not _global_registry.is_registered(group.name):
        register_collective_backend(group.name, group)

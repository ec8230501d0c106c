"""What Mell's collective backends for Ray have in common: groups of two that only send and receive.

`init_collective_group` holds a process-wide lock around a backend's constructor, so a constructor only notes what it
was given; the two ends find each other at the first transfer, in whatever thread makes it.
"""

from typing import Any

from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup


class PairGroup(BaseGroup):
    """Two ranks, point to point. Any other collective is refused.

    `send` and `recv` raise TimeoutError after `timeout_s`, and RuntimeError when the peer is gone.
    """

    name: str
    """What Ray knows the backend by."""

    timeout_s = 10.0
    """Of the rendezvous and of every transfer; set once per process by `register`."""

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
    """Make a backend known to Ray in this process, once; every process that uses it must."""
    group.timeout_s = timeout_s
    if not _global_registry.is_registered(group.name):
        register_collective_backend(group.name, group)

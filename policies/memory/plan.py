"""The memory plan of a replica, and its size in bytes on a device.

awake     parameters + fixed + blocks x block
paired    the same without the parameters of `remote` layers
asleep    asleep: the rest of an engine whose parameters and KV blocks are dropped
"""

from dataclasses import dataclass
from typing import Self

from policies.model import Blocks, Bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a replica is ordered to have: its number of KV blocks; None: it is asleep.

    A replica of a pair does not hold the parameters of its `remote` layers, which its buddy runs. The KV of its
    requests counts here, also where it is in the buddy's process: both are on one device.
    """

    blocks: Blocks | None
    remote: int = 0

    @property
    def is_awake(self) -> bool:
        """True if the replica holds its parameters."""
        return self.blocks is not None


ASLEEP = MemoryPlan(None)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The bytes of a replica of a model on one device.

    `fixed` are held while it is awake, beside parameters and KV: context, graphs, activations. `block` are those of one
    KV block over all layers. `floor` is the least number of blocks of a replica that is awake: those of one request of
    the longest context, since a longer one at the head of the engine's queue would block it for ever. `layers` is the
    number of the model's layers, each with parameters of `layer` bytes or more; both are 0 if it is never in a pair.
    """

    parameters: Bytes
    fixed: Bytes
    asleep: Bytes
    block: Bytes
    floor: Blocks
    layers: int = 0
    layer: Bytes = Bytes(0)

    @property
    def least(self) -> Bytes:
        """The bytes of a replica that is awake with the floor of blocks."""
        return self.need(MemoryPlan(self.floor))

    def need(self, plan: MemoryPlan) -> Bytes:
        """The bytes of a replica with this plan."""
        if plan.blocks is None:
            return self.asleep
        return Bytes(self.parameters - plan.remote * self.layer + self.fixed + plan.blocks * self.block)

    @classmethod
    def claimed(cls, size: Bytes) -> Self:
        """The memory of a replica that starts: `size` bytes in all, whatever it will have them for."""
        return cls(size, Bytes(0), size, Bytes(0), Blocks(0))

    @property
    def is_claimed(self) -> bool:
        """True for a replica that starts: its parts have not been measured yet."""
        return self.block == 0

    def blocks_in(self, size: int, remote: int = 0) -> Blocks:
        """The KV blocks of an awake replica of `size` bytes in all; below zero if its parameters do not fit."""
        return Blocks((size - self.parameters + remote * self.layer - self.fixed) // self.block)

    def blocks_exchanging(self, size: int) -> Blocks:
        """The KV blocks within `size` bytes of a replica that has all parameters, and the KV of one layer twice."""
        return Blocks(self.blocks_in(size) * self.layers // (self.layers + 1))

    def least_with(self, remote: int) -> Blocks:
        """The fewest blocks to order of a replica with `remote` layers: it can have these back within that memory."""
        if not remote:
            return self.floor
        exchanging, parameters = self.floor * (self.layers + 1), remote * self.layer
        return Blocks(-(-exchanging // self.layers) + -(-parameters // self.block))


def mib_of(size: int) -> int:
    """A size in bytes as MiB, rounded up."""
    return -(-size >> 20)

"""The devices (GPUs) of the simulated world, which all pools share: their number, and the replica on each."""

from collections.abc import Iterable
from itertools import count, takewhile
from typing import NamedTuple, NewType

from policies.model import PoolId, ReplicaId

DeviceId = NewType("DeviceId", int)


class Occupant(NamedTuple):
    """The replica on a device. Two pools may have replicas of the same name."""

    pool: PoolId
    replica: ReplicaId


class Devices:
    """`limit` devices (None: no limit), numbered from 0, `per_node` on each node, each with one replica at most.

    `occupants` are the devices in use.
    """

    def __init__(self, per_node: int, limit: int | None = None) -> None:
        self.occupants: dict[DeviceId, Occupant] = {}
        self._per_node = per_node
        self._limit = limit

    @property
    def free(self) -> int | None:
        """The number of devices without a replica; None without a limit."""
        return None if self._limit is None else self._limit - len(self.occupants)

    def take(self, occupant: Occupant, node: str) -> str | None:
        """Put a replica on the first free device of a node, or of any node if that one has none.

        Returns the node of the device, None if no device is free.
        """
        first = self._per_node * int(node.removeprefix("node-"))
        device = self._first_free(range(first, first + self._per_node))
        if device is None:
            device = self._first_free(count())
        if device is None:
            return None
        self.occupants[device] = occupant
        return self.node_of(device)

    def give_back(self, occupant: Occupant) -> None:
        """Free the device of a replica. Raises `ValueError` if it has none."""
        device = next((device for device, held in self.occupants.items() if held == occupant), None)
        if device is None:
            raise ValueError(f"{occupant.replica} of {occupant.pool} is on no device")
        del self.occupants[device]

    def node_of(self, device: DeviceId) -> str:
        """The node of a device, by the name that `policies.cluster.supply` gives to it."""
        return f"node-{device // self._per_node}"

    def _first_free(self, numbers: Iterable[int]) -> DeviceId | None:
        """The first free device of these; None if there is none."""
        limit = self._limit
        exist = numbers if limit is None else takewhile(lambda number: number < limit, numbers)
        return next((DeviceId(number) for number in exist if number not in self.occupants), None)

"""The devices (GPUs) of the simulated world, which all pools share: their number, and the replica on each."""

from collections.abc import Iterable
from itertools import chain, count, takewhile
from typing import NamedTuple, NewType, Protocol

from policies.model import PoolId, ReplicaId, Tokens

DeviceId = NewType("DeviceId", int)


class Occupant(NamedTuple):
    """The replica on a device. Two pools may have replicas of the same name."""

    pool: PoolId
    replica: ReplicaId


class TakenDevice(NamedTuple):
    """The place of a new replica: its node and its device.

    `startup_s` are the seconds until it runs, `capacity` the tokens of its KV memory; None: those of every new replica
    of its pool.
    """

    node: str
    startup_s: float | None = None
    capacity: Tokens | None = None
    device: DeviceId = DeviceId(0)


class Housing(Protocol):
    """The devices as pools see them. `free` is the number of devices without a replica; None without a limit."""

    @property
    def free(self) -> int | None: ...

    def take(self, occupant: Occupant, node: str) -> TakenDevice | None:
        """Put a replica on a device, if possible of that node; None if there is no place."""
        ...

    def give_back(self, occupant: Occupant) -> None:
        """Take a closed replica from its device. Raises `ValueError` if it has none."""
        ...


class Devices:
    """`limit` devices (None: no limit), numbered from 0, `per_node` on each node, each with one replica at most.

    `occupants` are the devices in use. With `by_machine`, a new replica is put on a node in use if one has room.
    """

    def __init__(self, per_node: int, limit: int | None = None, by_machine: bool = False) -> None:
        self.occupants: dict[DeviceId, Occupant] = {}
        self._per_node = per_node
        self._limit = limit
        self._by_machine = by_machine

    @property
    def free(self) -> int | None:
        """The number of devices without a replica; None without a limit."""
        return None if self._limit is None else self._limit - len(self.occupants)

    def take(self, occupant: Occupant, node: str) -> TakenDevice | None:
        """Put a replica on the first free device of a node, or of any node if that one has none."""
        device = self._first_free(self._in_use()) if self._by_machine else None
        if device is None:
            device = self._first_free(self._on_node(int(node.removeprefix("node-"))))
        if device is None:
            device = self._first_free(count())
        if device is None:
            return None
        self.occupants[device] = occupant
        return TakenDevice(self.node_of(device))

    def give_back(self, occupant: Occupant) -> None:
        """Free the device of a replica. Raises `ValueError` if it has none."""
        device = next((device for device, held in self.occupants.items() if held == occupant), None)
        if device is None:
            raise ValueError(f"{occupant.replica} of {occupant.pool} is on no device")
        del self.occupants[device]

    def node_of(self, device: DeviceId) -> str:
        """The node of a device, by the name that `policies.cluster.supply` gives to it."""
        return f"node-{device // self._per_node}"

    def _on_node(self, number: int) -> Iterable[int]:
        return range(number * self._per_node, (number + 1) * self._per_node)

    def _in_use(self) -> Iterable[int]:
        """The devices of all nodes with a replica, in ascending order."""
        nodes = sorted({device // self._per_node for device in self.occupants})
        return chain.from_iterable(map(self._on_node, nodes))

    def _first_free(self, numbers: Iterable[int]) -> DeviceId | None:
        """The first free device of these; None if there is none."""
        limit = self._limit
        exist = numbers if limit is None else takewhile(lambda number: number < limit, numbers)
        return next((DeviceId(number) for number in exist if number not in self.occupants), None)

"""The transport between replicas of one node, whose workers map each other's staging slots: no bytes are sent."""

import functools
import os
from pathlib import Path

from migration.protocol.errors import TransferFailed
from migration.protocol.messages import SlotRef
from migration.protocol.ports import Slot
from policies.model import Bytes, ReplicaId


@functools.cache
def _namespace() -> str:
    """The machine and its pid namespace; processes with the same value can map each other's segments."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


class SharedSlots:
    """The target's worker maps the source's segment, in host or GPU memory. Only for replicas of one node.

    `elsewhere` is the transport between nodes that the error's text recommends.
    """

    direct = shares_slots = True

    def __init__(self, name: str = "shared", elsewhere: str = "collective") -> None:
        self.name = name
        self._elsewhere = elsewhere

    def channel(self, source: ReplicaId, target: ReplicaId, rank: int) -> str:
        """See `Transport.channel`."""
        return _namespace()

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        """See `Transport.send`."""

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        """See `Transport.receive`. Raises TransferFailed if the source is on another node."""
        if channel != _namespace():
            raise TransferFailed(f"the replicas share no memory: set migration.transport to {self._elsewhere}")
        return staged

    def drop(self, channel: str) -> None:
        """See `Transport.drop`."""

    def close(self) -> None:
        """See `Transport.close`."""

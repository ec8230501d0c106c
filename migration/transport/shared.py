"""Replicas on one node read each other's staging slots: nothing is sent."""

import functools
import os
from pathlib import Path

from migration.errors import TransferFailed
from migration.messages import SlotRef
from migration.ports import Slot
from policies.model import Bytes, ReplicaId


@functools.cache
def _place() -> str:
    """What processes have in common that can map each other's segments: the machine and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


class SharedSlots:
    """The target's worker maps the source's segment, in host or GPU memory. Only for replicas of one node.

    `elsewhere` is the transport to use between nodes, for the error's text.
    """

    shares_slots = True

    def __init__(self, name: str = "shared", elsewhere: str = "collective") -> None:
        self.name = name
        self._elsewhere = elsewhere

    def channel(self, source: ReplicaId, target: ReplicaId) -> str:
        """See `Transport.channel`."""
        return _place()

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        """See `Transport.send`."""

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        """See `Transport.receive`. Raises TransferFailed when the source is on another node."""
        if channel != _place():
            raise TransferFailed(f"the replicas share no memory: set migration.transport to {self._elsewhere}")
        return staged

    def drop(self, channel: str) -> None:
        """See `Transport.drop`."""

    def close(self) -> None:
        """See `Transport.close`."""

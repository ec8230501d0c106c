"""Replicas on one node read each other's staging slots: nothing is sent."""

from migration.messages import SlotRef
from migration.ports import Slot
from policies.model import Bytes, ReplicaId


class SharedSlots:
    """The target's worker maps the source's segment. Only for replicas of one node."""

    name = "shared"
    shares_slots = True

    def channel(self, source: ReplicaId, target: ReplicaId) -> str:
        """See `Transport.channel`."""
        return f"{source}>{target}"

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        """See `Transport.send`."""

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        """See `Transport.receive`."""
        return staged

    def drop(self, channel: str) -> None:
        """See `Transport.drop`."""

    def close(self) -> None:
        """See `Transport.close`."""

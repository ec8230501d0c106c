"""A transport that damages KV blocks on their way: what the soak of hand-overs has to notice."""

import numpy as np

from deployments.config import MigrationSettings
from migration.kv.staging import HEADER, Segments
from migration.protocol.messages import SlotRef
from migration.protocol.ports import Slot
from migration.transport.shared import SharedSlots
from policies.model import Bytes

SCALE = 3.0
"""The standard deviation of the noise; the tiny model's keys and values are in float32."""


class NoisySlots(SharedSlots):
    """Shared slots whose target adds noise to all that it gets, before it loads it."""

    direct = False

    def __init__(self) -> None:
        super().__init__()
        self._noisy = Segments()

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        """See `Transport.receive`."""
        where = await super().receive(channel, staged, size, slot)
        values = np.frombuffer(self._noisy.get(where.segment).view(where.offset + HEADER, size - HEADER), np.float32)
        values += np.random.default_rng(0).normal(scale=SCALE, size=values.shape).astype(np.float32)
        return where


def make(config: MigrationSettings) -> NoisySlots:
    """The factory that `migration.transport` names."""
    return NoisySlots()

"""The noise that the soak of hand-overs has to notice."""

import numpy as np

from benchmarks.soak.noise import make
from deployments.config import MigrationSettings
from migration.kv.staging import HEADER
from migration.protocol.messages import SlotRef
from migration.run.slots import Slots
from policies.model import Bytes, ReplicaId


async def test_what_a_target_gets_is_damaged_behind_its_header() -> None:
    transport, slots = make(MigrationSettings()), Slots(2, 256)
    assert not transport.direct
    try:
        with await slots.lease() as (slot,):
            slot.memory[:] = bytes(len(slot.memory))
            staged = SlotRef(slot.segment, slot.offset, 1)
            channel = transport.channel(ReplicaId("a"), ReplicaId("b"), 0)
            assert await transport.receive(channel, staged, Bytes(HEADER + 256), None) == staged
            header, payload = bytes(slot.memory[:HEADER]), bytes(slot.memory[HEADER : HEADER + 256])
            assert not any(header) and np.frombuffer(payload, np.float32).std() > 1
    finally:
        slots.close()

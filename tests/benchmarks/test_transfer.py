"""The transfer benchmark's ends with slots in GPU memory, of a faked GPU."""

import pytest

from benchmarks.transfer.ports import BLOCK_BYTES, Cache
from deployments.config import MigrationSettings
from deployments.replica.transports import make_slots
from migration.protocol.errors import TransferFailed
from migration.protocol.sizing import MIB, StagingSizes
from policies.model import Blocks
from tests.migration import fake_cupy

BLOCKS = 6


async def test_ends_cache_uses_gpu_slots_of_its_own_process() -> None:
    with fake_cupy.installed():
        slots = make_slots(MigrationSettings(transport="cuda_ipc"), StagingSizes(1, 2, MIB))
        source, target = (Cache(BLOCKS, name, "cpu", MIB) for name in ("source", "target"))
        source.fill(1)
        lease = await slots.lease(1)
        with pytest.raises(TransferFailed, match="invalid device context"):
            await source.gather("key", Blocks(0), Blocks(BLOCKS), lease.slots)
        source.segments.own = target.segments.own = slots.segments[0]
        (staged,) = await source.gather("key", Blocks(0), Blocks(BLOCKS), lease.slots)
        assert staged.size > BLOCKS * BLOCK_BYTES and source.digest(BLOCKS) != target.digest(BLOCKS)
        await target.put("", Blocks(0), Blocks(BLOCKS), [staged.slot])
        assert source.digest(BLOCKS) == target.digest(BLOCKS)

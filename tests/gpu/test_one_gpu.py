"""Copies on a GPU, and staging in its memory between processes: tests of tests/migration without the fake CuPy."""

import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from migration.kv.copier.client import CopierClient
from migration.kv.copier.copier import Copier
from migration.kv.copier.tables import BlockLoad, BlockLoads, BlockTables, TableChange
from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, HostSegment
from migration.transport.nccl_link import NcclLink
from tests.migration.kv.caches import LAYOUTS, paged

# The fixtures and tests of that module, on the device below.
from tests.migration.kv.test_device_processes import (  # noqa: F401
    staging,
    test_block_changed_in_staging_arrives_changed,
    test_blocks_go_from_one_worker_to_another,
    test_failed_gather_leaves_no_valid_ticket,
    test_payload_under_another_ticket_is_not_read,
    test_segment_of_a_dead_process_is_not_opened,
    test_slot_is_not_read_after_its_lease,
    workers,
)

BLOCKS = 64
GPU = "cuda:0"


@pytest.fixture(scope="module")
def device() -> str:
    """Replaces that module's fixture."""
    return "cuda"


def on_gpu(caches: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The same cache on a GPU, in the same layout."""
    copies = paged(name, BLOCKS, device=GPU)
    for layer, copy in copies.items():
        copy.view(torch.int16).copy_(caches[layer].view(torch.int16))
    return copies


@pytest.mark.parametrize("name", LAYOUTS)
def test_gpu_stages_the_bytes_that_a_cpu_stages(name: str) -> None:
    import cupy

    here = paged(name, BLOCKS, seed=1)
    layout, there = CacheLayout(here, BLOCKS), CacheLayout(on_gpu(here, name), BLOCKS)
    ids = list(range(BLOCKS - 1, 0, -3))
    expected, slot = (
        memoryview(bytearray(len(ids) * layout.block_bytes)),
        cupy.empty(len(ids) * layout.block_bytes, dtype=cupy.uint8),
    )
    layout.gather(ids, expected)
    there.gather(ids, slot)
    assert there.kernels == 1 and there.shape == layout.shape
    assert slot.get().tobytes() == bytes(expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_arrive_unchanged_through_gpu_memory(name: str) -> None:
    import cupy

    source, target = on_gpu(paged(name, BLOCKS, seed=1), name), paged(name, BLOCKS, device=GPU)
    here, there = CacheLayout(source, BLOCKS), CacheLayout(target, BLOCKS)
    slot = cupy.empty(3 * here.block_bytes, dtype=cupy.uint8)
    here.gather([5, 63, 2], slot)
    there.scatter([7, 0], 3, 1, slot)
    for layer, blocks in target.items():
        assert torch.equal(blocks.view(torch.int16)[[7, 0]], source[layer].view(torch.int16)[[63, 2]])
        assert not blocks.view(torch.int16)[[1, 2, 5, 63]].any()


def test_gpu_cache_can_be_staged_in_host_slots() -> None:
    caches = paged("LBNHC", BLOCKS, seed=1)
    layout, there = CacheLayout(caches, BLOCKS), CacheLayout(on_gpu(caches, "LBNHC"), BLOCKS)
    expected, staged = (memoryview(bytearray(2 * layout.block_bytes)) for _ in range(2))
    layout.gather([9, 4], expected)
    there.gather([9, 4], staged)
    assert bytes(staged) == bytes(expected)


def test_gather_is_ordered_with_its_stream() -> None:
    import cupy

    caches = paged("LBNHC", BLOCKS, device=GPU)
    layout = CacheLayout(caches, BLOCKS)
    slot = cupy.empty(layout.block_bytes, dtype=cupy.uint8)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        torch.cuda._sleep(200_000_000)
        for layer in caches.values():
            layer.view(torch.int16)[3] = -1
        layout.gather([3], slot)
    assert set(slot.get().tolist()) == {255}


@pytest.fixture
async def desk() -> AsyncIterator[tuple[dict[str, torch.Tensor], BlockTables, BlockLoads, CopierClient]]:
    """A cache with a copier, and a client of it."""
    caches, tables, loads = paged("LBNHC", BLOCKS, device=GPU), BlockTables(4), BlockLoads()
    copier = Copier(CacheLayout(caches, BLOCKS), tables, loads, {}, deque())
    client = await CopierClient.connect(copier.address)
    yield caches, tables, loads, client
    client.close()
    copier.close()


def recorded() -> Any:
    """A fence behind all work launched so far."""
    event = torch.cuda.Event()
    event.record()
    return event


async def test_copier_waits_for_the_step_that_filled_a_block_and_for_no_later_one(
    desk: tuple[dict[str, torch.Tensor], BlockTables, BlockLoads, CopierClient],
) -> None:
    caches, tables, _, client = desk
    with HostSegment.create(1 << 20) as segment:
        torch.cuda._sleep(200_000_000)
        for layer in caches.values():
            layer.view(torch.int16)[3] = -1
        tables.apply([TableChange("r.0", 4, [3], replace=True, caught_up=True)], recorded())
        torch.cuda._sleep(2_000_000_000)
        _, size = await client.gather("r.0", 0, 1, segment.path, 0)
        assert not torch.cuda.current_stream().query(), "the later step has ended: the gather may have waited for it"
        assert set(bytes(segment.view(HEADER, size - HEADER))) == {255}
    torch.cuda.synchronize()


async def test_copier_fills_blocks_after_their_former_steps_and_before_it_reports_them(
    desk: tuple[dict[str, torch.Tensor], BlockTables, BlockLoads, CopierClient],
) -> None:
    caches, tables, loads, client = desk
    with HostSegment.create(1 << 20) as segment:
        tables.apply([TableChange("r.0", 4, [3], replace=True, caught_up=True)], recorded())
        slot, _ = await client.gather("r.0", 0, 1, segment.path, 0)
        torch.cuda._sleep(200_000_000)
        for layer in caches.values():
            layer.view(torch.int16)[5] = -1
        loads.begin(BlockLoad("m.1", "v1", 0, [5]), recorded())
        await client.scatter("m.1", 0, 1, slot)
        assert loads.arrived() == ["m.1"]
        assert not any(layer.view(torch.int16)[5].any() for layer in caches.values())


def test_process_cannot_open_its_own_segment() -> None:
    from migration.kv.device import DeviceSegment
    from migration.protocol.errors import TransferFailed

    made = DeviceSegment.create(1 << 20)
    with pytest.raises(TransferFailed, match="staging segment cuda:"):
        DeviceSegment.open(made.path)
    made.close()


def test_segment_larger_than_the_gpus_memory_is_refused() -> None:
    from migration.kv.device import DeviceSegment

    with pytest.raises(RuntimeError, match=r"lower engine_kwargs\.gpu_memory_utilization"):
        DeviceSegment.create(1 << 45)


class LoneLink(NcclLink):
    """A link of one rank, which one GPU allows; its bytes go to itself."""

    def __init__(self) -> None:
        import cupy
        from cupy.cuda import nccl

        self._device = cupy.cuda.Device(0)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)


def test_abort_of_an_nccl_communicator_does_not_wait_for_its_end() -> None:
    """NCCL itself took 4.2 s on an H100."""
    link = LoneLink()
    began = time.monotonic()
    link.abort()
    link.abort()
    assert time.monotonic() - began < 0.5

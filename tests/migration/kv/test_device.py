"""Staging in GPU memory, with CuPy's surface faked over host memory; tests/gpu does the same with a GPU."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from migration.kv.device import DeviceSegment, DeviceSlot, use
from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, Segments
from migration.protocol.errors import TransferFailed
from migration.run.slots import Slots
from tests.migration import fake_cupy
from tests.migration.kv.caches import paged

SIZE = HEADER + 64


@pytest.fixture
def cupy() -> Iterator[Any]:
    with fake_cupy.installed() as fake:
        yield fake


@pytest.fixture
def segment(cupy: Any) -> Iterator[DeviceSegment]:
    made = DeviceSegment.create(SIZE)
    yield made
    made.close()


def test_tickets_are_outside_the_payload_memory(segment: DeviceSegment) -> None:
    segment.view(0, SIZE)[:] = 7
    segment.stamp(0, 2**64 - 1)
    assert segment.ticket(0) == 2**64 - 1
    assert set(segment.view(0, SIZE).tolist()) == {7}


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, SIZE + 1), (SIZE, 1), (-1, 4), (0, -1)],
    ids=["longer than the segment", "behind the segment", "before the segment", "of negative size"],
)
def test_views_outside_the_segment_are_refused(segment: DeviceSegment, offset: int, size: int) -> None:
    with pytest.raises(TransferFailed, match="lie outside"):
        segment.view(offset, size)


def test_process_cannot_open_its_own_segment(segment: DeviceSegment) -> None:
    with pytest.raises(TransferFailed, match="invalid device context"):
        DeviceSegment.open(segment.path)


@pytest.mark.parametrize("path", ["cuda:00", "cuda:zz:{host}", "cuda::{host}"], ids=["short", "no number", "empty"])
def test_malformed_paths_are_refused(segment: DeviceSegment, path: str) -> None:
    host = segment.path.split(":", 2)[2]
    with pytest.raises(TransferFailed, match="staging segment cuda:"):
        Segments().get(path.format(host=host))


def test_opening_a_segment_without_cupy_fails(segment: DeviceSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        with pytest.raises(TransferFailed, match="cupy"):
            DeviceSegment.open(segment.path)


def test_creating_a_segment_without_cupy_names_the_setup_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="make setup DEVICE=cuda"):
        DeviceSegment.create(SIZE)


def test_creating_a_segment_without_room_names_the_settings_to_lower(cupy: Any) -> None:
    cupy.cuda.runtime.free_bytes = 0
    with pytest.raises(
        RuntimeError, match=r"8 MiB .* 0 MiB are free: .*lower engine_kwargs\.gpu_memory_utilization, migration\.slots"
    ):
        DeviceSegment.create(8 << 20)


def test_segments_are_opened_on_the_gpu_in_use(cupy: Any) -> None:
    made = DeviceSegment.create(SIZE, device=2)
    assert made.view(0, SIZE).device.id == 2
    use(1)
    again = DeviceSegment.create(SIZE)
    use(0)
    assert again.view(0, SIZE).device.id == 1
    for segment in (made, again):
        segment.close()


def test_memory_is_freed_once(cupy: Any) -> None:
    made = DeviceSegment.create(SIZE)
    assert len(cupy.cuda.runtime.mapped) == 1
    made.close()
    made.close()
    assert not cupy.cuda.runtime.mapped


async def test_slots_do_not_overlap_on_the_gpu(cupy: Any) -> None:
    slots = Slots(2, 128, [DeviceSegment.create])
    with await slots.lease(1) as (first,), await slots.lease(1) as (second,):
        assert isinstance(first, DeviceSlot) and isinstance(second, DeviceSlot)
        first.payload[:], second.payload[:] = 1, 2
        assert len(first.payload) == 128 and len(first.memory) == HEADER
        assert set(first.payload.tolist()) == {1}
    slots.close()
    assert not cupy.cuda.runtime.mapped


async def test_end_of_the_lease_voids_the_content(cupy: Any) -> None:
    slots = Slots(1, 128, [DeviceSegment.create])
    with await slots.lease(1) as (slot,):
        slot.memory[:8] = (7).to_bytes(8, "little")
    assert bytes(slot.memory[:8]) == bytes(8)
    slots.close()


def test_array_that_torch_copies_is_refused(cupy: Any) -> None:
    """The gather would fill the copy, and leave the slot unchanged."""
    layout = CacheLayout(paged("LBHNC", 4, seed=1), 4)
    array = cupy.empty(layout.block_bytes, cupy.uint8)

    class Elsewhere(fake_cupy.Array):
        @property
        def data(self) -> Any:
            return SimpleNamespace(ptr=0)

    with pytest.raises(TransferFailed, match="not in memory that cpu can use"):
        layout.gather([0], array.view(Elsewhere))


def test_gather_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, waited = CacheLayout(paged("LBHNC", 4, seed=1), 4), []
    monkeypatch.setattr(layout, "_device", torch.device("cuda", 0))
    monkeypatch.setattr(layout, "_index", lambda blocks: torch.tensor(blocks))
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    staged = memoryview(bytearray(layout.block_bytes))
    layout.gather([0], staged)
    layout.scatter([1], 1, 0, staged)
    assert waited == [1, 1]

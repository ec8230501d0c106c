"""Staging slots: leased one at a time, and void after the lease."""

import asyncio
from collections.abc import Iterator

import pytest

from migration.kv.staging import HEADER, HostSegment, Segments
from migration.protocol.errors import TransferFailed, TransferTimeout
from migration.protocol.messages import SlotRef
from migration.run.slots import Slots
from policies.model import Bytes


@pytest.fixture
def slots() -> Iterator[Slots]:
    pool = Slots(2, 128)
    yield pool
    pool.close()


async def test_slots_do_not_overlap_and_hold_header_and_payload(slots: Slots) -> None:
    with await slots.lease(1) as (first,), await slots.lease(1) as (second,):
        assert len(first.memory) == len(second.memory) == HEADER + 128
        assert abs(first.offset - second.offset) >= HEADER + 128
        first.memory[:] = b"a" * len(first.memory)
        assert bytes(second.memory) == bytes(len(second.memory))


async def test_slots_in_use_are_counted(slots: Slots) -> None:
    with await slots.lease(1), await slots.lease(1):
        assert slots.in_use == 2
    assert slots.in_use == 0


async def test_lease_covers_one_slot_of_every_worker() -> None:
    slots = Slots(2, 128, [HostSegment.create] * 3)
    with await slots.lease(1) as one, await slots.lease(1) as other:
        assert len({slot.segment for slot in one}) == 3
        assert [slot.segment for slot in one] == [slot.segment for slot in other]
        assert slots.in_use == 2
        for slot in one:
            slot.memory[:8] = (7).to_bytes(8, "little")
    assert [bytes(slot.memory[:8]) for slot in one] == [bytes(8)] * 3
    slots.close()


def test_failed_segment_closes_the_others() -> None:
    made: list[HostSegment] = []

    def create(size: int) -> HostSegment:
        if made:
            raise RuntimeError("out of memory")
        made.append(HostSegment.create(size))
        return made[0]

    with pytest.raises(RuntimeError, match="out of memory"):
        Slots(2, 128, [create, create])
    assert made[0]._fd is None


async def test_lease_ends_when_its_block_raises(slots: Slots) -> None:
    with pytest.raises(ValueError, match="mine"), await slots.lease(1):
        raise ValueError("mine")
    assert slots.in_use == 0


async def test_lease_waits_for_a_free_slot(slots: Slots) -> None:
    first, _ = await slots.lease(1), await slots.lease(1)
    waiting = asyncio.create_task(slots.lease(5))
    await asyncio.sleep(0)
    assert not waiting.done()
    first.end()
    assert (await waiting).slots == first.slots


async def test_sends_leave_a_slot_for_what_arrives(slots: Slots) -> None:
    sent = await slots.lease(1, to_send=True)
    with pytest.raises(TransferTimeout):
        await slots.lease(0.01, to_send=True)
    with await slots.lease(1):
        waiting = asyncio.create_task(slots.lease(1, to_send=True))
        sent.end()
        (await waiting).end()
    assert slots.in_use == 0


async def test_send_that_gives_up_while_it_waits_for_a_slot_holds_up_no_other(slots: Slots) -> None:
    with await slots.lease(1), await slots.lease(1), pytest.raises(TransferTimeout):
        await slots.lease(0.01, to_send=True)
    (await slots.lease(1, to_send=True)).end()


async def test_lease_waits_no_longer_than_the_limit(slots: Slots) -> None:
    first, second = await slots.lease(1), await slots.lease(1)
    with first, second, pytest.raises(TransferTimeout, match=r"no staging slot was free within 0\.01 s"):
        await slots.lease(0.01)
    assert slots.in_use == 0


async def test_ending_a_lease_twice_frees_one_slot(slots: Slots) -> None:
    first, second = await slots.lease(1), await slots.lease(1)
    first.end()
    first.end()
    assert slots.in_use == 1
    second.end()
    assert slots.in_use == 0


async def test_end_of_the_lease_voids_the_content(slots: Slots) -> None:
    reader = Segments()
    with await slots.lease(1) as (slot,):
        reader.get(slot.segment).stamp(slot.offset, 7)
        reader.check(SlotRef(slot.segment, slot.offset, 7))
    with pytest.raises(TransferFailed, match="reused"):
        reader.check(SlotRef(slot.segment, slot.offset, 7))


async def test_spare_slots_are_the_half_that_may_be_taken_without_waiting() -> None:
    slots = Slots(4, 1 << 12)
    first = await slots.lease()
    spare = slots.lease_spare()
    assert spare is not None and slots.in_use == 2
    assert slots.lease_spare() is None
    first.end()
    assert slots.lease_spare() is not None
    slots.close()


@pytest.mark.parametrize(("workers", "shards"), [(1, 2), (2, 1), (2, 4), (2, 3), (4, 2)])
async def test_shards_of_other_workers_have_parts_that_do_not_overlap(workers: int, shards: int) -> None:
    """A slot of each worker takes them, as many blocks as fit."""
    size = Bytes(48)
    slots = Slots(2, 1024, [HostSegment.create] * workers)
    blocks = slots.blocks_received([size] * shards)
    assert blocks > 0
    lease = await slots.lease(1)
    parts = lease.split(shards)
    assert [part.segment for part in parts] == [lease.slots[i % workers].segment for i in range(shards)]
    for number, part in enumerate(parts):
        assert len(part.memory) >= HEADER + blocks * size
        part.memory[:] = bytes([number + 1]) * len(part.memory)
    for number, part in enumerate(parts):
        assert set(part.memory) == {number + 1}
        slot = lease.slots[number % workers]
        assert slot.offset <= part.offset and part.offset + len(part.memory) <= slot.offset + len(slot.memory)
    lease.end()
    assert {bytes(part.memory[:8]) for part in parts} == {bytes(8)}, "their content is void"
    del part, parts
    slots.close()


def test_blocks_that_do_not_fit_into_a_part_are_not_received() -> None:
    slots = Slots(2, 128, [HostSegment.create] * 2)
    assert slots.blocks_received([Bytes(128)]) == 1 and slots.blocks_received([Bytes(64), Bytes(129)]) == 0
    assert slots.blocks_received([Bytes(64)] * 3) == 0, "the header of each takes room"
    assert slots.blocks_received([Bytes(1)] * 7) == 0
    slots.close()

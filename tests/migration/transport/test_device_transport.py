"""GPU slots through the collective transport and the NCCL backend: both ends in this process, CuPy faked."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from migration.kv.device import DeviceSegment, DeviceSlot
from migration.kv.staging import HEADER, TICKET
from migration.protocol.errors import TransferFailed, TransferTimeout
from migration.protocol.messages import SlotRef
from migration.protocol.ports import PeerGroups, Slot
from migration.run.slots import Slots
from migration.transport import collective, nccl_group
from migration.transport.collective import CollectiveGroups, DeviceMemory
from migration.transport.nccl_group import NcclPair
from policies.model import Bytes, ReplicaId
from tests.migration import fake_cupy
from tests.ray_store import replace_store

A, B = ReplicaId("a"), ReplicaId("b")
PAYLOAD = 4096


class RayCollective:
    """A stand-in for ray.util.collective, for both ends."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, int], NcclPair] = {}

    def init_collective_group(self, world_size: int, rank: int, backend: str, group_name: str) -> None:
        assert backend == nccl_group.BACKEND
        self.groups[group_name, rank] = NcclPair(world_size, rank, group_name)

    def send(self, tensor: Any, dst_rank: int, group_name: str) -> None:
        self.groups[group_name, 1 - dst_rank].send([tensor], None)

    def recv(self, tensor: Any, src_rank: int, group_name: str) -> None:
        self.groups[group_name, 1 - src_rank].recv([tensor], None)

    def destroy_collective_group(self, group_name: str) -> None:
        for rank in (0, 1):
            if group := self.groups.pop((group_name, rank), None):
                group.destroy_group()


@dataclass
class End:
    """A replica's end: its transport and its slots."""

    transport: CollectiveGroups
    slots: Slots

    async def slot(self) -> DeviceSlot:
        slot = (await self.slots.lease(1)).slots[0]
        assert isinstance(slot, DeviceSlot)
        return slot


@pytest.fixture
def cupy() -> Iterator[Any]:
    with fake_cupy.installed() as fake:
        yield fake


@pytest.fixture
async def ends(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[End, End]]:
    replace_store(monkeypatch)
    monkeypatch.setattr(collective, "collective", RayCollective())
    monkeypatch.setattr(NcclPair, "timeout_s", 30.0)
    made = [
        End(CollectiveGroups(nccl_group.BACKEND, 30.0, 8, DeviceMemory()), Slots(2, PAYLOAD, [DeviceSegment.create]))
        for _ in range(2)
    ]
    yield made[0], made[1]
    for end in made:
        end.transport.close()
        end.slots.close()
    await asyncio.sleep(0)


async def transfer(
    ends: tuple[End, End], slots: tuple[Slot, Slot], size: int = HEADER + PAYLOAD, rank: int = 0
) -> SlotRef:
    """Send one shard from A to B; return its slot at B."""
    channel = ends[0].transport.channel(A, B, rank)
    staged = SlotRef("cuda:at the source", 0, 77)
    _, there = await asyncio.gather(
        ends[0].transport.send(channel, slots[0], Bytes(size)),
        ends[1].transport.receive(channel, staged, Bytes(size), slots[1]),
    )
    return there


async def test_payload_arrives_with_its_ticket(ends: tuple[End, End]) -> None:
    source, target = [await end.slot() for end in ends]
    source.payload[:] = list(range(256)) * (PAYLOAD // 256)
    there = await transfer(ends, (source, target))
    assert there == SlotRef(target.segment, target.offset, 77)
    assert TICKET.unpack_from(target.memory) == (77,)
    assert target.payload.tolist() == source.payload.tolist()


async def test_only_the_chunk_is_sent(ends: tuple[End, End]) -> None:
    source, target = [await end.slot() for end in ends]
    source.payload[:], target.payload[:] = 1, 2
    await transfer(ends, (source, target), HEADER + 100)
    assert target.payload.tolist() == [1] * 100 + [2] * (PAYLOAD - 100)


async def test_chunks_keep_their_order(ends: tuple[End, End]) -> None:
    source = [await ends[0].slot() for _ in range(2)]
    target = [await ends[1].slot() for _ in range(2)]
    for i in range(2):
        source[i].payload[:] = i + 1
    await asyncio.gather(*(transfer(ends, (source[i], target[i])) for i in range(2)))
    assert [slot.payload[0] for slot in target] == [1, 2]


async def test_workers_of_each_rank_have_a_communicator_of_their_own(ends: tuple[End, End], cupy: Any) -> None:
    source, target = [await ends[0].slot() for _ in range(2)], [await ends[1].slot() for _ in range(2)]
    for rank in range(2):
        source[rank].payload[:] = rank + 1
    for _ in range(2):
        await asyncio.gather(*(transfer(ends, (source[rank], target[rank]), rank=rank) for rank in (1, 0)))
        assert [slot.payload[0] for slot in target] == [1, 2]
    assert len(cupy.cuda.nccl.ids) == 2 and len(cupy.cuda.nccl.made) == 4


async def test_silent_receiver_of_one_rank_holds_up_no_other(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NcclPair, "timeout_s", 2.0)
    slots = await ends[0].slot(), await ends[1].slot()
    other = await ends[0].slot(), await ends[1].slot()
    sending = asyncio.create_task(
        ends[0].transport.send(ends[0].transport.channel(A, B, 1), other[0], Bytes(HEADER + PAYLOAD))
    )
    await transfer(ends, slots)
    assert not sending.done()
    with pytest.raises(TransferTimeout):
        await sending


async def test_silent_receiver_times_out_and_the_next_chunk_arrives(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = await ends[0].slot(), await ends[1].slot()
    await transfer(ends, slots)
    with monkeypatch.context() as patch:
        patch.setattr(NcclPair, "timeout_s", 0.2)
        with pytest.raises(TransferTimeout, match="timed out"):
            await ends[0].transport.send(ends[0].transport.channel(A, B, 0), slots[0], Bytes(HEADER + PAYLOAD))
    await transfer(ends, slots)


async def test_failed_receive_leaves_no_ticket(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclPair, "timeout_s", 0.2)
    slot = await ends[1].slot()
    with pytest.raises(TransferTimeout):
        await ends[1].transport.receive("a>b#1:0", SlotRef("", 0, 77), Bytes(HEADER + PAYLOAD), slot)
    assert TICKET.unpack_from(slot.memory) == (0,)


async def test_cancelled_send_is_aborted_before_its_slot_is_free(ends: tuple[End, End], cupy: Any) -> None:
    slots = await ends[0].slot(), await ends[1].slot()
    await transfer(ends, slots)
    channel = ends[0].transport.channel(A, B, 0)
    sending = asyncio.create_task(ends[0].transport.send(channel, slots[0], Bytes(HEADER + PAYLOAD)))
    while not any(end.transfers for end in cupy.cuda.nccl.made):
        await asyncio.sleep(0.001)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert all(end.aborted for end in cupy.cuda.nccl.made if end.rank == 0)


async def test_slots_of_a_wrong_size_or_kind_are_refused(ends: tuple[End, End]) -> None:
    slot, staged, memory = await ends[1].slot(), SlotRef("", 0, 77), DeviceMemory()
    with pytest.raises(TransferFailed, match="no staging slot holds"):
        memory.buffer(slot, Bytes(HEADER + PAYLOAD + 1))
    with pytest.raises(TransferFailed, match="not in GPU memory"):
        memory.buffer(Slot("/proc/1/fd/1", 0, memoryview(bytearray(8192))), Bytes(100))
    with pytest.raises(TransferFailed, match="no staging slot to receive into"):
        await ends[1].transport.receive("a>b#1:0", staged, Bytes(100), None)


async def test_groups_with_a_replica_that_has_ended_are_left_and_others_stay(ends: tuple[End, End], cupy: Any) -> None:
    (here, there), made = ends, collective.collective.groups  # type: ignore[attr-defined]
    slots = await here.slot(), await there.slot()
    await transfer(ends, slots)
    other = here.transport.channel(ReplicaId("c"), A, 0), here.transport.channel(A, ReplicaId("c"), 1)
    for channel in other:
        here.transport._join(channel.rsplit(":", 1)[0], 0)
    here.transport.channel(A, B, 1)  # nothing was sent by it
    assert isinstance(here.transport, PeerGroups)
    here.transport.leave(B)
    assert {group for group, _ in made} == {channel.rsplit(":", 1)[0] for channel in other}
    assert here.transport._groups.keys() == {"c>a/0", "a>c/1"} and len(here.transport._transfers) == 2
    here.transport.leave(ReplicaId("c"))
    assert not (made or here.transport._groups or here.transport._transfers or here.transport._turns)
    while not all(link.aborted for link in cupy.cuda.nccl.made):
        await asyncio.sleep(0.001)

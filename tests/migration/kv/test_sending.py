"""The parts of a slot through which a copier sends, without a copier."""

import itertools

import pytest

from migration.kv.copier.sending import PARTS, Part, Sending, split
from migration.kv.copier.wire import SendCall, Taker
from migration.kv.staging import HEADER


def call(first: int, last: int, blocks: int, *offsets: int, takers: int = 1) -> SendCall:
    return SendCall(1, "r.0", first, last, "", list(offsets or (0,)), blocks, [Taker("")] * takers, "m.1")


@pytest.mark.parametrize("slot_blocks", [1, 2, 3, 4, 5, 7, 64, 512])
@pytest.mark.parametrize("block_bytes", [96, 128 << 10])
def test_parts_lie_within_the_slot_and_do_not_overlap(slot_blocks: int, block_bytes: int) -> None:
    parts, blocks = split(slot_blocks, block_bytes)
    sending = Sending(call(0, slot_blocks, slot_blocks, 640), block_bytes)
    assert len(sending.offsets) == parts <= PARTS and blocks >= 1
    begins = [*sending.offsets, 640 + HEADER + slot_blocks * block_bytes]
    assert begins[0] == 640
    assert all(low + HEADER + blocks * block_bytes <= high for low, high in itertools.pairwise(begins))
    assert all(offset % HEADER == 0 for offset in sending.offsets)


def test_large_slot_has_all_parts() -> None:
    assert split(64, 128 << 10) == (PARTS, 15)


def test_parts_are_taken_in_order_while_the_slot_has_room() -> None:
    sending = Sending(call(3, 50, 64), 128 << 10)
    taken = []
    while sending.ready:
        taken.append(sending.take())
    assert [(part.first, part.last) for part in taken] == [(3, 18), (18, 33), (33, 48), (48, 50)]
    assert len({part.offset for part in taken}) == PARTS and not sending.done
    for part in taken:
        sending.answered(part)
    assert sending.done


def test_part_is_used_again_once_it_has_been_answered() -> None:
    sending = Sending(call(0, 100, 64), 128 << 10)
    taken = [sending.take() for _ in range(PARTS)]
    assert not sending.ready
    sending.answered(taken[2])
    assert sending.take() == Part(60, 75, taken[2].offset)


def test_part_is_used_again_once_all_its_takers_have_answered() -> None:
    sending = Sending(call(0, 100, 64, takers=2), 128 << 10)
    taken = [sending.take() for _ in range(PARTS)]
    sending.answered(taken[2])
    sending.answered(taken[1])
    assert not sending.ready
    sending.answered(taken[2])
    assert sending.take().offset == taken[2].offset


def test_all_slots_are_used() -> None:
    sending = Sending(call(0, 100, 64, 0, 1 << 24), 128 << 10)
    assert len(sending.offsets) == 2 * PARTS and sending.offsets[PARTS] == 1 << 24

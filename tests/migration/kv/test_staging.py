"""Shared staging memory: bounds, tickets, and processes that end."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from migration.kv.staging import HEADER, HostSegment, Segments, free_host_memory
from migration.protocol.errors import TransferFailed
from migration.protocol.messages import SlotRef

SIZE = HEADER + 64


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    with HostSegment.create(SIZE) as made:
        yield made


def in_another_process(code: str, *args: str) -> str:
    """The output of `code` in another process, with HostSegment and Segments imported."""
    head = "import sys; from migration.kv.staging import HostSegment, Segments; "
    return subprocess.run(
        [sys.executable, "-c", head + code, *args], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_new_segment_is_zero_and_carries_no_ticket(segment: HostSegment) -> None:
    assert bytes(segment.view(0, SIZE)) == bytes(SIZE)
    assert segment.ticket(0) == 0


def test_segment_opened_by_its_path_has_the_same_bytes(segment: HostSegment) -> None:
    with HostSegment.open(segment.path) as other:
        segment.view(HEADER, 3)[:] = b"abc"
        other.view(HEADER + 3, 3)[:] = b"def"
        assert bytes(segment.view(HEADER, 6)) == bytes(other.view(HEADER, 6)) == b"abcdef"


def test_another_process_reads_and_writes_the_same_bytes(segment: HostSegment) -> None:
    segment.view(HEADER, 3)[:] = b"abc"
    code = "s = HostSegment.open(sys.argv[1]); print(bytes(s.view(64, 3))); s.view(64, 3)[:] = b'xyz'; s.stamp(0, 9)"
    assert in_another_process(code, segment.path) == "b'abc'"
    assert bytes(segment.view(HEADER, 3)) == b"xyz" and segment.ticket(0) == 9


def test_segment_of_a_dead_process_cannot_be_opened() -> None:
    path = in_another_process("print(HostSegment.create(128).path)")
    with pytest.raises(TransferFailed, match=f"staging segment {path}: "):
        HostSegment.open(path)


def test_file_that_is_no_segment_is_refused() -> None:
    read, write = os.pipe()
    with pytest.raises(TransferFailed, match="staging segment"):
        HostSegment.open(f"/proc/self/fd/{write}")
    os.close(read)
    os.close(write)


def test_mapping_outlives_the_process_that_created_the_segment() -> None:
    code = "s = HostSegment.create(128); s.stamp(0, 5); print(s.path, flush=True); sys.stdin.read()"
    head = "import sys; from migration.kv.staging import HostSegment; "
    with subprocess.Popen(
        [sys.executable, "-c", head + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        segments, path = Segments(), maker.stdout.readline().strip()
        segments.check(SlotRef(path, 0, 5))
        maker.kill()
    segments.check(SlotRef(path, 0, 5))


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, SIZE + 1), (SIZE, 1), (-1, 4), (0, -1)],
    ids=["longer than the segment", "behind the segment", "before the segment", "of negative size"],
)
def test_views_outside_the_segment_are_refused(segment: HostSegment, offset: int, size: int) -> None:
    with pytest.raises(TransferFailed, match="lie outside"):
        segment.view(offset, size)


def test_view_may_end_where_the_segment_ends(segment: HostSegment) -> None:
    assert len(segment.view(0, SIZE)) == SIZE and len(segment.view(SIZE, 0)) == 0


def test_segment_with_a_view_in_use_can_be_closed() -> None:
    segment = HostSegment.create(SIZE)
    view = segment.view(0, SIZE)
    segment.close()
    assert bytes(view) == bytes(SIZE)


def test_payload_is_read_under_its_ticket(segment: HostSegment) -> None:
    segment.view(HEADER, 4)[:] = b"data"
    segment.stamp(0, 3)
    assert bytes(Segments().payload(SlotRef(segment.path, 0, 3), 4)) == b"data"


@pytest.mark.parametrize("ticket", [0, 2, 4], ids=["while written", "of what was there before", "of what came after"])
def test_payload_under_another_ticket_is_refused(segment: HostSegment, ticket: int) -> None:
    segment.stamp(0, ticket)
    with pytest.raises(TransferFailed, match="reused"):
        Segments().payload(SlotRef(segment.path, 0, 3), 4)


def test_payload_with_a_checksum_is_read_as_long_as_it_has_it(segment: HostSegment) -> None:
    segment.view(HEADER, 4)[:] = b"data"
    segment.stamp(0, 3, checked=4)
    assert bytes(Segments().payload(SlotRef(segment.path, 0, 3), 4)) == b"data"
    segment.view(HEADER, 4)[:] = b"dada"
    with pytest.raises(TransferFailed, match="damaged"):
        Segments().payload(SlotRef(segment.path, 0, 3), 4)
    segment.stamp(0, 4)
    assert bytes(Segments().payload(SlotRef(segment.path, 0, 4), 4)) == b"dada"


def test_payload_longer_than_the_slot_is_refused(segment: HostSegment) -> None:
    segment.stamp(0, 3)
    with pytest.raises(TransferFailed, match="lie outside"):
        Segments().payload(SlotRef(segment.path, 0, 3), 65)


def test_tickets_are_whole_64_bit_numbers(segment: HostSegment) -> None:
    segment.stamp(0, 2**64 - 1)
    assert segment.ticket(0) == 2**64 - 1


def test_segment_is_opened_once() -> None:
    segments = Segments()
    with HostSegment.create(SIZE) as made:
        assert segments.get(made.path) is segments.get(made.path)


def test_least_recently_used_segment_is_closed() -> None:
    segments = Segments(limit=2)
    a, b, c = (HostSegment.create(SIZE) for _ in range(3))
    first, second = segments.get(a.path), segments.get(b.path)
    segments.get(a.path)
    segments.get(c.path)
    assert segments.get(a.path) is first
    assert segments.get(b.path) is not second


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [(None, None, 3 << 30), ("max", "5", 3 << 30), (str(2 << 30), str(1 << 30), 1 << 30), ("5", "7", 0)],
    ids=["no group", "no limit", "limit", "above the limit"],
)
def test_free_memory_is_the_machines_or_the_groups(
    limit: str | None, used: str | None, free: int, tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9999999 kB\nMemAvailable:  3145728 kB\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, value in (("memory.max", limit), ("memory.current", used)):
        if value is not None:
            (group / name).write_text(value + "\n")
    assert free_host_memory(tmp_path) == free

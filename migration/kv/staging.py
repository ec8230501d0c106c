"""Staging slots: shared memory between a replica and its engine's worker, and between replicas of a node.

A segment is an anonymous file (memfd) that other processes map through /proc: it has no name that could clash, and
the kernel frees it when the last process that maps it has ended, however it ended. `device` has segments whose payloads
are in GPU memory.

One slot is a header and a payload:

    [0, 8)               ticket of the payload, 0 while it is being written
    [8, 16)              checksum of the payload, 0 without one; in host memory
    [HEADER, slot_bytes) KV blocks, contiguous: for each layer, for each block
"""

import contextlib
import mmap
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from migration.protocol.errors import TransferFailed
from migration.protocol.messages import SlotRef
from migration.protocol.ports import Slot
from policies.model import Bytes

HEADER = 64
"""Bytes before the payload: room for the ticket, and a whole cache line so that the payload is aligned."""

DEVICE = "cuda:"
"""The prefix of paths of segments in GPU memory."""

TICKET = struct.Struct("<Q")
"""The ticket's encoding, in the first bytes of a header."""

_CHECKSUM = struct.Struct("<II")
"""The checksum's encoding, behind the ticket: 1 if there is one, and its value (CRC-32)."""


def free_host_memory(root: Path = Path("/")) -> Bytes:
    """Bytes of memory that processes can still use: of this machine or, if less, of this process's control group."""
    rows = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    free = next(1024 * int(row[1]) for row in rows if row[0] == "MemAvailable:")
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return Bytes(max(0, free))


class Staging(Protocol):
    """A segment with payloads in host or GPU memory. Other processes of this node open it by its `path`."""

    path: str

    def view(self, offset: int, size: int) -> Any:
        """`size` writable bytes from `offset`: a memoryview, or a CuPy array in GPU memory.

        Raises:
            TransferFailed: the bytes lie outside the segment.
        """
        ...

    def ticket(self, offset: int) -> int:
        """The ticket of the slot at `offset`."""
        ...

    def stamp(self, offset: int, ticket: int, checked: int = 0) -> None:
        """Write the ticket of the slot at `offset`; 0 marks the payload as invalid.

        A payload in host memory gets a checksum of its first `checked` bytes.
        """
        ...

    def is_intact(self, offset: int, size: int) -> bool:
        """False if the first `size` bytes of the payload do not have the checksum that the slot has."""
        ...

    def slot(self, offset: int, size: int) -> Slot:
        """The slot of `size` bytes, header included, at `offset`."""
        ...

    def close(self) -> None:
        """Free or unmap the memory."""
        ...


class HostSegment:
    """A segment in host memory. Other processes of this node open it by its `path`."""

    def __init__(self, fd: int, size: int, path: str) -> None:
        self.path = path
        self.size = size
        self._map = mmap.mmap(fd, size)
        self._fd: int | None = fd  # Owned from here on; if mmap raises, the caller still owns it.

    @classmethod
    def create(cls, size: int) -> Self:
        """A new segment of `size` bytes; it exists as long as this process or any process that has mapped it."""
        fd = os.memfd_create("mell-staging", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str) -> Self:
        """Map another process's segment. Raises TransferFailed if that process has ended, or `path` is no segment."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferFailed(f"staging segment {path}: {error.strerror}") from error
        try:
            return cls(fd, os.fstat(fd).st_size, path)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise TransferFailed(f"staging segment {path}: {error}") from error

    def view(self, offset: int, size: int) -> memoryview:
        """`size` writable bytes from `offset`. Raises TransferFailed if they lie outside the segment."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise TransferFailed(f"bytes [{offset}, {offset + size}) lie outside a segment of {self.size}")
        return memoryview(self._map)[offset : offset + size]

    def ticket(self, offset: int) -> int:
        """The ticket of the slot at `offset`."""
        value: int = TICKET.unpack(self.view(offset, TICKET.size))[0]
        return value

    def stamp(self, offset: int, ticket: int, checked: int = 0) -> None:
        """See `Staging.stamp`."""
        checksum = (1, zlib.crc32(self.view(offset + HEADER, checked))) if checked else (0, 0)
        _CHECKSUM.pack_into(self.view(offset + TICKET.size, _CHECKSUM.size), 0, *checksum)
        TICKET.pack_into(self.view(offset, TICKET.size), 0, ticket)

    def is_intact(self, offset: int, size: int) -> bool:
        """See `Staging.is_intact`."""
        checked, checksum = _CHECKSUM.unpack(self.view(offset + TICKET.size, _CHECKSUM.size))
        return not checked or zlib.crc32(self.view(offset + HEADER, size)) == checksum

    def slot(self, offset: int, size: int) -> Slot:
        """The slot of `size` bytes, header included, at `offset`."""
        return Slot(self.path, offset, self.view(offset, size))

    def close(self) -> None:
        """Close the segment; further calls do nothing. A view still in use keeps the mapping until its own end."""
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        with contextlib.suppress(BufferError):  # A tensor still refers to the mapping, which ends with the tensor.
            self._map.close()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Segments:
    """Segments mapped by this process: opened on first use, and at most `limit` kept open."""

    def __init__(self, limit: int = 16) -> None:
        self._limit = limit
        self._open: dict[str, Staging] = {}

    def get(self, path: str) -> Staging:
        """The segment at `path`. Closes the least recently used one if more than `limit` are open."""
        segment = self._open.pop(path, None) or _open(path)
        self._open[path] = segment
        if len(self._open) > self._limit:
            self._open.pop(next(iter(self._open))).close()
        return segment

    def payload(self, ref: SlotRef, size: int) -> Any:
        """The first `size` bytes of a slot's payload, which are all of it.

        Raises TransferFailed unless the slot carries `ref`'s ticket, and the bytes have the slot's checksum.
        """
        self.check(ref)
        segment = self.get(ref.segment)
        if not segment.is_intact(ref.offset, size):
            raise TransferFailed("the staged KV blocks are damaged: they do not have their checksum")
        return segment.view(ref.offset + HEADER, size)

    def check(self, ref: SlotRef) -> None:
        """Raise TransferFailed unless the slot still carries `ref`'s ticket."""
        if self.get(ref.segment).ticket(ref.offset) != ref.ticket:
            raise TransferFailed("the staging slot was reused before it was read")


def _open(path: str) -> Staging:
    if not path.startswith(DEVICE):
        return HostSegment.open(path)
    from migration.kv.device import DeviceSegment

    return DeviceSegment.open(path)

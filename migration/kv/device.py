"""Staging segments whose payloads are in GPU memory, shared between processes by CUDA IPC. Needs CuPy.

The replica process allocates a segment and owns its slots: it leases them and sends from them, and they must outlive
the workers. Its own worker maps the segment; with transport `cuda_ipc`, so do the workers of other replicas on the
node. CUDA does not let a process open its own handle, so a worker cannot run in the replica's process; vLLM's never
does.

Headers stay in host memory, in a segment of the same size whose pages between the headers are never touched: a ticket
is read and written without the GPU. Tickets order writer and reader as they do in host memory: a writer stamps a slot
only after the GPU has finished writing its payload (`CacheLayout.gather`, and the transports), and a reader checks the
ticket again after the GPU has read the payload.

The path of a segment is "cuda:", the IPC handle in hexadecimal, ":", and the path of the headers' segment. The headers'
segment cannot be opened after the end of its process, so the IPC handle of a dead process is never opened either.
"""

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any, Self

from migration.kv.staging import DEVICE, HEADER, HostSegment
from migration.protocol.errors import TransferFailed
from migration.protocol.ports import Slot

_OUT_OF_MEMORY = 2
"""CUDA's number for cudaErrorMemoryAllocation."""


def preload() -> None:
    """Import CuPy if it is installed; otherwise the first migration would wait a second or two for the import."""
    with contextlib.suppress(ImportError):
        importlib.import_module("cupy")


def use(device: int) -> None:
    """Make `device` the current GPU of the calling thread for CuPy, whose CUDA runtime need not be torch's."""
    with contextlib.suppress(ImportError):
        importlib.import_module("cupy").cuda.Device(device).use()


@dataclass(frozen=True, slots=True)
class DeviceSlot(Slot):
    """A slot in GPU memory: `memory` is only its header, in host memory; `payload` is a CuPy array of bytes."""

    payload: Any


class DeviceSegment:
    """A `Staging` in GPU memory. `open` uses the current device of the calling thread."""

    def __init__(self, path: str, headers: HostSegment, pointer: int, owned: bool) -> None:
        import cupy

        self.path = path
        self.size = headers.size
        self._headers = headers
        self._pointer = pointer
        self._owned = owned
        self._device: int = cupy.cuda.runtime.getDevice()
        memory = cupy.cuda.UnownedMemory(pointer, self.size, self, self._device)
        self._bytes: Any = cupy.ndarray((self.size,), dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))

    @classmethod
    def create(cls, size: int, device: int | None = None) -> Self:
        """A new segment of `size` bytes, on the GPU `device` of those that this process sees; None: the current one.

        The memory comes from `cudaMalloc`: CuPy's and torch's allocators return parts of larger allocations, and an IPC
        handle always exports the whole allocation.

        Raises:
            RuntimeError: there is no CuPy, no GPU, or not enough memory on it.
        """
        try:
            import cupy
        except ImportError as error:
            raise RuntimeError(
                "staging in GPU memory needs CuPy: run `make setup DEVICE=cuda`, or install mell-serve[cuda]"
            ) from error
        runtime = cupy.cuda.runtime
        with cupy.cuda.Device(device):
            try:
                pointer = runtime.malloc(size)
            except runtime.CUDARuntimeError as error:
                full = "; lower engine_kwargs.gpu_memory_utilization, migration.slots or migration.slot_mib"
                hint = full if error.status == _OUT_OF_MEMORY else ""
                free, _ = runtime.memGetInfo()
                wanted = f"{size >> 20} MiB of GPU memory for staging slots, {free >> 20} MiB are free"
                raise RuntimeError(f"{wanted}: {error}{hint}") from error
            headers = HostSegment.create(size)
            handle: bytes = runtime.ipcGetMemHandle(pointer)
            return cls(f"{DEVICE}{handle.hex()}:{headers.path}", headers, pointer, owned=True)

    @classmethod
    def open(cls, path: str) -> Self:
        """Map another process's segment. Raises TransferFailed if that process has ended, or CUDA cannot map it."""
        try:
            import cupy

            handle, headers_path = path.removeprefix(DEVICE).split(":", 1)
            headers = HostSegment.open(headers_path)
        except (ImportError, ValueError) as error:
            raise TransferFailed(f"staging segment {path}: {error}") from error
        try:
            # CuPy's default flag also maps memory of a GPU of this node that CUDA_VISIBLE_DEVICES hides.
            pointer = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(handle))
        except (ValueError, cupy.cuda.runtime.CUDARuntimeError) as error:
            headers.close()
            raise TransferFailed(f"staging segment {path}: {error}") from error
        return cls(path, headers, pointer, owned=False)

    def view(self, offset: int, size: int) -> Any:
        """`size` bytes from `offset` as a CuPy array. Raises TransferFailed if they lie outside the segment."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise TransferFailed(f"bytes [{offset}, {offset + size}) lie outside a segment of {self.size}")
        return self._bytes[offset : offset + size]

    def ticket(self, offset: int) -> int:
        """The ticket of the slot at `offset`."""
        return self._headers.ticket(offset)

    def stamp(self, offset: int, ticket: int, checked: int = 0) -> None:
        """See `Staging.stamp`. A payload in GPU memory has no checksum."""
        self._headers.stamp(offset, ticket)

    def is_intact(self, offset: int, size: int) -> bool:
        """See `Staging.is_intact`."""
        return True

    def slot(self, offset: int, size: int) -> DeviceSlot:
        """The slot of `size` bytes, header included, at `offset`."""
        payload = self.view(offset + HEADER, size - HEADER)
        return DeviceSlot(self.path, offset, self._headers.view(offset, HEADER), payload)

    def close(self) -> None:
        """Free the memory, or unmap it. All views and all copies on the GPU must have ended."""
        import cupy

        pointer, self._pointer = self._pointer, 0
        if not pointer:
            return
        with cupy.cuda.Device(self._device):
            (cupy.cuda.runtime.free if self._owned else cupy.cuda.runtime.ipcCloseMemHandle)(pointer)
        self._headers.close()

"""The part of CuPy 14.2 that Mell uses, over host memory: device memory that other processes can open, streams, NCCL.

`install` puts it in place of CuPy. Two ranks of a communicator are two threads here; a transfer takes place once
both have asked for it, and until then streams are busy, as on a GPU. Names and signatures are CuPy's own.
"""

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, ClassVar, Self

import numpy as np


class CUDARuntimeError(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError; `status` is CUDA's number of the error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class NcclError(RuntimeError):
    """cupy.cuda.nccl.NcclError."""


class Runtime(ModuleType):
    """cupy.cuda.runtime: allocations are anonymous files, a handle is the name of one."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        super().__init__("cupy.cuda.runtime")
        self.free_bytes = 1 << 30
        self.mapped: dict[int, tuple[mmap.mmap, int]] = {}

    def getDevice(self) -> int:
        return Device.current[-1]

    def memGetInfo(self) -> tuple[int, int]:
        return self.free_bytes, 1 << 30

    def malloc(self, size: int) -> int:
        if size > self.free_bytes:
            raise CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, size)
        return self._map(fd, size)

    def _map(self, fd: int, size: int) -> int:
        mapped = mmap.mmap(fd, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.mapped[address] = mapped, fd
        return address

    def _unmap(self, pointer: int) -> None:
        _, fd = self.mapped.pop(pointer)
        os.close(fd)

    free = ipcCloseMemHandle = _unmap

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        return f"{os.getpid()} {self.mapped[pointer][1]}".encode().ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:
        if len(handle) != 64:
            raise ValueError("a handle has 64 bytes")
        pid, fd = handle.rstrip(b"\0").decode().split()
        if int(pid) == os.getpid():
            raise CUDARuntimeError(201, "cudaErrorDeviceUninitialized: invalid device context")
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError:
            raise CUDARuntimeError(400, "cudaErrorInvalidResourceHandle: invalid resource handle") from None
        return self._map(opened, os.fstat(opened).st_size)


class Array(np.ndarray):
    """cupy.ndarray, of one dimension."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    device_id = 0

    def __array_finalize__(self, base: Any) -> None:
        self.device_id = getattr(base, "device_id", 0)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self.device_id)


def array_at(shape: tuple[int], dtype: Any, memptr: Any) -> Any:
    """cupy.ndarray's constructor."""
    array = np.ctypeslib.as_array((ctypes.c_uint8 * shape[0]).from_address(memptr.pointer)).view(Array)
    array.device_id = memptr.device_id
    return array


class Device:
    """cupy.cuda.Device; `current` ends with the device of the innermost block."""

    current: ClassVar[list[int]] = [0]

    def __init__(self, id: int | None = None) -> None:
        self.id = self.current[-1] if id is None else id

    def __enter__(self) -> Self:
        self.current.append(self.id)
        return self

    def use(self) -> None:
        self.current[-1] = self.id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.current.pop()


class Stream:
    """cupy.cuda.Stream; `ptr` finds it again."""

    known: ClassVar[dict[int, "Stream"]] = {}

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking, "a stream that waits for the legacy one waits for the engine"
        self.ptr = id(self)
        self.busy = False
        self.known[self.ptr] = self

    @property
    def done(self) -> bool:
        return not self.busy

    def synchronize(self) -> None:
        assert not self.busy, "a real stream would never get done"


class Nccl(ModuleType):
    """cupy.cuda.nccl, with members for tests: communicators by rank, and the ids made."""

    NCCL_UINT8 = 1
    NcclError = NcclError
    available = True

    def __init__(self) -> None:
        super().__init__("cupy.cuda.nccl")
        self.changed = threading.Condition()
        self.ids: list[bytes] = []
        self.made: list[Any] = []
        self.waiting: dict[bytes, dict[int, Any]] = {}
        self.error: NcclError | None = None
        """An error that NCCL found in the background, to be raised by `check_async_error`."""
        self.apart = threading.Event()
        """Cleared, an abort does not return after it has ended the transfers, as if NCCL freed memory for ever."""
        self.apart.set()

        nccl = self

        class NcclCommunicator:
            """cupy.cuda.nccl.NcclCommunicator."""

            def __init__(self, ndev: int, commId: bytes, rank: int, config: object = None) -> None:
                assert ndev in (1, 2) and len(commId) == 128
                self.rank, self.aborted = rank, False
                self.transfers: list[tuple[int, int, Stream]] = []
                with nccl.changed:
                    nccl.waiting.setdefault(commId, {})[rank] = self
                    nccl.changed.notify_all()
                    nccl.changed.wait_for(lambda: len(nccl.waiting[commId]) == ndev)
                    self.peer = nccl.waiting[commId][ndev - 1 - rank]
                    nccl.made.append(self)

            def send(self, pointer: int, count: int, datatype: int, peer: int, stream: int) -> None:
                self._enqueue(pointer, count, datatype, peer, stream)

            recv = send

            def _enqueue(self, pointer: int, count: int, datatype: int, peer: int, stream: int) -> None:
                assert not self.aborted and datatype == nccl.NCCL_UINT8 and peer == 1 - self.rank
                with nccl.changed:
                    Stream.known[stream].busy = True
                    self.transfers.append((pointer, count, Stream.known[stream]))
                    if self.peer.transfers and not self.peer.aborted:
                        pair = (self, self.peer) if self.rank == 0 else (self.peer, self)
                        (source, size, one), (target, room, other) = (end.transfers.pop(0) for end in pair)
                        assert size == room
                        ctypes.memmove(target, source, size)
                        one.busy = other.busy = False

            def check_async_error(self) -> None:
                assert not self.aborted, "the communicator was freed"
                if nccl.error:
                    raise nccl.error

            def abort(self) -> None:
                with nccl.changed:
                    self.aborted = True
                    for _, _, stream in self.transfers:
                        stream.busy = False
                    self.transfers.clear()
                nccl.apart.wait()

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self) -> bytes:
        self.ids.append(os.urandom(128))
        return self.ids[-1]


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """Install the fake; restore the earlier modules afterwards."""
    names = ("cupy", "cupy.cuda", "cupy.cuda.runtime", "cupy.cuda.nccl")
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    yield install()
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def install() -> Any:
    """Put a new fake in the place of CuPy; return it."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    runtime, nccl = Runtime(), Nccl()
    vars(cuda).update(
        runtime=runtime,
        nccl=nccl,
        Device=Device,
        Stream=Stream,
        UnownedMemory=lambda ptr, size, owner, device_id: SimpleNamespace(pointer=ptr, device_id=device_id),
        MemoryPointer=lambda memory, offset: SimpleNamespace(
            pointer=memory.pointer + offset, device_id=memory.device_id
        ),
        is_available=lambda: True,
    )
    vars(cupy).update(
        cuda=cuda, ndarray=array_at, uint8=np.uint8, empty=lambda size, dtype: np.empty(size, dtype).view(Array)
    )
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime, "cupy.cuda.nccl": nccl})
    return cupy

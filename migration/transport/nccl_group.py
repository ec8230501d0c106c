"""A collective backend for Ray: pairwise NCCL communicators with time-outs, created and dropped on demand.

Ray's own NCCL backend has no time-outs, does not abort, needs torch tensors that record streams, and its rendezvous is
a named actor per pair, which outlives the replicas. This backend takes CuPy arrays and waits explicitly (`nccl_link`).
Its rendezvous is in Ray's key-value store:

    rank 1                      rank 0
    puts "receiver"       ->    gets it, creates a unique id   (an unused id leaks a thread and a socket)
    gets the id           <-    puts "id"
    both join; each deletes its own entry

A group fails once: after a time-out, an error or `destroy_group` all its transfers fail, and further transfers need a
group of another name.
"""

import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from migration.transport import pair_group, rendezvous
from migration.transport.nccl_link import SENDER, NcclLink, join

if TYPE_CHECKING:
    from ray.util.collective.types import RecvOptions, SendOptions

BACKEND = "MELL_NCCL"


class NcclPair(pair_group.PairGroup):
    """A pair over NCCL, between the memories of two GPUs; rank 0 sends, rank 1 receives."""

    name = BACKEND

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._using = threading.Lock()
        self._closed = threading.Event()
        self._link: NcclLink | None = None
        keys = f"nccl/{group_name}/id", f"nccl/{group_name}/receiver"
        self._own_key, self._peer_key = keys if rank == SENDER else keys[::-1]

    @classmethod
    def check_backend_availability(cls) -> bool:
        """True if there are CuPy, NCCL and a GPU."""
        try:
            import cupy
            from cupy.cuda import nccl
        except ImportError:
            return False
        return bool(nccl.available) and bool(cupy.cuda.is_available())

    def send(self, tensors: list[Any], options: "SendOptions") -> None:
        """Send one CuPy array of bytes."""
        self._pass("send", tensors[0])

    def recv(self, tensors: list[Any], options: "RecvOptions") -> None:
        """Receive into one CuPy array of bytes."""
        self._pass("recv", tensors[0])

    def destroy_group(self) -> None:
        """Drop the connection without waiting. A transfer in progress is aborted by its own thread."""
        self._closed.set()
        threading.Thread(target=self._release, name="nccl-release", daemon=True).start()
        rendezvous.delete(self._own_key)

    def _release(self) -> None:
        with self._using:
            if self._link is not None:
                self._link.abort()
                self._link = None

    def _pass(self, verb: Literal["send", "recv"], array: Any) -> None:
        deadline = time.monotonic() + self.timeout_s

        def check_open() -> None:
            if self._closed.is_set():
                raise RuntimeError(f"{self.group_name} was closed")

        def check() -> None:
            check_open()
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {self.timeout_s} s")

        with self._using:
            check_open()
            try:
                if self._link is None:
                    unique_id, device = self._meet(deadline), array.device.id
                    limit_s = deadline - time.monotonic()
                    self._link = join(lambda: NcclLink(unique_id, self.rank, device, check), limit_s)
                    rendezvous.delete(self._own_key)
                self._link.move(verb, array, check)
            except BaseException:
                self._closed.set()
                self._link = None
                raise

    def _meet(self, deadline: float) -> bytes:
        """The communicator's unique id, created after both ranks have arrived."""
        if self.rank != SENDER:
            rendezvous.put(self._own_key, b"here")
            return rendezvous.wait_for(self._peer_key, deadline, self._closed.is_set)
        from cupy.cuda import nccl

        rendezvous.wait_for(self._peer_key, deadline, self._closed.is_set)
        unique_id: bytes = nccl.get_unique_id()
        rendezvous.put(self._own_key, unique_id)
        return unique_id


def register(timeout_s: float) -> None:
    """Register the backend with Ray in this process."""
    pair_group.register(NcclPair, timeout_s)

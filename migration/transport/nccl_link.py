"""An NCCL communicator of two ranks whose transfers can be given up. Needs CuPy.

NCCL itself waits for ever, and CuPy makes blocking communicators only (its NcclConfig knows no other). So:
- What waits on the GPU is polled, and ended by `abort`.
- What waits on the host is making the communicator, and the first transfer, which connects the two. Both happen in a
  thread that may be left behind (`join`), before the memory of any slot is involved. Later transfers only enqueue a
  kernel.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

Check = Callable[[], None]
"""Returns to go on waiting; raises TimeoutError or RuntimeError to give up."""

SENDER, RECEIVER = 0, 1
_POLL_S = 0.0002


class Link:
    """A communicator and a stream of its own. One thread at a time uses it; data goes from rank 0 to rank 1."""

    def __init__(self, unique_id: bytes, rank: int, device: int, check: Check) -> None:
        """Meet the other rank, with which the unique id is shared, and connect. Blocks, see the module."""
        import cupy
        from cupy.cuda import nccl

        self._device = cupy.cuda.Device(device)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._communicator: Any = nccl.NcclCommunicator(2, unique_id, rank)
            greeting = cupy.empty(1, dtype=cupy.uint8)
        self.move("send" if rank == SENDER else "recv", greeting, check)

    def move(self, verb: Literal["send", "recv"], array: Any, check: Check) -> None:
        """Send a CuPy array of bytes to the other rank, or fill it from there.

        What is sent must be complete: the link's stream waits for no other. What is received is complete on return.

        Raises:
            TimeoutError, RuntimeError: `check` raised it.
            RuntimeError: NCCL failed. In either case the link is aborted, the array no longer in use.
        """
        from cupy.cuda import nccl

        peer = RECEIVER if verb == "send" else SENDER
        with self._device:
            try:
                enqueue = getattr(self._communicator, verb)
                enqueue(array.data.ptr, array.nbytes, nccl.NCCL_UINT8, peer, self._stream.ptr)
                self._wait(check)
            except BaseException:
                self.abort()
                raise

    def _wait(self, check: Check) -> None:
        while not self._stream.done:
            self._communicator.check_async_error()
            check()
            time.sleep(_POLL_S)
        self._communicator.check_async_error()

    def abort(self) -> None:
        """End the communicator and what it is doing; doing it again is no error.

        Returns once the kernel has left the GPU: before that, memory it was given must not be used again.
        """
        with self._device:
            self._communicator.abort()
            self._stream.synchronize()


def join(make: Callable[[], Link], limit_s: float) -> Link:
    """Make a link in a thread of its own. After `limit_s` seconds that thread is left to itself.

    It ends when NCCL notices that the other rank is gone, at the latest with the process, and aborts what it made.

    Raises:
        TimeoutError: the other rank did not join in time.
        RuntimeError: NCCL failed.
    """
    made: Future[Link] = Future()

    def run() -> None:
        try:
            link = make()
        except BaseException as error:
            if made.set_running_or_notify_cancel():
                made.set_exception(error)
            return
        if made.set_running_or_notify_cancel():
            made.set_result(link)
        else:
            link.abort()

    threading.Thread(target=run, name="nccl-join", daemon=True).start()
    try:
        return made.result(max(0.0, limit_s))
    except TimeoutError:
        if made.cancel():
            raise TimeoutError(f"timed out: the peer did not join within {limit_s:.1f} s") from None
        return made.result()

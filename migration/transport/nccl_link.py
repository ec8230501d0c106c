"""An NCCL communicator of two ranks whose transfers can be aborted. Needs CuPy.

NCCL waits without a time limit, and CuPy creates blocking communicators only (its NcclConfig has no other option). So:
- Work on the GPU is polled, and ended by `abort`.
- Two operations block on the host: creating the communicator, and the first transfer, which connects the ranks. Both
  run in a thread that may be left behind (`join`), before the memory of any slot is in use. Later transfers only
  enqueue a kernel.
- An abort first ends the transfer's kernel, and then takes apart the communicator, which took 4.2 s for an idle
  one on an H100. Only the kernel's end is waited for: a thread of its own takes the communicator apart. CuPy releases
  the interpreter's lock meanwhile.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

Check = Callable[[], None]
"""Called while waiting: returns to continue, raises TimeoutError or RuntimeError to stop."""

SENDER, RECEIVER = 0, 1
_POLL_S = 0.0002


class NcclLink:
    """A communicator and its own stream, for one thread at a time; data moves from rank 0 to rank 1."""

    def __init__(self, unique_id: bytes, rank: int, device: int, check: Check) -> None:
        """Connect to the other rank, which has the same unique id. Blocks, see the module."""
        import cupy
        from cupy.cuda import nccl

        self._device = cupy.cuda.Device(device)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._communicator: Any = nccl.NcclCommunicator(2, unique_id, rank)
            greeting = cupy.empty(1, dtype=cupy.uint8)
        self.move("send" if rank == SENDER else "recv", greeting, check)

    def move(self, verb: Literal["send", "recv"], array: Any, check: Check) -> None:
        """Send a CuPy array of bytes to the other rank, or receive into it.

        The array must be complete before a send, since the link's stream waits for no other stream. A received array
        is complete on return.

        Raises:
            TimeoutError, RuntimeError: raised by `check`.
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
        """End the communicator and its transfer; repeated calls are allowed.

        Returns when the transfer's kernel has ended, after which its memory may be reused. The communicator ends later.
        """
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            threading.Thread(target=self._take_apart, args=(communicator,), name="nccl-abort", daemon=True).start()
        with self._device:
            while not self._stream.done:
                time.sleep(_POLL_S)

    def _take_apart(self, communicator: Any) -> None:
        with self._device:
            communicator.abort()


def join(make: Callable[[], NcclLink], limit_s: float) -> NcclLink:
    """Make a link in a thread of its own, which is left behind after `limit_s` seconds.

    A thread that was left behind ends when NCCL finds that the other rank has ended, at the latest with the process; it
    aborts a link that it makes too late.

    Raises:
        TimeoutError: the other rank did not join in time.
        RuntimeError: NCCL failed.
    """
    made: Future[NcclLink] = Future()

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

"""A connection to the buddy's worker, with the memory that its calls bring along."""

import contextlib
import select
import socket

from migration.kv.pair.wire import Answer, Call, Hello, receive_answer, send
from migration.kv.staging import HostSegment


class BuddyLost(Exception):
    """The buddy's worker has ended, does not answer in time, or could not do what it was asked to."""


class BuddyLink:
    """One connection, for one thread at a time."""

    def __init__(self, address: str, epoch: int, blocks: int, size: int, timeout_s: float) -> None:
        """Connect, with `size` bytes of memory; each call is answered within `timeout_s` seconds. Raises BuddyLost."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._segment = HostSegment.create(size)
            self.memory = self._segment.view(0, size)
            self._socket.connect(address)
            self.call(Hello(epoch, blocks, self._segment.path))
        except (OSError, BuddyLost) as error:
            self.close()
            raise BuddyLost(f"the buddy's worker cannot be reached: {error}") from error

    def call(self, call: Call) -> float:
        """Have a call done; the seconds that the buddy took for it. Raises BuddyLost; no call counts from then on."""
        try:
            send(self._socket, call)
            answer: Answer = receive_answer(self._socket)
        except TimeoutError as error:
            self.close()
            raise BuddyLost("the buddy's worker does not answer") from error
        except (OSError, ValueError) as error:
            self.close()
            raise BuddyLost(f"the buddy's worker is gone: {error}") from error
        if answer.failure is not None:
            self.close()
            raise BuddyLost(f"the buddy's worker failed: {answer.failure}")
        return answer.seconds

    @property
    def ended(self) -> bool:
        """True if the other end has closed the connection, while no call is under way."""
        try:
            readable, _, _ = select.select([self._socket], [], [], 0)
            return bool(readable) and not self._socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

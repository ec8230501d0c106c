"""The errors of migrations, sorted by whose fault they are. Every error has its `Cause` beside its text.

MigrationError
  IllegalEvent        ours: a session was fed an event its state does not allow
  RequestGone         the request is not (or no longer) here
  Refused             the peer refused; nothing has changed
    Stopping          ... since it is about to be gone; another replica may take the request
  PeerLost            the peer is dead or stopping
  TransferFailed      the environment: blocks did not arrive whole
    TransferTimeout   ... in time
    BlocksGone        the request was preempted: its blocks are not there to be copied
    LoadOver          the load that blocks were sent to has ended
"""

from typing import Self

from policies.causes import Cause


class MigrationError(Exception):
    """Base of all errors of this package: a text for people, a cause for code. Both survive pickling."""

    cause = Cause.UNEXPECTED

    def __init__(self, text: str = "", cause: Cause | None = None) -> None:
        super().__init__(text)
        if cause is not None:
            self.cause = cause

    def __reduce__(self) -> tuple[type[Self], tuple[str, Cause]]:
        return type(self), (str(self), self.cause)


class IllegalEvent(MigrationError):
    """An event that the session's state does not allow; the session is unchanged."""


class RequestGone(MigrationError):
    """The request is not on this replica."""

    cause = Cause.REQUEST_ENDED


class Refused(MigrationError):
    """The replica that was asked refused, for `cause`; nothing has changed."""

    def __init__(self, text: str, cause: Cause) -> None:
        super().__init__(text, cause)


class Stopping(Refused):
    """The replica takes nothing new for now, whatever it is."""

    def __init__(self, text: str, cause: Cause = Cause.STOPPING) -> None:
        super().__init__(text, cause)


class PeerLost(MigrationError):
    """The other replica died, or is stopping."""

    cause = Cause.PEER_LOST


class TransferFailed(MigrationError):
    """KV blocks could not be gathered, sent, received or loaded."""

    cause = Cause.TRANSFER_FAILED


class TransferTimeout(TransferFailed):
    """A transfer did not finish within its time limit."""

    cause = Cause.TRANSFER_TIMEOUT


class BlocksGone(TransferFailed):
    """The request holds no blocks just now: it waits, or was preempted."""

    cause = Cause.BLOCKS_GONE


class LoadOver(TransferFailed):
    """The load takes no blocks any more. It may have ended well: without these, or before they came."""

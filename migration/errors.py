"""What can go wrong with a migration, sorted by whose fault it is.

MigrationError
  IllegalEvent        ours: a session was fed an event its state does not allow
  RequestGone         the request is not (or no longer) here
  Refused             the peer said no, with a reason; nothing happened
    Stopping          ... since it is about to be gone; another replica may take the request
  PeerLost            the peer is dead or stopping
  TransferFailed      the environment: blocks did not arrive whole
    TransferTimeout   ... in time
    BlocksGone        the request was preempted: its blocks are not there to be copied
"""


class MigrationError(Exception):
    """Base of all errors of this package."""


class IllegalEvent(MigrationError):
    """An event that the session's state does not allow; the session is unchanged."""


class RequestGone(MigrationError):
    """The request is not on this replica."""


class Refused(MigrationError):
    """The target refused; the text is the reason."""


class Stopping(Refused):
    """The replica takes nothing new for now, whatever it is."""


class PeerLost(MigrationError):
    """The other replica died, or is stopping."""


class TransferFailed(MigrationError):
    """KV blocks could not be gathered, sent, received or loaded."""


class TransferTimeout(TransferFailed):
    """A transfer did not finish within its time limit."""


class BlocksGone(TransferFailed):
    """The request holds no blocks just now: it waits, or was preempted."""

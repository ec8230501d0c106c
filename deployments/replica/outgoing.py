"""The sessions under way from a replica to other ones: its migrations as their source, its copies as their donor."""

from collections.abc import Collection
from typing import Protocol, TypeVar

from policies.model import ReplicaId

Key = TypeVar("Key")


class OutgoingSession(Protocol):
    """A migration or a copy, as the replica sees it that leads it."""

    @property
    def target(self) -> ReplicaId:
        """The replica that gets the request, or the blocks."""
        ...

    def target_lost(self) -> None:
        """End, since the target is gone. A session that has ended already stays as it is."""
        ...


Session = TypeVar("Session", bound=OutgoingSession)


class Outgoing(dict[Key, Session]):
    """The sessions of one kind by key, oldest first. A session is in it from its begin to its end."""

    def follow(self, running: Collection[ReplicaId]) -> None:
        """End the sessions with targets that are not among the `running` replicas."""
        for session in self.values():
            if session.target not in running:
                session.target_lost()

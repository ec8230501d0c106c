"""The categories that replicas had when the epoch began."""

from policies.cluster.changes import Changes
from policies.cluster.classes import Kind
from policies.cluster.replica import Replica
from policies.model import ReplicaId, RequestId


class Earlier:
    """The categories that replicas had before the epoch's departures and growth.

    The paper has a request depart with its old class from a replica of its old category. (An independent simulation
    that took the new ones used 3 to 8 % more replicas.)
    """

    def __init__(self, changes: Changes) -> None:
        self._known: dict[ReplicaId, Kind] = {}
        self._gone: dict[ReplicaId, list[Kind]] = {}
        self._was: dict[ReplicaId, dict[RequestId, Kind]] = {}
        for departure in changes.departed:
            self._gone.setdefault(departure.replica.id, []).append(departure.kind)
        for crossing in changes.crossed:
            if crossing.request.replica is not None:
                self._was.setdefault(crossing.request.replica.id, {})[crossing.request.id] = crossing.was

    def category(self, replica: Replica) -> Kind:
        """The category of a replica; to be asked first while its requests are where they were."""
        known = self._known.get(replica.id)
        if known is None:
            kinds = [request.kind for request in replica.requests.values()]
            was = self._was.get(replica.id)
            if was:
                kinds = [was.get(request.id, request.kind) for request in replica.requests.values()]
            known = self._known[replica.id] = max(Kind.TINY, *kinds, *self._gone.get(replica.id, ()))
        return known

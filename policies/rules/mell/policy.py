"""The paper's algorithm as a policy: Algorithm 1 with operation batching (section VI-C)."""

from dataclasses import dataclass, field
from operator import attrgetter

from policies.cluster.capacity import overloaded
from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.rules.mell.allocate import allocate, anywhere, named
from policies.rules.mell.board import Board
from policies.rules.mell.depart import Earlier, depart, refill
from policies.rules.mell.literal import Literal
from policies.rules.mell.ranking import Weights
from policies.rules.mell.reading import Reading
from policies.rules.mell.repaired import Repaired
from policies.rules.mell.units import single
from policies.rules.mell.update import relieve, relieve_at_once, update
from policies.rules.mell.work import Work
from policies.rules.options import HEADROOM, about
from policies.rules.policy import NONE, Barred


@dataclass(frozen=True, slots=True)
class Mell:
    """Allocate, Depart and Update of Fig. 10 in one of two readings.

    A call with all the changes of an epoch batches them; one call per change is Algorithm 1.
    """

    knows_sharing = False

    headroom_s: float = field(default=0.0, metadata=about(HEADROOM, least=0))
    memory_weight: float = field(
        default=1.0, metadata=about("The weight of a replica's free share in its priority.", least=0)
    )
    request_weight: float = field(
        default=0.01, metadata=about("The reduction of a replica's priority by each of its requests.", least=0)
    )
    same_node_weight: float = field(
        default=1.0, metadata=about("The bonus for a replica on the same node in its priority for a move.", least=0)
    )
    reading: Reading = field(default_factory=Literal)

    @property
    def weights(self) -> Weights:
        """The weights in a replica's priority."""
        return Weights(self.memory_weight, self.request_weight, self.same_node_weight)

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """The replica that Allocate chooses if it may neither move another request nor activate a replica."""
        board = Board(cluster, self.weights, clears=False, barred=barred)
        unit = single(request)
        chosen = next(named(board, unit), None) or next(self.reading.others(board, unit), None)
        return chosen or board.idle(unit) or anywhere(board, unit)

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """Section VI-C: (1) departures and (2) updates, both deferring their moves, (3) allocations, (4) refills.

        With scarce replicas some lifted units may find no room again. Then the call starts over and only cures
        overloads, one by one, as far as there is room.
        """
        work = Work(Board(cluster, self.weights, clears=not cluster.holds), self.reading)
        mark = work.mark()
        _lift(work, changes)
        largest = sorted(work.lifted, key=attrgetter("kind", "tokens"), reverse=True)
        if not all([allocate(work, unit) for unit in largest]):
            work.start_over(mark)
            for replica in overloaded(cluster):
                relieve_at_once(work, replica)
        for request in changes.waiting:
            allocate(work, single(request))
        for hole in work.holes:  # the list grows in the loop: a refill leaves a hole elsewhere
            if not work.is_filled(hole):
                refill(work, hole)


def _lift(work: Work, changes: Changes) -> None:
    """Steps (1) and (2), and the overloads by growth within a class."""
    earlier = Earlier(changes)
    for departure in changes.departed:
        depart(work, departure, earlier)
    for crossing in changes.crossed:
        update(work, crossing, earlier)
    for replica in overloaded(work.cluster):
        relieve(work, replica)


def mell() -> Mell:
    """The paper's algorithm as printed."""
    return Mell()


def mell_repaired(headroom_s: float = 4.0) -> Mell:
    """The paper's algorithm without unnecessary moves and activations, and with `headroom_s` seconds of growth free."""
    return Mell(headroom_s=headroom_s, reading=Repaired())

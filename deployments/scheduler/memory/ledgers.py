"""The ledgers of the nodes: what replicas of all pools hold, by their reports, and by the claims of those that start.

Each node has a ledger (`policies.memory.ledger`), so the replicas on it never hold more than its budget together.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.api.report import ElasticMemory
from deployments.serve.seats import ClaimStore, SeatClaim
from migration.memory.tables import PoolState
from migration.protocol.ports import Clock
from policies.memory.ledger import DeviceLedger, MemoryOrder, MemoryReport, Seat
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, PoolId, ReplicaId

CLAIM_S = 10.0
"""The time within which Serve lists a replica that has asked for memory, in seconds."""

UNKNOWN = "a replica has not reported to this scheduler yet"
"""The reason why nothing is ordered or given before `NodeLedgers.is_known`."""


@dataclass(frozen=True, slots=True)
class ReportedMemory:
    """A replica's KV pool by its newest report, with `block_tokens` tokens in a block, and its node."""

    node: str
    memory: ElasticMemory
    block_tokens: int = 1


@dataclass(frozen=True, slots=True)
class BudgetedPool:
    """The replicas of a model that share the memory of nodes with others.

    `bounds` gives the fewest and the most replicas, `is_gone` is true for a replica that Serve does not list.
    """

    replicas: RemoteReplicas[ControlApi]
    weight: float
    bounds: Callable[[], tuple[int, int]]
    is_gone: Callable[[ReplicaId], bool]


@dataclass(frozen=True, slots=True)
class SeatHome:
    """The pool of a replica with a seat, and its node."""

    pool: PoolId
    node: str


class NodeLedgers:
    """The ledgers of all nodes, with `budget` bytes each, under the `fence` of one scheduler."""

    def __init__(
        self, budget: Bytes, fence: int, pools: Mapping[PoolId, BudgetedPool], store: ClaimStore, clock: Clock
    ) -> None:
        self.budget = budget
        self.fence = fence
        self._pools = pools
        self._store = store
        self._clock = clock
        self._ledgers: dict[str, DeviceLedger] = {}
        self._homes: dict[ReplicaId, SeatHome] = {}
        self._reported: dict[PoolId, Mapping[ReplicaId, ReportedMemory]] = {}
        self._serving: dict[PoolId, frozenset[ReplicaId]] = {}
        self._models: dict[PoolId, ModelMemory] = {}
        self._claims: dict[ReplicaId, SeatClaim] = {}
        self._claimed_at: dict[ReplicaId, float] = {}
        self._restore()

    # --- reads ----------------------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes with replicas, sorted."""
        return tuple(sorted(self._ledgers))

    @property
    def models(self) -> Mapping[PoolId, ModelMemory]:
        """The memory of a replica of each pool that starts: by the newest start, or by the first report."""
        return self._models

    def on(self, node: str) -> DeviceLedger:
        """The ledger of a node; one without seats where no replica is."""
        return self._ledgers.get(node) or DeviceLedger(self.budget, self.fence)

    def home(self, replica: ReplicaId) -> SeatHome | None:
        """The pool and the node of a replica; None without a seat."""
        return self._homes.get(replica)

    def seat_of(self, replica: ReplicaId) -> Seat | None:
        """The seat of a replica; None if it has none."""
        home = self._homes.get(replica)
        return None if home is None else self.on(home.node).seat(replica)

    def find(self, replica: ReplicaId) -> ReportedMemory | None:
        """The newest report of a replica; None if it is silent, or starts."""
        home = self._homes.get(replica)
        return None if home is None else self._reported.get(home.pool, {}).get(replica)

    def is_claimed(self, replica: ReplicaId) -> bool:
        """True for a replica that starts, and has been given memory."""
        return replica in self._claims

    @property
    def is_known(self) -> bool:
        """True once all replicas that serve have reported to this scheduler: the node of another one may be any."""
        if self._serving.keys() != self._pools.keys():
            return False
        measured = {s.replica for each in self._ledgers.values() for s in each.seats if not s.model.is_claimed}
        is_known = all(ledger.is_known for ledger in self._ledgers.values())
        return is_known and all(serving <= measured for serving in self._serving.values())

    def is_divided(self, seat: Seat) -> bool:
        """True if divisions size the replica: it reports, is awake, in no pair, and has no size by hand."""
        reported = seat.reported
        if seat.model.is_claimed or reported is None or reported.by_hand:
            return False
        found = self.find(seat.replica)
        # A wake that has failed is ordered still, and one under way has all of its memory.
        awake = reported.ordered.is_awake and reported.held.is_awake
        if not awake or found is None or found.memory.is_paired:
            return False
        return found.memory.state not in (PoolState.ASLEEP, PoolState.LOADING)

    # --- reports --------------------------------------------------------------------------------------

    def take(self, pool: PoolId, reported: Mapping[ReplicaId, ReportedMemory], serving: Iterable[ReplicaId]) -> None:
        """Follow the newest reports of a pool's replicas; `serving` are all that serve, silent ones included.

        A replica that has become silent counts with its last report until Serve no longer lists it.
        """
        self._reported[pool], self._serving[pool] = reported, frozenset(serving)
        for replica in [replica for replica, home in self._homes.items() if home.pool == pool]:
            if replica not in reported and not self._is_here(pool, replica):
                self._forget(replica)
        for replica, found in reported.items():
            self._models.setdefault(pool, found.memory.model)
            self._take(pool, replica, found)
        for node in [node for node, ledger in self._ledgers.items() if not ledger.seats]:
            del self._ledgers[node]

    def take_answer(self, report: MemoryReport) -> None:
        """Take the answer to an order, which a replica may give that is gone."""
        if (home := self._homes.get(report.replica)) is not None:
            self._ledgers[home.node] = self._ledgers[home.node].take(report)

    def _is_here(self, pool: PoolId, replica: ReplicaId) -> bool:
        """True for a replica without a report that has its processes: it is silent, it starts, or it stops.

        Serve's router drops a replica that stops before Serve's list shows that.
        """
        if replica in self._serving[pool] or not self._pools[pool].is_gone(replica):
            return True
        return replica in self._claims and self._clock() - self._claimed_at[replica] < CLAIM_S

    def _take(self, pool: PoolId, replica: ReplicaId, found: ReportedMemory) -> None:
        ledger, seat, memory = self.on(found.node), self.seat_of(replica), found.memory
        if seat is None or seat.model.is_claimed:
            ledger = ledger.without(replica).with_seat(Seat(replica, memory.model, MemoryPlan(memory.declared)))
        else:
            ledger = ledger.measured(replica, memory.model)
        self._homes[replica] = SeatHome(pool, found.node)
        self._ledgers[found.node] = ledger.take(memory.report)
        self._end_claim(replica)

    def _forget(self, replica: ReplicaId) -> None:
        self._end_claim(replica)
        node = self._homes.pop(replica).node
        self._ledgers[node] = self._ledgers[node].without(replica)

    # --- orders ---------------------------------------------------------------------------------------

    def order(self, replica: ReplicaId, plan: MemoryPlan, by_hand: bool = False) -> MemoryOrder | None:
        """See `DeviceLedger.order`. An order counts from the call on."""
        node = self._homes[replica].node
        return self._keep_order(node, self._ledgers[node].order(replica, plan, by_hand))

    def order_size(self, replica: ReplicaId, blocks: Blocks) -> MemoryOrder | None:
        """See `DeviceLedger.order_size`. An order counts from the call on."""
        node = self._homes[replica].node
        return self._keep_order(node, self._ledgers[node].order_size(replica, blocks))

    def _keep_order(self, node: str, given: tuple[DeviceLedger, MemoryOrder] | None) -> MemoryOrder | None:
        if given is None:
            return None
        self._ledgers[node], order = given
        return order

    # --- replicas that start --------------------------------------------------------------------------

    def take_measurement(self, pool: PoolId, model: ModelMemory) -> None:
        """Take the measurement of a pool's model by a replica that has not reported yet."""
        self._models[pool] = model

    def claim(self, replica: ReplicaId, claim: SeatClaim, ledger: DeviceLedger) -> None:
        """Store a starting replica's claim, and then count it: one that is not stored is not given.

        `ledger` is the node's with the replica. The claim ends with the replica's first report.
        """
        if self._claims.get(replica) != claim:
            self._store_claims(self._claims | {replica: claim})
        self._ledgers[claim.node] = ledger
        self._homes[replica], self._claimed_at[replica] = SeatHome(claim.pool, claim.node), self._clock()

    def _restore(self) -> None:
        """Count the replicas that start with what the scheduler before has given them."""
        self._claims = {
            replica: claim for replica, claim in self._store.take_over().items() if claim.pool in self._pools
        }
        for replica, claim in self._claims.items():
            self._ledgers[claim.node] = self.on(claim.node).claim(replica, claim.size)
            self._homes[replica], self._claimed_at[replica] = SeatHome(claim.pool, claim.node), self._clock()

    def _end_claim(self, replica: ReplicaId) -> None:
        """Its reports count from now on, or it is gone."""
        if replica in self._claims:
            self._store_claims({r: claim for r, claim in self._claims.items() if r != replica})
            del self._claimed_at[replica]

    def _store_claims(self, claims: dict[ReplicaId, SeatClaim]) -> None:
        self._store.write(claims)
        self._claims = claims

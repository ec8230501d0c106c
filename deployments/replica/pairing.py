"""A replica's half of a pair: asked for by the scheduler or by another replica, and undone before the replica stops."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from typing import Self

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily

from deployments.api.calls import PairOrder
from deployments.api.report import PairReport
from deployments.metrics.exposition import Family, expose
from deployments.replica.elastic import KvPool
from migration.memory.pair_run import Buddy, EngineHalf, PairProposal, PairShell
from migration.memory.pair_tables import TOGETHER, HalfState
from migration.memory.run import Resizer
from migration.protocol.errors import Refused
from policies.causes import Cause
from policies.model import PoolId, ReplicaId

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class PairCounts:
    """Sums over pairs of a replica: those that have formed, and those that were undone, with the seconds of both.

    `hops` of its steps have waited `hop_seconds` seconds, and `lost_steps` have yielded no token.
    """

    formed: int = 0
    forming_s: float = 0.0
    undone: int = 0
    undoing_s: float = 0.0
    hops: int = 0
    hop_seconds: float = 0.0
    lost_steps: int = 0

    @classmethod
    def of(cls, pairing: PairShell) -> Self:
        """The counts of one pair."""
        times, look = pairing.times, pairing.look
        paired_at, ending_at, over_at = (
            times.get(state) for state in (HalfState.PAIRED, HalfState.SHRINKING, HalfState.OVER)
        )
        forming_s = None if paired_at is None else paired_at - min(times.values())
        is_undone = ending_at is not None and over_at is not None and HalfState.RESTORING not in times
        return cls(
            int(forming_s is not None),
            forming_s or 0.0,
            int(is_undone),
            (over_at or 0.0) - (ending_at or 0.0) if is_undone else 0.0,
            look.hops,
            look.hop_seconds,
            look.lost_steps,
        )

    def plus(self, other: "PairCounts") -> "PairCounts":
        """The counts of these pairs and of others."""
        return PairCounts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def collect(self) -> Iterable[Metric]:
        """The metrics, as those of a registry."""
        seconds = SummaryMetricFamily(
            "mell_pair_seconds", "Forming and undoing of pairs, from the order to the end.", labels=("phase",)
        )
        seconds.add_metric(("forming",), self.formed, self.forming_s)
        seconds.add_metric(("undoing",), self.undone, self.undoing_s)
        yield seconds
        hops = SummaryMetricFamily("mell_hop_seconds", "Waits of a pair's steps for the layers of the other replica.")
        hops.add_metric((), self.hops, self.hop_seconds)
        yield hops
        lost = CounterMetricFamily("mell_lost_steps", "Steps without a token, since the pair's other replica was lost.")
        lost.add_metric((), self.lost_steps)
        yield lost


class PairKeeper:
    """The pair that the replica `own` is half of, if it is.

    `buddy` calls another replica, `closed` is the reason why the replica takes nothing new, and `give_up` ends its
    engine for a reason. `model` names the weights.
    """

    def __init__(
        self,
        own: ReplicaId,
        model: str,
        half: EngineHalf | None,
        pool: KvPool,
        buddy: Callable[[ReplicaId], Buddy],
        closed: Callable[[], str | None],
        give_up: Callable[[str], None],
    ) -> None:
        self._own = own
        self._model = model
        self._half = half
        self._pool = pool
        self._buddy = buddy
        self._closed = closed
        self._give_up = give_up
        self._pairing: PairShell | None = None
        self._ended: PairReport | None = None
        self._past = PairCounts()

    @property
    def is_over(self) -> bool:
        """True if it is in no pair."""
        return self._pairing is None

    @property
    def pauses(self) -> bool:
        """True while the engine loads parameters, and so computes nothing."""
        return self._pairing is not None and self._pairing.state in (HalfState.LOADING, HalfState.RESTORING)

    @property
    def unable(self) -> str | None:
        """The reason why the replica cannot be in a pair; None if it can."""
        if self._half is None or self._pool.resizer is None:
            return "the KV pool keeps its size"
        return self._half.unable or _too_small(self._pool.resizer)

    def report(self) -> PairReport | None:
        """The pair; once it is over, its last state, until the next one."""
        if self._pairing is None or self._half is None:
            return self._ended
        pairing, look = self._pairing, self._pairing.look
        lower = self._own == pairing.proposal.lower
        boundary, layers = pairing.proposal.boundary, pairing.proposal.layers
        return PairReport(
            epoch=pairing.proposal.epoch,
            buddy=pairing.buddy,
            state=pairing.state,
            layers=(0, boundary) if lower else (boundary, layers),
            remote=look.remote,
            guest_layers=look.guest_layers,
            hops=look.hops,
            hop_tokens=look.hop_tokens,
            hop_seconds=look.hop_seconds,
            buddy_seconds=look.buddy_seconds,
            served=look.served,
            state_s=asyncio.get_running_loop().time() - pairing.times[pairing.state],
            by_hand=pairing.proposal.by_hand,
            cause=pairing.cause,
        )

    def metrics(self, pool: PoolId) -> tuple[Family, ...]:
        """The metrics of the replica's pairs; none if it cannot be in any."""
        if self._half is None or self._half.unable is not None:
            return ()
        counts = self._past if self._pairing is None else self._past.plus(PairCounts.of(self._pairing))
        return expose(counts, {"replica": self._own, "pool": pool})

    async def form(self, order: PairOrder) -> None:
        """Begin to form a pair with another replica, as the lower half. By hand, one of the policy is an operator's.

        Raises:
            Refused: the replica cannot be in a pair, or is in another one.
        """
        pairing = self._pairing
        if pairing is not None and pairing.buddy == order.upper and pairing.state in TOGETHER:
            if order.by_hand:
                pairing.proposal = replace(pairing.proposal, by_hand=True)
            return
        half, resizer = self._reserved(order.epoch)
        address = await self._listen(half, resizer, order.epoch)
        # Each half of the layers costs a step about the same.
        boundary = (half.layers + 1) // 2
        proposal = PairProposal(
            order.epoch,
            self._own,
            order.upper,
            boundary,
            half.layers,
            self._model,
            address,
            order.shrink_s,
            order.by_hand,
        )
        self._begin(proposal, half, resizer)

    async def accept(self, proposal: PairProposal) -> str:
        """See `PairApi.propose_pair`."""
        if (proposal.model, proposal.upper) != (self._model, self._own):
            raise Refused("its weights are not those of this replica", Cause.FINGERPRINT)
        if self._half is not None and self._half.layers != proposal.layers:
            raise Refused("its layers are not those of this replica", Cause.FINGERPRINT)
        half, resizer = self._reserved(proposal.epoch)
        address = await self._listen(half, resizer, proposal.epoch)
        self._begin(proposal, half, resizer, proposal.address)
        return address

    def state(self, epoch: int) -> HalfState | None:
        """See `PairApi.pair_state`."""
        if self._pairing is None or self._pairing.proposal.epoch != epoch:
            return None
        return self._pairing.state

    def undo(self, cause: str, epoch: int | None = None) -> bool:
        """Undo the pair, of that `epoch` if one is given; False if there is none."""
        if self._pairing is None or epoch not in (None, self._pairing.proposal.epoch):
            return False
        self._pairing.undo(cause)
        return True

    def close(self) -> None:
        """End what is under way: the engine ends."""
        if self._pairing is not None:
            self._pairing.stop()

    def _reserved(self, epoch: int) -> tuple[EngineHalf, Resizer]:
        """The engine and its pool for a new pair. Raises Refused, a late order to form one that is over, too."""
        half, resizer = self._half, self._pool.resizer
        if self._pairing is not None:
            raise Refused(f"replica {self._own} is in a pair with replica {self._pairing.buddy}", Cause.UNEXPECTED)
        if self._ended is not None and epoch <= self._ended.epoch:
            raise Refused(f"replica {self._own} has been in a newer pair", Cause.UNEXPECTED)
        if reason := self._closed() or self.unable:
            raise Refused(f"replica {self._own} cannot be paired: {reason}", Cause.UNEXPECTED)
        assert half is not None
        assert resizer is not None
        resizer.reserve()
        return half, resizer

    async def _listen(self, half: EngineHalf, resizer: Resizer, epoch: int) -> str:
        """Have the engine begin a pair; the address of its worker. Raises Refused; the pool takes orders again then."""
        try:
            address = await half.listen(epoch)
            if (reason := self._closed()) is None:
                return address
            await half.close()
        except Exception as error:
            reason = f"a call to the engine failed: {error!r}"
        resizer.convert(0)
        raise Refused(f"replica {self._own} cannot be paired: {reason}", Cause.UNEXPECTED)

    def _begin(self, proposal: PairProposal, half: EngineHalf, resizer: Resizer, theirs: str | None = None) -> None:
        buddy = self._buddy(proposal.upper if self._own == proposal.lower else proposal.lower)
        self._pairing = PairShell(proposal, self._own, half, resizer, buddy, self._give_up, self._forget, theirs)
        self._pairing.begin()

    def _forget(self) -> None:
        self._ended = self.report()
        if self._pairing is not None:
            self._past = self._past.plus(PairCounts.of(self._pairing))
        self._pairing = None


def _too_small(resizer: Resizer) -> str | None:
    """The reason why a pool leaves no room for an exchange of layers, there or back."""
    memory, model = resizer.memory, resizer.memory.model
    size, remote = model.need(resizer.report.ordered), (model.layers + 1) // 2
    left, least = model.blocks_exchanging(size), model.least_with(remote)
    if left < model.floor or model.blocks_in(size, remote) < least:
        return (
            f"while a layer's KV is in two places, its pool would have {left} blocks, and a request of max_model_len "
            f"needs {model.floor}: raise memory.budget_mib"
        )
    if memory.declared < least:
        return (
            f"in a pair its pool needs {least} blocks, to have room for the parameters that come back, and can have "
            f"{memory.declared}: raise memory.declared"
        )
    return None

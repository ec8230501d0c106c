"""Pairs of the replicas of one pool: their reports to the policy, and the orders to them, by operators or by plans.

An order is refused with a reason here, or carried out by the replicas. Their reports show whether a plan is followed.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import Any

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected, PairOrder
from deployments.api.protocols import ControlApi, RemoteReplicas
from deployments.api.report import PairReport
from deployments.config import MemorySettings
from deployments.scheduler.memory.ledgers import ReportedMemory
from migration.concurrency import Tasks
from migration.memory.pair_tables import TOGETHER, HalfState
from migration.memory.tables import PoolState
from migration.protocol.errors import MigrationError, PeerLost
from policies.cost.hops import NO_HOPS, HopTotals
from policies.decision.observation import PairMember, PairPhase
from policies.model import ReplicaId, ReplicaState, Tokens
from policies.plan import Pair, Pairs, Unpair

log = logging.getLogger("ray.serve")

_BY_NEWS = (PairPhase.UNDOING, PairPhase.FORMING, PairPhase.PAIRED)
"""The phases of halves, that of the whole pair first."""

_EPOCHS = 1 << 20
"""More pairs than a scheduler orders: their epochs are those of its fence."""


ControlOrder = Callable[[ControlApi], Awaitable[None]]


class PairOrders:
    """Orders pairs of replicas of one pool, for the scheduler with this `fence`.

    `reported` gives the memory of all replicas by their newest reports, `states` the states of those that run.
    """

    def __init__(
        self,
        settings: MemorySettings,
        fence: int,
        replicas: RemoteReplicas[ControlApi],
        reported: Callable[[], Mapping[ReplicaId, ReportedMemory]],
        states: Callable[[], Mapping[ReplicaId, ReplicaState]],
    ) -> None:
        self._settings = settings
        self._fence = fence
        self._replicas = replicas
        self._reported = reported
        self._states = states
        self._numbers = count()
        self._tasks = Tasks()

    # --- for the policy -------------------------------------------------------------------------------

    def members(self) -> tuple[PairMember, ...]:
        """The replicas as the decision on pairs sees them, by their newest reports."""
        reported = self._reported()
        return tuple(_member(replica, reported[replica]) for replica in sorted(reported))

    def form(self, pairs: Sequence[Pair]) -> None:
        """Have pairs of a plan form, without waiting for the answers."""
        for pair in pairs:
            log.info(
                "replicas %s and %s give each other layers, for %d tokens of KV", pair.lower, pair.upper, pair.gained
            )
            self._tasks.start(self._log(pair, self.pair(pair.lower, pair.upper, by_hand=False)))

    def undo(self, pairs: Sequence[Unpair]) -> None:
        """Have pairs of a plan undone, without waiting for the answers."""
        for pair in pairs:
            log.info("replicas %s and %s get their layers back", pair.lower, pair.upper)
            self._tasks.start(self._log(pair, self.unpair(pair.lower)))

    async def _log(self, pair: Pair | Unpair, order: Awaitable[MoveAnswer]) -> None:
        if isinstance(answer := await order, MoveRejected):
            log.warning("an order to the pair of %s and %s failed: %s", pair.lower, pair.upper, answer.message)

    # --- orders ---------------------------------------------------------------------------------------

    async def pair(self, lower: ReplicaId, upper: ReplicaId, by_hand: bool = True) -> MoveAnswer:
        """Have two replicas that run form a pair, `by_hand` or by the policy. The order may come again.

        By hand, a pair of the policy becomes the operator's.
        """
        reported = self._reported()
        if self._settings.budget_mib is None:
            return MoveRejected(422, "memory.budget_mib is not set: replicas are not paired")
        if lower == upper:
            return MoveRejected(422, "a pair has two replicas")
        if missing := [replica for replica in (lower, upper) if replica not in reported]:
            return MoveRejected(503, f"replica {missing[0]} has not reported yet; try again")
        halves = _pair(reported, lower), _pair(reported, upper)
        if are_together(halves[0], upper) and are_together(halves[1], lower):
            if not by_hand or any(half is not None and half.by_hand for half in halves):
                return MoveAccepted(lower)
        elif refusal := self._refusal(reported, lower, upper):
            return refusal
        # A pair of the policy forms since all pools are full: requests that are in its way have nowhere to move to.
        shrink_s = self._settings.shrink_s if by_hand else 0.0
        order = PairOrder(self._fence * _EPOCHS + next(self._numbers), upper, shrink_s, by_hand)
        return await self._ordered(lower, lambda control: control.pair(order, self._fence))

    async def unpair(self, replica: ReplicaId) -> MoveAnswer:
        """Have the pair undone that a replica is in by its newest report. A late order ends no newer pair."""
        reported = self._reported()
        if replica not in reported:
            return MoveRejected(503, f"replica {replica} has not reported yet; try again")
        pair = _pair(reported, replica)
        if pair is None or pair.state == HalfState.OVER:
            return MoveRejected(409, f"replica {replica} is in no pair")
        return await self._ordered(replica, lambda control: control.unpair(pair.epoch, self._fence))

    def _refusal(
        self, reported: Mapping[ReplicaId, ReportedMemory], lower: ReplicaId, upper: ReplicaId
    ) -> MoveRejected | None:
        states = self._states()
        if reported[lower].node != reported[upper].node:
            return MoveRejected(422, "replicas on two nodes are not paired")
        for replica in (lower, upper):
            memory = reported[replica].memory
            if states.get(replica) is not ReplicaState.RUNNING:
                return MoveRejected(409, f"replica {replica} is {states.get(replica)}: only running ones are paired")
            if memory.pair is not None and memory.is_paired:
                return MoveRejected(409, f"replica {replica} is in a pair with replica {memory.pair.buddy}")
            if memory.unpairable is not None:
                return MoveRejected(422, f"replica {replica} cannot be paired: {memory.unpairable}")
        return None

    async def _ordered(self, replica: ReplicaId, order: ControlOrder) -> MoveAnswer:
        try:
            await order(self._replicas.at(replica))
        except PeerLost as error:
            return MoveRejected(503, str(error))
        except MigrationError as error:
            return MoveRejected(409, str(error))
        return MoveAccepted(replica)


def are_together(pair: PairReport | None, other: ReplicaId) -> bool:
    """True if a replica is in a pair with the other one, or on its way there."""
    return pair is not None and pair.buddy == other and pair.state in TOGETHER


def _pair(reported: Mapping[ReplicaId, ReportedMemory], replica: ReplicaId) -> PairReport | None:
    return reported[replica].memory.pair


def _member(replica: ReplicaId, reported: ReportedMemory) -> PairMember:
    memory, block_tokens = reported.memory, reported.block_tokens
    model, size = memory.model, memory.model.need(memory.report.ordered)
    whole = model.blocks_in(size)
    # Each half of a pair gives half of its layers.
    paired = min(memory.declared, model.blocks_in(size, model.layers // 2))
    pair, phase = memory.pair, phase_of(memory.pair)
    rests = memory.report.ordered.is_awake and memory.state == PoolState.SETTLED and memory.cause is None
    return PairMember(
        replica,
        Tokens(whole * block_tokens),
        Tokens(max(0, paired - whole) * block_tokens),
        rests and memory.unpairable is None,
        phase,
        None if pair is None or phase is PairPhase.APART else pair.buddy,
        pair is not None and pair.by_hand,
        NO_HOPS if pair is None else HopTotals(pair.hops, pair.hop_tokens, pair.hop_seconds - pair.buddy_seconds),
        block_tokens,
    )


def phase_of(pair: PairReport | None) -> PairPhase:
    """Where a replica stands with its newest pair."""
    if pair is None or pair.state == HalfState.OVER:
        return PairPhase.APART
    if pair.state == HalfState.PAIRED:
        return PairPhase.PAIRED
    return PairPhase.FORMING if pair.state in TOGETHER else PairPhase.UNDOING


def count_pairs(members: Sequence[PairMember]) -> Mapping[PairPhase, int]:
    """The number of pairs in each phase. One is undoing, or forming, while either of its replicas is."""
    phases: dict[frozenset[ReplicaId], set[PairPhase]] = {}
    for member in members:
        if member.buddy is not None:
            phases.setdefault(frozenset((member.replica, member.buddy)), set()).add(member.phase)
    counts = Counter(next(phase for phase in _BY_NEWS if phase in found) for found in phases.values())
    return {phase: counts[phase] for phase in _BY_NEWS}


class ProposedPairs:
    """The proposals of pairs, and of their ends, that nobody follows. Each counts once until it is proposed no more."""

    def __init__(self) -> None:
        self._newest: Pairs = ()
        self._formed = 0
        self._undone = 0

    def add_epoch(self, pairs: Pairs) -> None:
        """Take the proposals of an epoch."""
        known = {(type(pair), pair.lower, pair.upper) for pair in self._newest}
        for pair in pairs:
            if (type(pair), pair.lower, pair.upper) in known:
                continue
            if isinstance(pair, Pair):
                self._formed += 1
                log.info("pairing would have %s and %s give each other layers", pair.lower, pair.upper)
            else:
                self._undone += 1
                log.info("pairing would have %s and %s get their layers back", pair.lower, pair.upper)
        self._newest = pairs

    def to_json(self) -> dict[str, Any]:
        """The member `proposed` of `pairing` in `/mell/state`."""
        return {
            "formed": self._formed,
            "undone": self._undone,
            "now": [
                {"lower": pair.lower, "upper": pair.upper, "forms": isinstance(pair, Pair)} for pair in self._newest
            ],
        }


def pairs_json(reported: Mapping[ReplicaId, ReportedMemory]) -> list[dict[str, Any]]:
    """The member `pairs` of `pairing` in `/mell/state`: those that are not over, by the newest reports of their halves.

    A half whose other one is lost is in it, too.
    """
    pairs: dict[tuple[ReplicaId, ReplicaId], list[PairReport]] = {}
    for replica, half in ((replica, reported[replica].memory.pair) for replica in sorted(reported)):
        if half is not None and half.state != HalfState.OVER:
            pairs.setdefault((replica, half.buddy) if half.layers[0] == 0 else (half.buddy, replica), []).append(half)
    return [_pair_json(lower, upper, halves) for (lower, upper), halves in pairs.items()]


def _pair_json(lower: ReplicaId, upper: ReplicaId, halves: Sequence[PairReport]) -> dict[str, Any]:
    """A pair by the half that has furthest to go."""
    half = min(halves, key=lambda each: _BY_NEWS.index(phase_of(each)))
    return {
        "lower": lower,
        "upper": upper,
        "boundary": half.layers[1] if half.layers[0] == 0 else half.layers[0],
        "phase": str(phase_of(half)),
        "state": half.state,
        "state_s": half.state_s,
        "by_hand": any(each.by_hand for each in halves),
        "cause": next((each.cause for each in (half, *halves) if each.cause is not None), None),
    }


def unpairable_json(reported: Mapping[ReplicaId, ReportedMemory]) -> dict[ReplicaId, str]:
    """The member `unpairable` of `pairing` in `/mell/state`: replicas that cannot be paired, with the reasons."""
    reasons = ((replica, reported[replica].memory.unpairable) for replica in sorted(reported))
    return {replica: reason for replica, reason in reasons if reason is not None}

"""Recordings: epochs as JSON lines, with all inputs of their decisions, so that a replay can decide them again.

The first line has the terms of the scheduler, every other line an epoch. The scheduler writes recordings, the simulator
reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from policies.cluster.changes import Arrival
from policies.cost.service import ServiceLevel
from policies.decision.devices import Division
from policies.decision.limits import Mode, Terms
from policies.decision.observation import Observation
from policies.model import SOLE_POOL, PoolId, ReplicaId, RequestId, Role
from policies.plan import Eviction, Move, Open, Pair, Pairs, Placement, Plan, Proposal, Unpair


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """The placement of an arrival at the time `at`, on a replica of `pool` outside of `exclude`. See `Epoch`.

    A `submitted` one is on a replica already.
    """

    at: float
    arrival: Arrival
    exclude: tuple[ReplicaId, ...] = ()
    label: str = ""
    slices: int = 0
    pool: PoolId = SOLE_POOL
    submitted: bool = False


@dataclass(frozen=True, slots=True)
class Ordered:
    """An operator's order at the time `at`. See `Epoch`."""

    at: float
    move: Move
    slices: int = 0
    pool: PoolId = SOLE_POOL


@dataclass(frozen=True, slots=True)
class RoleOrdered:
    """An operator's role for a replica, at the time `at`; None: no longer. See `Epoch`."""

    at: float
    replica: ReplicaId
    role: Role | None
    slices: int = 0
    pool: PoolId = SOLE_POOL


@dataclass(frozen=True, slots=True)
class ModeOrdered:
    """Another mode of the epochs of all pools, from the time `at` on. See `Epoch`."""

    at: float
    mode: Mode
    slices: int = 0


@dataclass(frozen=True, slots=True)
class LevelsOrdered:
    """Other service levels of a pool by class, from the time `at` on. See `Epoch`."""

    at: float
    levels: Mapping[str, ServiceLevel]
    slices: int = 0
    pool: PoolId = SOLE_POOL


Entry = PlacedCall | Ordered | RoleOrdered | ModeOrdered | LevelsOrdered
"""A call to the decision between two epochs, or during one."""


@dataclass(frozen=True, slots=True)
class _RecordedPlan:
    """A plan as recordings have it: a member for each kind of action, and the ids of closed replicas."""

    moves: tuple[Move, ...] = ()
    placements: tuple[Placement, ...] = ()
    evicted: tuple[Eviction, ...] = ()
    queued: tuple[RequestId, ...] = ()
    opened: tuple[Open, ...] = ()
    closed: tuple[ReplicaId, ...] = ()
    deferred: tuple[Move, ...] = ()
    proposed: "_RecordedProposal | None" = None
    pairs: "_RecordedPairs" = field(default_factory=lambda: _RecordedPairs())
    proposed_pairs: "_RecordedPairs" = field(default_factory=lambda: _RecordedPairs())

    @classmethod
    def from_plan(cls, plan: Plan) -> "_RecordedPlan":
        proposed = None if plan.proposed is None else _RecordedProposal.from_proposal(plan.proposed)
        members = plan.moves, plan.placements, plan.evicted, plan.queued, plan.opened, plan.closed
        pairs = map(_RecordedPairs.from_pairs, (plan.pairs, plan.proposed_pairs))
        return cls(*members, plan.deferred, proposed, *pairs)

    def to_plan(self) -> Plan:
        proposed = None if self.proposed is None else self.proposed.to_proposal()
        members = self.moves, self.placements, self.evicted, self.queued, self.opened, self.closed
        plan = Plan.of(*members, self.deferred, proposed).with_pairs(self.pairs.to_pairs())
        return plan.with_pairs(self.proposed_pairs.to_pairs(), proposed=True)


@dataclass(frozen=True, slots=True)
class _RecordedPairs:
    undone: tuple[Unpair, ...] = ()
    formed: tuple[Pair, ...] = ()

    @classmethod
    def from_pairs(cls, pairs: Pairs) -> "_RecordedPairs":
        undone = tuple(each for each in pairs if isinstance(each, Unpair))
        return cls(undone, tuple(each for each in pairs if isinstance(each, Pair)))

    def to_pairs(self) -> Pairs:
        return (*self.undone, *self.formed)


@dataclass(frozen=True, slots=True)
class _RecordedProposal:
    plan: _RecordedPlan
    moves: tuple[Move, ...]
    replicas_needed: int

    @classmethod
    def from_proposal(cls, proposal: Proposal) -> "_RecordedProposal":
        return cls(_RecordedPlan.from_plan(proposal.plan), proposal.moves, proposal.replicas_needed)

    def to_proposal(self) -> Proposal:
        return Proposal(self.plan.to_plan(), self.moves, self.replicas_needed)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch: the observation, the plans by pool, and the `entries` since the previous epoch, in order of time.

    An entry with `slices` was made during the decision of this epoch, after that number of its slices. One without a
    `pool` is of a recording that has only one.
    """

    entries: tuple[Entry, ...]
    seen: Observation
    plans: Mapping[PoolId, tuple[Plan, ...]]
    division: Division = field(default_factory=dict)


_TERMS: TypeAdapter[Terms] = TypeAdapter(Terms)


@dataclass(frozen=True, slots=True)
class _RecordedEpoch:
    entries: tuple[Entry, ...]
    seen: Observation
    plans: Mapping[PoolId, tuple[_RecordedPlan, ...]]
    division: Division = field(default_factory=dict)

    @classmethod
    def from_epoch(cls, epoch: Epoch) -> "_RecordedEpoch":
        plans = {pool: tuple(map(_RecordedPlan.from_plan, found)) for pool, found in epoch.plans.items()}
        return cls(epoch.entries, epoch.seen, plans, epoch.division)

    def to_epoch(self) -> Epoch:
        plans = {pool: tuple(plan.to_plan() for plan in found) for pool, found in self.plans.items()}
        return Epoch(self.entries, self.seen, plans, self.division)


_EPOCH: TypeAdapter[_RecordedEpoch] = TypeAdapter(_RecordedEpoch)


def terms_line(terms: Terms) -> bytes:
    """The first line of a recording, without its end."""
    return _TERMS.dump_json(terms)


def epoch_line(epoch: Epoch) -> bytes:
    """The line of an epoch, without its end.

    Devices, replicas that wait, and those that may pair, are in it only if there are some.
    """
    seen = epoch.seen
    without: Any = {"seen": {name: True for name in ("devices", "waiting") if not getattr(seen, name)}}
    if not any(report.members for report in seen.pools):
        without["seen"]["pools"] = {"__all__": {"members"}}
    if not seen.devices:
        without["division"] = True
    return _EPOCH.dump_json(_RecordedEpoch.from_epoch(epoch), exclude=without)


def parse_recording(lines: Sequence[bytes], name: str) -> tuple[Terms, Iterator[Epoch]]:
    """The terms and epochs of a recording's lines. For an invalid line of the recording `name`, the call or the
    iteration raises `ValueError`.
    """
    terms: Terms = _parse(_TERMS, lines[0] if lines else b"", name, 1)
    return terms, (_parse(_EPOCH, line, name, number).to_epoch() for number, line in enumerate(lines[1:], 2))


def _parse(adapter: TypeAdapter[Any], line: bytes, name: str, number: int) -> Any:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        raise ValueError(f"{name}, line {number}: {error.errors()[0]['msg']}") from None

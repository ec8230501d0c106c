"""The decision on pairs of replicas: when which ones form, which end, and what is learned from them.

It comes behind all moves, growth, wakes and starts of the epoch, since `policies.memory.pairing` is the last rung. A
replica's capacity for it is the one that its KV pool grows to by the epoch's division of memory.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica
from policies.cluster.search import fits
from policies.cluster.sizes import size_on
from policies.cost.hops import HopTotals, PairCosts
from policies.cost.service import ReplicaSpeed
from policies.decision.breaker import Breaker
from policies.decision.locations import Locations
from policies.decision.observation import PairMember, PairPhase
from policies.memory.division import LEAST_CHANGE
from policies.memory.pairing import (
    HeldRequestSize,
    MemberLoad,
    MemberMove,
    Outlook,
    PairingTerms,
    PairSpeed,
    RecentDemand,
    form,
    level_members,
    undo,
)
from policies.model import Blocks, Phase, ReplicaId, Role, Tokens
from policies.plan import Pair, Pairs, Reason, Unpair

Group = tuple[ReplicaId, ReplicaId]
"""The replicas of a pair, sorted."""

ANSWER_S = 10.0
"""Seconds after an order within which reports have to show that it is followed."""
REST_S = 60.0
"""Seconds for which two replicas form no pair after they have failed to, or have lost one that was not to end.

An order that no report shows in time may have met a replica at work on its memory: it is no failure.
"""


@dataclass(frozen=True, slots=True)
class _Forming:
    """A pair that was ordered `at` a time, with the KV of `given` tokens to exchange. `begun` once reports show it."""

    at: float
    given: float
    begun: bool = False


class PairingMemory:
    """The memory of the decision on pairs of one pool. It outlives an epoch that fails."""

    def __init__(self) -> None:
        self.demand = RecentDemand()
        self.costs = PairCosts()
        self._breaker = Breaker(failures=1, rest_s=REST_S)
        self._forming: dict[Group, _Forming] = {}
        self._formed: set[Group] = set()
        self._by_hand: set[Group] = set()
        self._undoing: dict[Group, float] = {}
        self._fits_since: Mapping[tuple[ReplicaId, ...], float] = {}
        self._hops: dict[ReplicaId, HopTotals] = {}

    # --- reports --------------------------------------------------------------------------------------

    def follow(self, members: Sequence[PairMember], now: float) -> None:
        """Follow the pairs by the newest reports, and learn from them."""
        by_id = {member.replica: member for member in members}
        for group, forming in list(self._forming.items()):
            self._follow_forming(group, forming, _phases(by_id, group), now)
        for group in list(self._formed):
            if not _together(_phases(by_id, group)):
                self._formed.discard(group)
                if group not in self._undoing:
                    self._breaker.failed(group, now)
        paired = {group for group in _groups(by_id) if _is_whole(_phases(by_id, group))}
        by_hand = {group for group in paired if any(by_id[name].by_hand for name in group)}
        for group in self._by_hand - by_hand:
            if not _together(_phases(by_id, group)):
                self._breaker.failed(group, now)
        self._by_hand = by_hand | {g for g in self._by_hand if _together(_phases(by_id, g))}
        # Pairs by an earlier scheduler count as well.
        self._formed = (self._formed | paired) - self._by_hand
        self._undoing = {group: at for group, at in self._undoing.items() if group in paired and now - at < ANSWER_S}
        self._learn_hops(by_id, now)

    def _follow_forming(self, group: Group, forming: _Forming, phases: Collection[PairPhase], now: float) -> None:
        if _is_whole(phases):
            self.costs.observe_exchange(forming.given, now - forming.at, now)
            self._breaker.succeeded(group)
        elif _together(phases):
            self._forming[group] = _Forming(forming.at, forming.given, begun=True)
            return
        elif not forming.begun and now - forming.at < ANSWER_S:
            return
        elif forming.begun:
            self._breaker.failed(group, now)
        del self._forming[group]

    def _learn_hops(self, by_id: Mapping[ReplicaId, PairMember], now: float) -> None:
        for id, member in by_id.items():
            if member.phase is PairPhase.PAIRED and (before := self._hops.get(id)) is not None:
                self.costs.observe_hops(member.hops.since(before), now)
        self._hops = {id: member.hops for id, member in by_id.items() if member.phase is PairPhase.PAIRED}

    def forget_replica(self, replica: ReplicaId) -> None:
        """Forget the failures of a lost replica."""
        self._breaker.forget(replica)

    # --- decisions ------------------------------------------------------------------------------------

    def may_form(self, member: PairMember, now: float) -> bool:
        """True if a replica may begin to form a pair now."""
        ordered = {name for group in self._forming for name in group}
        resting = {name for pair in self._breaker.resting(now) for name in pair}
        return member.can_pair and member.phase is PairPhase.APART and member.replica not in ordered | resting

    def undo(self, loads: Sequence[MemberLoad], now: float, terms: PairingTerms) -> tuple[Pairs, Sequence[MemberMove]]:
        """The pairs that end now, and the moves after which others can."""
        groups = sorted(self._formed - self._undoing.keys())
        found = undo(loads, [g for g in groups if _has_loads(loads, g)], self._fits_since, now, terms)
        self._fits_since = found.fits_since
        return tuple(Unpair(*group) for group in map(_group, found.groups)), found.moves

    def staying(self) -> Sequence[Group]:
        """The pairs that the policy has formed, and that do not end: whole replicas are too small for their demand."""
        return sorted(self._formed - self._undoing.keys() - set(map(_group, self._fits_since)))

    def rest(self) -> None:
        """Nothing is decided for now: what has lasted until then begins anew."""
        self._fits_since = {}

    def order(self, pairs: Pairs, loads: Sequence[MemberLoad], now: float) -> None:
        """Expect reports that these orders are followed."""
        used = {load.replica: load.used for load in loads}
        for each in pairs:
            group = _group((each.lower, each.upper))
            if isinstance(each, Pair):
                self._forming[group] = _Forming(now, sum(used[name] for name in group) / 2)
            else:
                self._undoing[group] = now


@dataclass(frozen=True, slots=True)
class PairingView:
    """A pool, as the decision on pairs sees it: replicas with their reports and `loads`, their speed, and the seconds
    until a further one runs.
    """

    members: Sequence[PairMember]
    loads: Sequence[MemberLoad]
    speed: ReplicaSpeed | None
    start_s: float

    @property
    def gain(self) -> Tokens:
        """The tokens of KV that a pair of those that may form one adds."""
        free = {load.replica for load in self.loads if load.free_to_pair}
        return Tokens(2 * min((member.gain for member in self.members if member.replica in free), default=0))


def decide_pairs(
    memory: PairingMemory, cluster: Cluster, view: PairingView, terms: PairingTerms, acts: bool, now: float
) -> Pairs:
    """The pairs that end and form now. If it `acts`, decides on moves between the members of those that stay."""
    outlook = memory.demand.outlook(view.loads, now, view.start_s)
    undone, moves = memory.undo(view.loads, now, terms)
    if acts:
        _move_members(cluster, [*moves, *_level(memory, view, undone)])
    pairs = (*undone, *_form(memory, view, outlook, terms, now))
    if acts:
        memory.order(pairs, view.loads, now)
    return pairs


def _form(
    memory: PairingMemory, view: PairingView, outlook: Outlook, terms: PairingTerms, now: float
) -> tuple[Pair, ...]:
    """The pairs that form; none before the step times of the replicas are known."""
    if view.speed is None:
        return ()
    speed = PairSpeed(view.speed, memory.costs.hop(now), memory.costs.exchange(now))
    return tuple(
        Pair(*_group(found.members), found.gained, _finite(found.paired_s), _finite(found.whole_s))
        for found in form(view.loads, view.gain, speed, outlook, terms)
    )


def _level(memory: PairingMemory, view: PairingView, undone: Pairs) -> Sequence[MemberMove]:
    """A move in each pair that stays, by which its members' steps get closer; none before step times are known."""
    if (speed := view.speed) is None:
        return ()
    ending = {(each.lower, each.upper) for each in undone}
    loads = {load.replica: load for load in view.loads}
    pairs = [group for group in memory.staying() if group not in ending and all(name in loads for name in group)]
    moves = (level_members([loads[name] for name in group], speed) for group in pairs)
    return [move for move in moves if move is not None]


def _move_members(cluster: Cluster, moves: Sequence[MemberMove]) -> None:
    """Decide on moves between members of pairs, where nothing speaks against them."""
    for move in moves:
        request, target = cluster.requests.get(move.request), cluster.replicas.get(move.target)
        if request is None or target is None or not cluster.decisions.may_move(request):
            continue
        is_there = request.replica is not None and request.replica.id == move.source
        if is_there and target.runs_more and fits(cluster, request, target):
            cluster.decisions.move(request, target, Reason.BALANCE)


# --- what the decision sees ---------------------------------------------------------------------------


def member_loads(
    memory: PairingMemory,
    locations: Locations,
    members: Sequence[PairMember],
    growth: Mapping[ReplicaId, Blocks],
    now: float,
) -> Sequence[MemberLoad]:
    """The loads of running replicas. `growth` are the sizes of KV pools by the newest division of memory.

    A request that is on no replica waits at the newest one.
    """
    cluster, backlogs = locations.cluster, locations.backlogs()
    running = {replica.id: replica for replica in cluster.running()}
    found = [member for member in members if member.replica in running]
    waiting: dict[ReplicaId, list[int]] = {}
    newest = max(running.values(), key=lambda replica: replica.order, default=None)
    for request in cluster.waiting.values():
        home = locations.homes.get(request.id)
        if (replica := newest if home is None else running.get(home)) is not None:
            waiting.setdefault(replica.id, []).append(size_on(cluster, request, replica))
            if home is None:
                backlogs[replica.id] = backlogs.get(replica.id, 0) + request.tokens
    return [
        _member_load(
            memory, locations, member, running[member.replica], waiting.get(member.replica, ()), growth, backlogs, now
        )
        for member in found
    ]


def _member_load(
    memory: PairingMemory,
    locations: Locations,
    member: PairMember,
    replica: Replica,
    waiting: Sequence[int],
    growth: Mapping[ReplicaId, Blocks],
    backlogs: Mapping[ReplicaId, int],
    now: float,
) -> MemberLoad:
    grown = growth.get(replica.id)
    grown_tokens = member.whole if grown is None else Tokens(grown * member.block_tokens)
    grows = grown_tokens > (1 + LEAST_CHANGE) * member.whole
    return MemberLoad(
        replica.id,
        replica.node,
        grown_tokens,
        float(max(0, replica.capacity - replica.free)),
        sum(waiting),
        max(waiting, default=0),
        backlogs.get(replica.id, 0),
        len(replica.requests),
        float(replica.load),
        _movable(locations, replica) if member.phase is PairPhase.PAIRED else (),
        # A pair keeps its memory: growth that is on its way comes before it.
        replica.role is Role.BOTH and memory.may_form(member, now) and not grows,
    )


def _movable(locations: Locations, replica: Replica) -> tuple[HeldRequestSize, ...]:
    """The requests that may move to the other member of a pair; none while one does, so that each move shows first."""
    ends = {end for underway in locations.under_way.values() for end in (underway.move.source, underway.move.target)}
    if replica.id in ends:
        return ()
    may_move = locations.cluster.decisions.may_move
    return tuple(
        HeldRequestSize(request.id, request.tokens)
        for request in replica.requests.values()
        if locations.phase(request.id) is Phase.DECODE and may_move(request)
    )


# --- pairs in reports ---------------------------------------------------------------------------------


def _group(members: Sequence[ReplicaId]) -> Group:
    lower, upper = sorted(members)
    return lower, upper


def _groups(by_id: Mapping[ReplicaId, PairMember]) -> set[Group]:
    """The replicas that name each other."""
    buddies = {id: member.buddy for id, member in by_id.items() if member.buddy is not None}
    return {_group((id, buddy)) for id, buddy in buddies.items() if buddies.get(buddy) == id}


def _phases(by_id: Mapping[ReplicaId, PairMember], group: Group) -> tuple[PairPhase, ...]:
    """Where both replicas stand with each other; APART for one that is gone, or with another one."""
    found = ((by_id.get(own), other) for own, other in (group, group[::-1]))
    return tuple(
        PairPhase.APART if member is None or member.buddy != other else member.phase for member, other in found
    )


def _is_whole(phases: Collection[PairPhase]) -> bool:
    """True if both replicas are paired."""
    return all(phase is PairPhase.PAIRED for phase in phases)


def _together(phases: Collection[PairPhase]) -> bool:
    """True if a replica is in the pair or on its way there, and none is on the way back."""
    return PairPhase.UNDOING not in phases and any(phase is not PairPhase.APART for phase in phases)


def _has_loads(loads: Sequence[MemberLoad], group: Group) -> bool:
    return set(group) <= {load.replica for load in loads}


def _finite(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None

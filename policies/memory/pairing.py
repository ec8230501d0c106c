"""Pairs of replicas: members that drop a part of their layers each, and use the memory for KV (KunServe, EuroSys '26).

Each member runs its part of the layers for the requests of all. Groups may have more than two members. With own blocks
N of each member,

    sum(N) <= min over the members of (budget - fixed - parameters held) / (layers held * bytes of a block in a layer)

so the members have one account of blocks, however they divide it, and one request may take all of it.

A pair is the last rung: moves, growth and wakes come first. It forms if, within `trigger_s`, demand exceeds all pools,
a start takes longer than the backlog lasts, pairs hold all of the queue or are faster than whole replicas beyond
their memory, too, and its last request has its first token sooner in them.
It is undone under load, as soon as demand fits whole replicas again. A step of a pair waits for the slowest
member, so that members are kept even by step time.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isfinite
from typing import NamedTuple

from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import HopCosts, PrefillChunk, WholeStep, cycle_s
from policies.memory.plan import ModelMemory
from policies.model import Blocks, Bytes, ReplicaId, RequestId, Tokens

LEAST_GAP = 0.15
"""Requests move between members whose step times differ by more than this share of the longer one."""
RISE_S = 2.0
"""Seconds over which the rise of demand is measured."""
FLOW_S = 20.0
"""Seconds over which prompts that arrive and outputs that end are measured."""
REMEMBERED = 10_000
"""The number of newest arrivals whose ends are awaited."""


@dataclass(frozen=True, slots=True)
class LayeredMemory:
    """The bytes of a model by layers. Every member keeps the parameters `outside` the layers: embeddings and head."""

    model: ModelMemory
    layers: int
    outside: Bytes

    def held(self, layers: int) -> Bytes:
        """The bytes of the parameters of a member with that number of layers."""
        return Bytes(self.outside + ceil((self.model.parameters - self.outside) * layers / self.layers))

    def blocks(self, budgets: Sequence[Bytes], layers: Sequence[int]) -> Blocks:
        """The own blocks of all members together, from the budget of each and the number of layers that it holds.

        Raises `ValueError` if the members do not hold every layer once.
        """
        if sum(layers) != self.layers or min(layers) < 1:
            raise ValueError(f"the members of a group hold {list(layers)} of {self.layers} layers")
        rooms = (budget - self.model.fixed - self.held(own) for budget, own in zip(budgets, layers, strict=True))
        # The division comes last, so that nothing is rounded twice.
        return Blocks(
            min(room * self.layers // (own * self.model.block) for room, own in zip(rooms, layers, strict=True))
        )


def even_layers(layers: int, size: int) -> tuple[int, ...]:
    """The number of layers of each of `size` members; they differ by one at most."""
    return tuple((layers + index) // size for index in range(size))


@dataclass(frozen=True, slots=True)
class PairingTerms:
    """When pairs form and when they are undone.

    Demand counts with its rise in `trigger_s` seconds. A pair is undone once demand has been at most the share
    `restore_below` of the capacity of whole replicas for `restore_after_s` seconds. Groups have `size` members. Without
    `predicts`, they form whenever demand exceeds all pools, as KunServe's do.
    """

    trigger_s: float = 1.0
    restore_below: float = 0.8
    restore_after_s: float = 5.0
    size: int = 2
    predicts: bool = True


@dataclass(frozen=True, slots=True)
class HeldRequestSize:
    """A running request that may move to another member, with its tokens of KV."""

    id: RequestId
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class MemberLoad:
    """A replica, in a group or not, with the work of its own requests.

    `capacity` are the tokens of KV that it has, or would have, with all layers, `used` those of its running requests.
    `waiting` are the tokens that queued requests need before they run, `largest` those of the largest of them, and
    `prefilling` the tokens without KV of all. `batch` requests decode, with `context` tokens in total. `movable` are
    its requests that may move now. One that starts, drains or is in a group cannot join one: it is not `free_to_pair`.
    """

    replica: ReplicaId
    node: str
    capacity: Tokens
    used: float
    waiting: int = 0
    largest: int = 0
    prefilling: int = 0
    batch: int = 0
    context: float = 0.0
    movable: tuple[HeldRequestSize, ...] = ()
    free_to_pair: bool = True

    @property
    def demand(self) -> float:
        """The tokens of KV that its requests need now."""
        return self.used + self.waiting


@dataclass(frozen=True, slots=True)
class PairSpeed:
    """The speed of whole replicas, and what pairs add: hops, and the `exchange`, a line over the tokens whose KV goes.

    Members give their KV in turn, or all `together`.
    """

    replica: ReplicaSpeed
    hop: HopCosts
    exchange: Line
    together: bool = False

    def exchange_s(self, members: Sequence[MemberLoad]) -> float:
        """Seconds until each member has given the KV of the layers that it drops to the others."""
        given = [member.used * (len(members) - 1) / len(members) for member in members]
        return self.exchange.seconds(max(given) if self.together else sum(given))

    def pace(self, members: Sequence[MemberLoad], more: float, outlook: "Outlook") -> "GroupPace":
        """The pace of a group whose members hold the share `more` of KV, and of decoding requests, on top.

        A step has a prompt's chunk with a probability that follows from the arrivals; a cycle of the group has one if
        any of its members' steps has. All of a step counts as divided by the layers: in measured steps, an overhead
        looks like the reading of weights, and what does not shrink is in measured hops.
        """
        size = len(members)
        batch = max(1.0, sum(member.batch for member in members) / size)
        context = sum(member.context for member in members) / size
        alone_s, prefill_s = self._steps_s(batch, context, outlook.prompt)
        chance = min(1.0, outlook.prompts_per_s * alone_s)
        whole_s = (1 - chance) * alone_s + chance * prefill_s
        held = batch * (1 + more)
        steps_s = self._steps_s(held, context * (1 + more), outlook.prompt)
        decode_s, chunk_s = (
            cycle_s([WholeStep(step_s, tokens)], size, 0.0, self.hop)
            for step_s, tokens in zip(steps_s, (held, held + outlook.prompt), strict=True)
        )
        idle = (1 - chance) ** size
        cycle = idle * decode_s + (1 - idle) * chunk_s
        return GroupPace(cycle / whole_s, (1 + more) * whole_s / cycle)

    def _steps_s(self, batch: float, context: float, prompt: int) -> tuple[float, float]:
        """Seconds of a step that decodes, and of one with a chunk of a prompt beside it."""
        chunk = PrefillChunk(min(prompt, self.replica.chunk_tokens or prompt), 0)
        costs = self.replica.costs
        return costs.step_s(batch, context), costs.step_s(batch, context, (chunk,))


class GroupPace(NamedTuple):
    """The time of a group's cycle as a multiple of a step on whole replicas, and its output as a multiple of theirs."""

    slowdown: float
    throughput: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """The demand of the last seconds.

    `rising_per_s` is the rise of the pool's demand, in tokens per second. `prompts_per_s` prompts of `prompt` tokens
    arrive at each replica, on average, and of the running requests the share `ends_per_s` ends per second. `start_s` is
    the time until a further replica runs; infinite without a device for it.
    """

    rising_per_s: float
    prompts_per_s: float = 0.0
    prompt: Tokens = Tokens(1)
    ends_per_s: float = 0.0
    start_s: float = inf


class RecentDemand:
    """The arrivals, ends and demand of a pool in the last seconds. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._demand: deque[tuple[float, float]] = deque()
        self._prompts: deque[tuple[float, int]] = deque()
        self._ends: deque[float] = deque()
        self._decoding: deque[tuple[float, float]] = deque()
        """The seconds that requests have decoded, in total, by time. The oldest one is of the flow's beginning."""
        self._running: dict[RequestId, None] = {}
        self._since: float | None = None

    def arrived(self, request: RequestId, prompt: int, now: float) -> None:
        """Note the prompt of a request, in tokens. A request that comes again is no other arrival."""
        self._since = now if self._since is None else self._since
        if request not in self._running:
            self._running[request] = None
            if len(self._running) > REMEMBERED:
                # The oldest ones may have left without an end.
                del self._running[next(iter(self._running))]
            self._prompts.append((now, prompt))
        self._forget_old(now)

    def ended(self, request: RequestId, now: float) -> None:
        """Note the end of a request."""
        if request in self._running:
            del self._running[request]
            self._ends.append(now)
        self._forget_old(now)

    def outlook(self, pool: Sequence[MemberLoad], now: float, start_s: float = inf) -> Outlook:
        """The outlook of a pool, whose present demand is noted.

        Requests end at the rate at which they have, of the time for which any have decoded: what still runs counts, so
        that a burst's short outputs, which end first, do not stand for all.
        """
        demand = sum(member.demand for member in pool)
        self._demand.append((now, demand))
        while len(self._demand) > 2 and self._demand[1][0] <= now - RISE_S:
            self._demand.popleft()
        before, total_s = self._decoding[-1] if self._decoding else (now, 0.0)
        self._decoding.append((now, total_s + sum(member.batch for member in pool) * (now - before)))
        self._forget_old(now)
        began, earlier = self._demand[0]
        span = min(FLOW_S, max(1.0, now - (now if self._since is None else self._since)))
        decoded_s = self._decoding[-1][1] - self._decoding[0][1]
        return Outlook(
            (demand - earlier) / (now - began) if now > began else 0.0,
            len(self._prompts) / span / max(1, len(pool)),
            _mean(self._prompts) if self._prompts else Tokens(1),
            len(self._ends) / decoded_s if decoded_s > 0 else 0.0,
            start_s,
        )

    def _forget_old(self, now: float) -> None:
        began = now - FLOW_S
        while self._prompts and self._prompts[0][0] < began:
            self._prompts.popleft()
        while self._ends and self._ends[0] < began:
            self._ends.popleft()
        while len(self._decoding) > 2 and self._decoding[1][0] <= began:
            self._decoding.popleft()


def _mean(noted: Sequence[tuple[float, int]]) -> Tokens:
    """The mean of lengths, each with its time; a token at least."""
    return Tokens(max(1, round(sum(tokens for _, tokens in noted) / len(noted))))


@dataclass(frozen=True, slots=True)
class Pairing:
    """Replicas that form a group now. `gained` are the tokens of KV that it adds.

    Predicted are the seconds until the first token of the queue's last request, in pairs and without them.
    """

    members: tuple[ReplicaId, ...]
    gained: Tokens
    paired_s: float = inf
    whole_s: float = inf


def form(
    pool: Sequence[MemberLoad], gain: Tokens, speed: PairSpeed, outlook: Outlook, terms: PairingTerms
) -> tuple[Pairing, ...]:
    """The groups that form now, as few as cover the lack of KV. A group adds `gain` tokens to its members' capacities.

    Replicas of one node with the least KV to exchange come first. A request that no whole replica can hold needs a
    group at once. Without a gain, none forms.
    """
    if gain <= 0:
        return ()
    groups = list(_candidates(pool, terms.size))
    if stuck := _first_for_long(pool, groups, gain):
        return (Pairing(_names(stuck), gain),)
    lacking = sum(member.demand for member in pool) - sum(member.capacity for member in pool)
    if lacking + outlook.rising_per_s * terms.trigger_s <= 0 or not groups:
        return ()
    # The queue to compare is that at the end of the exchange.
    forming_s = max(speed.exchange_s(group) for group in groups)
    lacking = max(0.0, lacking + max(0.0, outlook.rising_per_s) * max(forming_s, terms.trigger_s))
    whole_s = _queue_s(pool, lacking, speed, outlook, GroupPace(1.0, 1.0))
    if terms.predicts and isfinite(outlook.start_s) and outlook.start_s <= whole_s:
        return ()
    chosen = groups[: max(1, ceil(lacking / gain))]
    rest = max(0.0, lacking - len(chosen) * gain)
    more = gain / sum(member.capacity for member in chosen[0])
    pace = max(speed.pace(group, more, outlook) for group in chosen)
    paired_s = max(speed.exchange_s(group) for group in chosen) + _queue_s(pool, rest, speed, outlook, pace)
    # Beyond its memory, a slower group makes the queue longer. Where nothing is freed, fewer wait in pairs.
    if terms.predicts and ((rest > 0 and pace.throughput < 1) or (paired_s, rest) >= (whole_s, lacking)):
        return ()
    return tuple(Pairing(_names(group), gain, paired_s, whole_s) for group in chosen)


def _candidates(pool: Sequence[MemberLoad], size: int) -> Iterable[Sequence[MemberLoad]]:
    """Groups of replicas of a node, those with the least KV to exchange first."""
    by_node: dict[str, list[MemberLoad]] = {}
    for member in sorted(pool, key=lambda member: (member.used, member.replica)):
        if member.free_to_pair:
            by_node.setdefault(member.node, []).append(member)
    groups = [
        members[start : start + size]
        for members in by_node.values()
        for start in range(0, len(members) - size + 1, size)
    ]
    return sorted(groups, key=lambda group: (sum(member.used for member in group), group[0].replica))


def _first_for_long(
    pool: Sequence[MemberLoad], groups: Sequence[Sequence[MemberLoad]], gain: Tokens
) -> Sequence[MemberLoad] | None:
    """The first group for a request that waits and fits into no whole replica, unless a group has it already."""
    for member in pool:
        if member.free_to_pair and member.largest > member.capacity:
            for group in groups:
                fits = member.largest <= gain + sum(each.capacity for each in group)
                if fits and member.replica in _names(group):
                    return group
    return None


def _queue_s(pool: Sequence[MemberLoad], lacking: float, speed: PairSpeed, outlook: Outlook, pace: GroupPace) -> float:
    """Seconds until the last request of the queue has its first token, at a pace.

    Where memory is full, a prompt of the queue gets in for each request that ends, since the others grow into the rest
    of its room; prefills go on meanwhile.
    """
    count, batch = len(pool), sum(member.batch for member in pool)
    freed = pace.throughput * outlook.prompt * outlook.ends_per_s * batch
    memory_s = 0.0 if lacking <= 0 else lacking / freed if freed > 0 else inf
    queued, context = (sum(each) for each in zip(*((m.prefilling, m.context) for m in pool), strict=True))
    prefill_s = speed.replica.wait_s(round(batch / count), context / count, ceil(queued / count))
    return max(memory_s, prefill_s * pace.slowdown)


def _names(group: Sequence[MemberLoad]) -> tuple[ReplicaId, ...]:
    return tuple(member.replica for member in group)


@dataclass(frozen=True, slots=True)
class MemberMove:
    """A request moves from one member of a group to another one."""

    request: RequestId
    source: ReplicaId
    target: ReplicaId


@dataclass(frozen=True, slots=True)
class Undoing:
    """The groups that are undone now, moves of requests that exceed their own replica in others, and for every group
    since when its demand fits whole replicas.
    """

    groups: tuple[tuple[ReplicaId, ...], ...] = ()
    moves: tuple[MemberMove, ...] = ()
    fits_since: Mapping[tuple[ReplicaId, ...], float] = field(default_factory=dict)


def undo(
    pool: Sequence[MemberLoad],
    groups: Sequence[tuple[ReplicaId, ...]],
    fits_since: Mapping[tuple[ReplicaId, ...], float],
    now: float,
    terms: PairingTerms,
) -> Undoing:
    """The groups to undo: their own demand and that of the whole pool fit whole replicas.

    Where a member alone would be too small for its requests, some move to the others first, and the group ends in a
    later call.
    """
    loads = {member.replica: member for member in pool}
    calm = _fits(pool, terms.restore_below)
    since: dict[tuple[ReplicaId, ...], float] = {}
    undone: list[tuple[ReplicaId, ...]] = []
    moves: list[MemberMove] = []
    for group in groups:
        members = [loads[name] for name in group]
        if not calm or not _fits(members, terms.restore_below):
            continue
        since[group] = fits_since.get(group, now)
        if now - since[group] < terms.restore_after_s:
            continue
        excess = excess_moves(members)
        if all(member.used <= member.capacity for member in members):
            undone.append(group)
        moves += excess
    return Undoing(tuple(undone), tuple(moves), since)


def excess_moves(members: Sequence[MemberLoad]) -> tuple[MemberMove, ...]:
    """Moves after which each member holds its own requests alone, as far as there are such; the largest ones first."""
    used = {member.replica: member.used for member in members}
    moves = []
    for source in members:
        for request in sorted(source.movable, key=lambda each: (-each.tokens, each.id)):
            if used[source.replica] <= source.capacity:
                break
            rooms = [(each.capacity - used[each.replica], each.replica) for each in members if each is not source]
            room, target = max(rooms)
            if request.tokens <= room:
                moves.append(MemberMove(request.id, source.replica, target))
                used[source.replica] -= request.tokens
                used[target] += request.tokens
    return tuple(moves)


def _fits(members: Sequence[MemberLoad], share: float) -> bool:
    """True if the demand is at most a share of the whole replicas, and no request is larger than one."""
    if any(member.largest > member.capacity for member in members):
        return False
    if any(request.tokens > member.capacity for member in members for request in member.movable):
        return False
    return sum(each.demand for each in members) <= share * sum(each.capacity for each in members)


def level_members(members: Sequence[MemberLoad], speed: ReplicaSpeed) -> MemberMove | None:
    """The move that brings the step times of the slowest and the fastest member closest; None if they are close.

    `policies.rules.even` levels the KV of all replicas; here the steps count, since the fast member waits.
    """
    costs = speed.costs
    slow = max(members, key=lambda each: (costs.step_s(each.batch, each.context), each.replica))
    fast = min(members, key=lambda each: (costs.step_s(each.batch, each.context), each.replica))

    def gap(tokens: float, count: int) -> float:
        return abs(
            costs.step_s(slow.batch - count, slow.context - tokens)
            - costs.step_s(fast.batch + count, fast.context + tokens)
        )

    present = gap(0.0, 0)
    if present <= LEAST_GAP * costs.step_s(slow.batch, slow.context) or not slow.movable:
        return None
    best = min(slow.movable, key=lambda each: (gap(each.tokens, 1), each.id))
    return MemberMove(best.id, slow.replica, fast.replica) if gap(best.tokens, 1) < present else None

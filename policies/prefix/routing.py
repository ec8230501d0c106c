"""Routing by content: the replicas on which a prompt's first token comes soonest, among which the policy chooses.

    tree          the score of a replica is the time to the prompt's first token there: the prefills that wait, and the
                  prefill of the tokens whose KV it lacks (`ReplicaSpeed.first_token_s`), which also has a price. The
                  policy chooses among the replicas near the best score
    session       the replica of the session's newest request, while it has room
    least_load    the policy alone

Content decides as far as it matters, and the policy decides the rest: a prompt of which no replica has a block is
placed by the policy alone. Load is in every score, so that a popular prefix does not gather all prompts on one replica.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import fits, fitting
from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional
from policies.model import ReplicaId, RequestId, Tokens
from policies.paths.prices import Profile
from policies.prefix.copies import Donor, Fetch, TokenLink, best_fetch, longest
from policies.prefix.queues import PrefillQueues
from policies.prefix.reuse import Reuse
from policies.prefix.tree import NO_PREFIX, Generations, HeldPrefix, PromptTree

PROMISE_S = 60.0
"""The time of a promise, in seconds: longer than a prompt waits for its prefill, and shorter than a cache lasts."""
SESSION_S = 600.0
"""The time without requests after which a session is forgotten, in seconds."""
NEAR_S = 0.02
NEAR_SHARE = 0.1
"""Scores are near the best within the larger of both, in seconds and as a share of the best one's first token time."""
WORK_WEIGHT = 4.0
"""The price of a second of prefill, in seconds before a first token.

A prefill delays the requests that decode and arrive at its replica, and its blocks displace others: both cost more than
the wait for a replica that has the blocks. By simulation of Mooncake's trace (simulation.md), hit rates rise up to this
price, and the mean time to a first token does not.
"""

UNKNOWN_SPEED = ReplicaSpeed(StepCosts(proportional(1 / 2000)))
"""Step times before any are known. They order replicas by the tokens that each has to compute, and price nothing."""
UNKNOWN_LOAD = Line.of(100_000)
"""The time to load tokens from DRAM before it is known."""


class Routing(StrEnum):
    """The rule by which arrivals are routed; see the module."""

    TREE = "tree"
    SESSION = "session"
    LEAST_LOAD = "least_load"


class ReplicaScore(NamedTuple):
    """A replica for a prompt: the prompt's tokens that it has by tier, the seconds of the prefills that wait there, and
    those of the prompt's own, loading included; with a `fetch`, those of the prefill behind the copy.
    """

    replica: ReplicaId
    hbm: Tokens
    dram: Tokens
    wait_s: float
    prefill_s: float
    fetch: Fetch | None = None

    @property
    def copy_s(self) -> float:
        """Seconds of the copy."""
        return 0.0 if self.fetch is None else self.fetch.copy_s

    @property
    def first_token_s(self) -> float:
        """The time to the prompt's first token there."""
        return self.wait_s + self.copy_s + self.prefill_s

    @property
    def score_s(self) -> float:
        """The time to the first token, and the price of the prefill."""
        return self.first_token_s + WORK_WEIGHT * self.prefill_s


@dataclass(frozen=True, slots=True)
class Matched:
    """The tokens of a prompt that need no computation: at best on any replica, and on the chosen one."""

    available: Tokens = Tokens(0)
    predicted: Tokens = Tokens(0)


NOT_MATCHED = Matched()


class RoutingExperience:
    """The learned part of routing: the replicas' step times (`speed`), the time to load tokens from DRAM (`load`), the
    reuse of prompts, and the replicas of sessions.
    """

    def __init__(self) -> None:
        self.speed = UNKNOWN_SPEED
        self.load = UNKNOWN_LOAD
        self.reuse = Reuse()
        self.sessions: Generations[str, ReplicaId] = Generations(2 * SESSION_S)

    def take_profile(self, profile: Profile) -> None:
        """Take a replica's own measurements."""
        if profile.staging_bytes_per_s and profile.token_bytes:
            self.load = Line.of(profile.staging_bytes_per_s / profile.token_bytes)


class Router:
    """The routing of one pool: its prompt tree, and the prefills that wait on its replicas.

    `block_tokens` is the size of the replicas' blocks, 0 before it is known. `link` are the links for copies between
    replicas (None: nothing is copied), and `link_limit_s` is the longest copy, in seconds.
    """

    def __init__(
        self,
        routing: Routing,
        learned: RoutingExperience | None = None,
        link: TokenLink | None = None,
        link_limit_s: float = 0.0,
    ) -> None:
        self.routing = routing
        self.learned = learned or RoutingExperience()
        self.tree = PromptTree(PROMISE_S)
        self.queues = PrefillQueues()
        self.block_tokens = 0
        self.link = link
        self.link_limit_s = link_limit_s
        self._prompts: dict[RequestId, array[int]] = {}
        """The names of placed requests' prompts, 8 bytes each, until the requests end."""

    # --- observations ---------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Forget old promises and sessions."""
        self.tree.expire(now)
        self.learned.sessions.expire(now)

    def forget(self, replica: ReplicaId) -> None:
        """Remove a replica that is gone."""
        self.tree.forget(replica)
        self.queues.forget(replica)

    # --- placements -----------------------------------------------------------------------------------

    def match(self, arrival: Arrival) -> Mapping[ReplicaId, HeldPrefix]:
        """The replicas that have a beginning of the prompt, as far as an engine uses it.

        An engine always computes the last token of a prompt, so it leaves out a block that ends with this one.
        """
        if not self.block_tokens or not arrival.names:
            return {}
        usable = (arrival.tokens - 1) // self.block_tokens
        return self.tree.match(arrival.names[:usable])

    def present(self, request: RequestId, replica: ReplicaId) -> Tokens:
        """The tokens of a placed request's prompt whose KV a replica has in HBM, as far as is known."""
        names = self.names(request)
        return Tokens(self.tree.match(names).get(replica, NO_PREFIX).hbm * self.block_tokens)

    def take_names(self, request: RequestId, names: Sequence[int]) -> None:
        """Take the names of a request's prompt, until it ends."""
        if names:
            self._prompts[request] = array("Q", names)

    def names(self, request: RequestId) -> Sequence[int]:
        """The names of a request's prompt; none if they are not known."""
        return self._prompts.get(request, ())

    def moved(self, request: RequestId, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Note that a request has moved: the blocks that its source has not computed yet will be computed elsewhere."""
        names = self.names(request)
        if left := self.tree.promised(source, names):
            others = (self.names(other) for other in self.queues.of(source) if other != request)
            wanted = frozenset(chain.from_iterable(others))
            self.tree.withdraw(source, [name for name in left if name not in wanted])
            self.tree.promise(target, names)
        self.queues.move(request, target, now)

    def ended(self, request: RequestId) -> None:
        """Forget a request that has ended, or never begun."""
        self.queues.end(request)
        self._prompts.pop(request, None)

    def scores(
        self,
        cluster: Cluster,
        request: Request,
        held: Mapping[ReplicaId, HeldPrefix],
        barred: Set[ReplicaId],
        now: float,
        empty: bool = True,
    ) -> list[ReplicaScore]:
        """The replicas outside of `barred` with room for a prompt, with their scores; without `empty` those in use."""
        allowed = (each for each in cluster.running() if each.id not in barred and (empty or each.requests))
        return self.scores_of(fitting(cluster, request, allowed), request.tokens, held, now)

    def scores_of(
        self, replicas: Iterable[Replica], prompt: Tokens, held: Mapping[ReplicaId, HeldPrefix], now: float
    ) -> list[ReplicaScore]:
        """The scores of these replicas, in their order, for a prompt that replicas have as in `held`."""
        donors = self._donors(held)
        return [self._score(each, prompt, held.get(each.id, NO_PREFIX), donors, now) for each in replicas]

    def _donors(self, held: Mapping[ReplicaId, HeldPrefix]) -> Sequence[Donor]:
        """The replicas that a prompt's prefix may be copied from, the longest prefix first."""
        if self.link is None or self.routing is not Routing.TREE:
            return ()
        return longest(held, self.block_tokens)

    def _score(
        self,
        replica: Replica,
        prompt: Tokens,
        here: HeldPrefix,
        donors: Sequence[Donor],
        now: float,
    ) -> ReplicaScore:
        hbm, dram = Tokens(here.hbm * self.block_tokens), Tokens(here.dram * self.block_tokens)
        batch, context, wait_s = len(replica.requests), replica.load, self.queues.wait_s(replica.id, now)
        learned = self.learned
        own_s = learned.speed.first_token_s(learned.load, prompt, hbm, dram, batch, context)
        if donors and self.link is not None and donors[0].tokens > hbm:

            def rest_s(tokens: Tokens) -> float:
                return learned.speed.prefill_s(prompt - tokens, tokens, batch, context)

            limit_s = self.link_limit_s
            fetch = best_fetch(replica.id, hbm, wait_s, own_s, donors, self.link, learned.load, limit_s, rest_s)
            if fetch:
                return ReplicaScore(replica.id, hbm, dram, wait_s, rest_s(fetch.tokens), fetch)
        return ReplicaScore(replica.id, hbm, dram, wait_s, own_s)

    def favoured(
        self,
        cluster: Cluster,
        request: Request,
        arrival: Arrival,
        held: Mapping[ReplicaId, HeldPrefix],
        barred: Set[ReplicaId],
        choice: Replica,
        now: float,
    ) -> Collection[ReplicaId]:
        """The replicas to choose from; none: `choice`, the policy's own, is as good as any.

        Empty replicas are among them only if the policy would use one: others may be about to close.
        """
        if self.routing is Routing.SESSION:
            home = self.learned.sessions.get(arrival.session) if arrival.session else None
            replica = cluster.replicas.get(home) if home is not None else None
            at_home = replica is not None and replica.id not in barred and fits(cluster, request, replica)
            return (replica.id,) if replica is not None and at_home else ()
        if self.routing is Routing.LEAST_LOAD or not held:
            return ()
        return near_best(self.scores(cluster, request, held, barred, now, empty=not choice.requests))

    def in_order(self, cluster: Cluster, arrivals: Sequence[Arrival], now: float) -> list[Arrival]:
        """Arrivals that are placed together, in the best order: those first that have the most to lose.

        The loss is the difference between the best score and the second best: without a prefix it is that of the
        waits. Arrivals with equal losses keep their order. Their placements compute new scores: each placement before
        adds to a replica's wait, and promises blocks.
        """
        if len(arrivals) < 2 or self.routing is not Routing.TREE:
            return list(arrivals)
        losses = {}
        for arrival in arrivals:
            held = self.match(arrival)
            request = cluster.new_request(arrival.id, arrival.tokens, names=arrival.names)
            scores = self.scores(cluster, request, held, frozenset(), now) if held else ()
            best = nsmallest(2, (each.score_s for each in scores))
            losses[arrival.id] = best[1] - best[0] if len(best) == 2 else 0.0
        return sorted(arrivals, key=lambda arrival: -losses[arrival.id])

    def placed(
        self, arrival: Arrival, replica: Replica, held: Mapping[ReplicaId, HeldPrefix], now: float
    ) -> tuple[Matched, Fetch | None]:
        """Note the placement of an arrival, whose prompt replicas have as in `held`; the copy that comes before it."""
        here, size = held.get(replica.id, NO_PREFIX), self.block_tokens
        (score,) = self.scores_of((replica,), arrival.tokens, held, now)
        self.queues.add(arrival.id, replica.id, score.prefill_s, now)
        self.tree.promise(replica.id, arrival.names[here.blocks :])
        if self.routing is Routing.SESSION and arrival.session:
            self.learned.sessions.new[arrival.session] = replica.id
        best = max((prefix.blocks for prefix in held.values()), default=0)
        predicted = here.blocks * size if score.fetch is None else score.fetch.tokens
        return Matched(Tokens(best * size), Tokens(predicted)), score.fetch


def near_best(scores: Collection[ReplicaScore]) -> frozenset[ReplicaId]:
    """The replicas whose score is near the best."""
    best = min(scores, key=attrgetter("score_s"), default=None)
    if best is None:
        return frozenset()
    limit = best.score_s + max(NEAR_S, NEAR_SHARE * best.first_token_s)
    return frozenset(each.replica for each in scores if each.score_s <= limit)

"""The memory of a pool's decisions: what is learned, where things are, and their update by an observation.

The two are values of their own. No report has what is in `Learned`, so it outlives an epoch that fails. `Locations`
follows from the newest reports, moves and placements: whatever an epoch leaves of it, a snapshot of the replicas makes
it anew (`PoolMemory.observe` with a whole report).
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from operator import itemgetter

from policies.cluster.changes import Changes, Crossing, Departure
from policies.cluster.cluster import Cluster
from policies.cost.fit import NO_STEPS
from policies.cost.lines import Line
from policies.cost.service import ServiceLevel
from policies.decision import slices
from policies.decision.learned import Learned
from policies.decision.level.scaling import Scaled
from policies.decision.limits import Mode, Sizes, Terms
from policies.decision.locations import Locations
from policies.decision.observation import SETTLED, PairPhase, PoolReport
from policies.decision.placement import Placed
from policies.decision.slices import finish, in_slices
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.paths.prices import IDLE, TargetWork
from policies.prefix.routing import Router
from policies.rules.policy import Policy
from policies.rules.registry import policy

_DONORS = (ReplicaState.RUNNING, ReplicaState.DRAINING)
"""The states of a replica that prefixes are copied from: one that is about to stop gives what it will lose."""


class PoolMemory:
    """The memory of one pool, at first with nothing but what is `learned`. Only `policies.decision` changes it."""

    def __init__(self, terms: Terms, rule: Policy | None = None, learned: Learned | None = None) -> None:
        self.terms = terms
        self.rule = policy(terms.policy) if rule is None else rule
        self.learned = Learned(terms) if learned is None else learned
        self.locations = self._nowhere()
        self.scaled: Scaled | None = None
        """The openings and closings of the last epoch in mode `act`."""
        self._links: dict[tuple[ReplicaId, ReplicaId], Line | None] = {}
        """The links of copies, as of the last observation."""
        self._observed_at = 0.0

    @property
    def cluster(self) -> Cluster:
        """The cluster of the locations."""
        return self.locations.cluster

    @property
    def router(self) -> Router:
        """The router of the locations."""
        return self.locations.router

    def set_mode(self, mode: Mode) -> None:
        """Use plans in this way from the next epoch on."""
        self.terms = replace(self.terms, mode=mode)
        self.scaled = None

    def set_levels(self, levels: Mapping[str, ServiceLevel]) -> None:
        """Keep these levels from the next epoch on, of the classes that have one."""
        self.terms = self.terms.with_levels(levels)

    def add_placement(self, request_id: RequestId, placed: Placed, cached: Tokens = Tokens(0)) -> None:
        """Add the placement of an arrival, or of a request that a replica has lost or refused.

        The replica has the KV of `cached` tokens of the request, by prediction.
        """
        if placed.replica is not None and self.terms.has_level:
            replica = self.cluster.replicas[placed.replica]
            first_token_s = self.router.queues.wait_s(replica.id, placed.at)
            self.learned.predicted.add_arrival(replica, placed.tokens - cached, first_token_s, placed.at)
        self.locations.add_placement(request_id, placed)

    @contextmanager
    def proposing(self) -> Iterator[None]:
        """At the end of the block, take all of its decisions back: the memory is as before."""
        learned = self.learned
        load = learned.prefill_load
        learned.prefill_load = load.copy()
        try:
            with self.cluster.decisions.proposing(), learned.estimates.proposing():
                yield
        finally:
            learned.prefill_load = load

    def active_classes(self, now: float) -> frozenset[str]:
        """The service classes that have requests, or have lately had some."""
        return self.learned.active_classes(self.locations.present_classes(), now)

    # --- observations ---------------------------------------------------------------------------------

    def observe(self, seen: PoolReport, now: float) -> Changes:
        """Update the memory with an observation, and return the changes for the policy."""
        return finish(self.observe_in_slices(seen, now))

    def observe_in_slices(self, seen: PoolReport, now: float) -> Generator[None, None, Changes]:
        """As `observe`, with pauses for placements: at each, every request is in one place and every sum is correct."""
        if seen.whole:
            seen = self._rebuild(seen)
        learned, locations, cluster = self.learned, self.locations, self.locations.cluster
        if seen.pool.capacity:
            learned.capacity = seen.pool.capacity
            locations.set_capacity(seen.pool.capacity)
        self._take_moves(seen, now)
        crossed: list[Crossing] = []
        departed: list[tuple[int, Departure]] = []
        grown = 0
        sizes = locations.known_sizes(seen.sizes)
        for _ in range(0, len(seen.sizes), slices.SLICE):
            grown += cluster.resize(islice(sizes, slices.SLICE), crossed)
            yield
        self._follow_pairs(seen, now)
        for gone in in_slices(seen.gone):
            departed += locations.take_gone(gone)
            learned.forget_requests(q for q in gone if q not in locations.placed)
            yield
        moving = {report.request for report in seen.moves}
        decoding = 0
        for number, residents in enumerate(in_slices(seen.requests)):
            if number:
                yield
            decoding += locations.take_requests(residents, crossed, moving)
        learned.experience.observe_growth(grown, locations.decoding - decoding, now)
        self._learn_running(seen, now)
        yield from self._learn_steps(seen, now)
        yield
        learned.experience.observe_replicas(seen.replicas, seen.lost, now)
        removed = locations.take_replicas(seen)
        learned.forget_replicas(seen.lost, locations.statuses)
        learned.take_profiles(seen.profiles)
        yield from locations.relocate(removed)
        for replica in removed.values():
            cluster.lose(replica)
        locations.expect(seen)
        locations.admit_at_home()
        yield
        yield from self._take_caches(seen, now)
        locations.correct()
        for report in seen.moves:
            if report.by_hand and report.moved and report.request in cluster.requests:
                cluster.rest(report.request, now + self.terms.limits.by_hand_s)
        yield
        crossed.sort(key=lambda crossing: crossing.request.order)
        return Changes(
            tuple(
                departure for _, departure in sorted(departed, key=itemgetter(0)) if departure.replica.id not in removed
            ),
            tuple(crossing for crossing in crossed if locations.is_placed(crossing.request)),
            tuple(cluster.in_order()),
        )

    def work_of(self, replica: ReplicaId, now: float) -> TargetWork:
        """The work of a replica, as the decision has it so far."""
        found, wait_s = self.cluster.replicas.get(replica), self.router.queues.wait_s(replica, now)
        return IDLE if found is None else TargetWork(len(found.requests), found.load, wait_s)

    # --- inside ---------------------------------------------------------------------------------------

    def _nowhere(self) -> Locations:
        """Locations of nothing, by what is learned."""
        terms, link = self.terms, self._copy_link if self.terms.copies else None
        router = Router(terms.routing, self.learned.routing, link, terms.boundaries.time_limit_s)
        return Locations(terms, router, self.learned.capacity)

    def _rebuild(self, seen: PoolReport) -> PoolReport:
        """Begin with new locations, to be filled by a snapshot. Returns the snapshot, with the lost replicas.

        Placements and moves since the reports in it are dropped, too: the next reports contain them.
        """
        old, present = self.locations, {resident.load.id for resident in seen.requests}
        lost = tuple(sorted(old.statuses.keys() - {status.id for status in seen.replicas}))
        self.locations = self._nowhere()
        for request in (resident.load.id for resident in seen.requests):
            # No report has the names of a prompt's blocks.
            self.router.take_names(request, old.router.names(request))
        self.learned.estimates.keep_requests(present)
        return replace(seen, lost=lost)

    def _take_moves(self, seen: PoolReport, now: float) -> None:
        """Follow moves and copies, and learn from their ends."""
        learned, locations = self.learned, self.locations
        for report in seen.moves:
            if locations.take_move(report, now):
                learned.learn_end(report, now)
            learned.estimates.learn(report, now)
        for copied in seen.copies:
            learned.estimates.learn_copy(copied, now)
        locations.expire(now)

    def _learn_running(self, seen: PoolReport, now: float) -> None:
        """Add the number of requests on replicas since the last report. At a whole one, none is in the cluster yet."""
        if not seen.whole:
            self.learned.experience.observe_running(len(self.cluster.requests) - len(self.cluster.waiting), now)

    def _follow_pairs(self, seen: PoolReport, now: float) -> None:
        """Follow the pairs of the pool's replicas, and the ends of its requests, for the decision on pairs."""
        if self.terms.pairing is Mode.OFF:
            return
        pairing, requests = self.learned.pairing, self.cluster.requests
        pairing.follow(seen.members, now)
        for request in seen.gone:
            if request in requests and request not in self.locations.placed:
                pairing.demand.ended(request, now)

    def _learn_steps(self, seen: PoolReport, now: float) -> Iterator[None]:
        """Add the steps of replicas since their last report to the experience.

        Those in pairs are no measure of a whole replica.
        """
        paired = {member.replica for member in seen.members if member.phase is not PairPhase.APART}
        for number, some in enumerate(in_slices([status for status in seen.replicas if status.id not in paired])):
            if number:
                yield
            for status in some:
                was = self.locations.statuses.get(status.id)
                ran = was is not None and was.steps.steps != status.steps.steps
                steps = status.steps.since(was.steps) if was is not None and ran else NO_STEPS
                self.learned.experience.observe_steps(steps, status.step_tokens, now)

    def _take_caches(self, seen: PoolReport, now: float) -> Iterator[None]:
        """Update the prompt tree, with a pause after every change of many blocks."""
        router = self.router
        statuses = self.locations.statuses.values()
        router.block_tokens = next((status.block_size for status in statuses if status.capacity), 0)
        if self.terms.sizes is Sizes.MARGINAL and self.rule.knows_sharing:
            self.cluster.share_blocks(router.block_tokens, router.names)
        router.expire(now)
        self._links.clear()
        self._observed_at = now
        for replica, change in seen.caches.items():
            router.tree.apply(replica, change)
            if sum(map(len, change.stored.values())) > slices.SLICE:
                yield
        for request_id in [q for q in router.queues.waiting() if self.locations.phase(q) in SETTLED]:
            router.queues.end(request_id)

    def _copy_link(self, donor: ReplicaId, target: ReplicaId) -> Line | None:
        """See `TokenLink`. Copies stay out of the way of migrations: none goes where one is under way."""
        ends = donor, target
        if ends not in self._links:
            self._links[ends] = self._find_link(donor, target)
        return self._links[ends]

    def _find_link(self, donor: ReplicaId, target: ReplicaId) -> Line | None:
        status = self.locations.statuses.get(donor)
        # A silent replica has no capacity.
        gives = status is not None and status.state in _DONORS and status.capacity > 0
        if not gives or self.locations.moves_between(donor, target):
            return None
        return self.learned.estimates.copying(donor, target, self._observed_at)

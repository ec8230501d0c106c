"""The learned part of a pool's memory, with the orders of operators: no snapshot of the replicas contains it."""

from collections.abc import Collection, Iterable, Mapping

from policies.causes import PAIR_FAILURES
from policies.cluster.supply import RecentMaximum
from policies.cost.service import ReplicaSpeed
from policies.decision.breaker import Breaker
from policies.decision.disaggregation.prefill_load import PrefillLoad
from policies.decision.experience import Experience
from policies.decision.level.predicted import PredictedTimes
from policies.decision.level.risk import AdaptedRisk
from policies.decision.limits import DemandHistory, Terms
from policies.decision.observation import Status
from policies.decision.pairs import PairingMemory
from policies.model import ReplicaId, RequestId, Role, Tokens
from policies.paths.estimates import Estimates
from policies.paths.prices import Profile
from policies.plan import MoveReport
from policies.prefix.routing import RoutingExperience

CLASS_S = 600.0
"""The seconds for which the level of a service class counts after its last request."""


class Learned:
    """The learned part of one pool's memory. It outlives an epoch that fails.

    `capacity` is that of a new replica, in tokens, which no replica reports while all are starting. `level_replicas` is
    the least number of replicas that keeps a service level. `roles_by_hand` are the roles that an operator has set, by
    replica. `number` is the pool's among those of one scheduler.
    """

    def __init__(self, terms: Terms, number: int = 0) -> None:
        self.capacity = Tokens(1)
        self.experience = Experience(terms.epoch_s, terms.decode_rate)
        self.breaker = Breaker()
        self.estimates = Estimates(terms.boundaries, terms.epoch_s)
        self.routing = RoutingExperience()
        self.demand = DemandHistory.of_pool(number)
        self.level_replicas = RecentMaximum()
        self.risk = AdaptedRisk()
        self.predicted = PredictedTimes()
        self.prefill_load = PrefillLoad()
        self.pairing = PairingMemory()
        self.roles_by_hand: dict[ReplicaId, Role] = {}
        self._class_seen: dict[str, float] = {}
        if terms.speed is not None:
            self.follow_speed(terms.speed)

    def follow_speed(self, speed: ReplicaSpeed) -> None:
        """Price prefills and steps by these step times from now on."""
        self.routing.speed = speed
        self.estimates.follow(speed)

    def learn_end(self, report: MoveReport, now: float) -> None:
        """Learn from the end of an expected move."""
        pair = (report.source, report.target)
        if report.moved:
            self.breaker.succeeded(pair)
            self.experience.observe_move(report.took_s or 0.0)
        elif report.cause in PAIR_FAILURES:
            self.breaker.failed(pair, now)

    def take_profiles(self, profiles: Mapping[ReplicaId, Profile]) -> None:
        """Take new replicas' own measurements."""
        for replica, profile in profiles.items():
            self.estimates.profile(replica, profile)
            self.routing.take_profile(profile)

    def forget_replicas(self, lost: Collection[ReplicaId], left: Mapping[ReplicaId, Status]) -> None:
        """Forget the replicas that are lost; those in `left` exist."""
        for replica in lost:
            self.breaker.forget(replica)
            self.pairing.forget_replica(replica)
            self.roles_by_hand.pop(replica, None)
        if lost:
            self.estimates.keep(left)

    def forget_requests(self, ended: Iterable[RequestId]) -> None:
        """Drop the state of requests that have ended."""
        for request in ended:
            self.estimates.forget(request)

    def active_classes(self, present: Iterable[str], now: float) -> frozenset[str]:
        """The service classes that have requests now, or have had some within the last `CLASS_S` seconds."""
        self._class_seen.update(dict.fromkeys(present, now))
        return frozenset(name for name, at in self._class_seen.items() if at >= now - CLASS_S)

"""Beliefs about the speed of links and replicas: seconds per byte and per token, from profiles and from ended moves.

Both paths of a migration are measured in the same unit: seconds from the order to the first new token at the target.
For KV that is a line over the bytes sent, per link, which is a directed pair of replicas. For tokens it is a line over
the seconds of the prefill by the formula of step times (`policies.cost.steps`), per target: its slope corrects the
formula, which is that of an idle replica. Each line is fitted to the durations of migrations (`lines`). Without
evidence:

- a link is as fast as the other links of its kind (within a node, or between nodes);
- a prefill takes the time by the formula, plus the time of the hand-over. Before step times are known, the formula has
  the coefficients of the target's profile, taken at its start.

With or without evidence, a link is no faster than its ends can stage blocks.

All times are in seconds of the observations' clock.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from policies.cost.lines import WINDOW, Evidence, Line, Observed
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional
from policies.model import Bytes, ReplicaId, Tokens
from policies.paths.choice import PATIENCE
from policies.plan import MoveReport, Path

SHORT, LONG = 128, 1024
"""The prompts, in tokens, between which the rate of prefills is shown."""


def prefill_speed(line: Line) -> ReplicaSpeed:
    """The step times that a line over the tokens of a prefill gives."""
    return ReplicaSpeed(StepCosts(proportional(line.per_unit_s), line.latency_s))


@dataclass(frozen=True, slots=True)
class Profile:
    """A replica as measured at its start. `prefill` is over tokens, without the hand-over of a migration.

    Replicas exchange KV if their `cache` is the same and not empty. `token_bytes` is the KV of one token, a mean over
    its block. `staging_bytes_per_s` is the rate at which KV blocks are copied into a staging slot; None if it could
    not be measured.
    """

    node: str
    cache: str
    token_bytes: float
    prefill: Line
    staging_bytes_per_s: float | None = None

    @property
    def speed(self) -> ReplicaSpeed:
        """The step times of prefills alone, until more is known."""
        return prefill_speed(self.prefill)

    def size(self, tokens: Tokens) -> Bytes:
        """The KV size of `tokens` tokens."""
        return Bytes(round(tokens * self.token_bytes))

    def exchanges_kv(self, other: "Profile") -> bool:
        """True if either replica can load the KV blocks of the other."""
        return bool(self.cache) and self.cache == other.cache


@dataclass(frozen=True, slots=True)
class Priors:
    """Beliefs without any evidence. `handover_s` is the time of a move by tokens beside the prefill.

    Evidence loses half of its weight in `half_life_s` seconds.
    """

    within_node: Line = field(default_factory=lambda: Line.of(1e9, 0.05))
    between_nodes: Line = field(default_factory=lambda: Line.of(5e8, 0.05))
    prefill: Line = field(default_factory=lambda: Line.of(2000.0))
    handover_s: float = 0.02
    half_life_s: float = 300.0


class Beliefs:
    """The lines of all links and replicas, see the module. The caller has to `keep` only the replicas that exist."""

    def __init__(self, priors: Priors) -> None:
        self._priors = priors
        self._profiles: dict[ReplicaId, Profile] = {}
        self._links: dict[tuple[ReplicaId, ReplicaId], Evidence] = {}
        self._kinds = {within: self._no_evidence() for within in (True, False)}
        self._prefills: dict[ReplicaId, deque[Observed]] = {}
        """Prefills of moved requests by target; sizes are in tokens, since the formula of their seconds may change."""
        self._speed: ReplicaSpeed | None = None

    def follow(self, speed: ReplicaSpeed) -> None:
        """Use these step times for prefills from now on, instead of those of profiles."""
        self._speed = speed

    def profile(self, replica: ReplicaId, profile: Profile) -> bool:
        """Store a replica's own measurements; the evidence from its migrations stays. False if they are known."""
        is_new = self._profiles.get(replica) != profile
        self._profiles[replica] = profile
        return is_new

    def keep(self, replicas: Collection[ReplicaId]) -> None:
        """Forget all other replicas, and their links."""
        self._profiles = {id: profile for id, profile in self._profiles.items() if id in replicas}
        self._prefills = {id: observed for id, observed in self._prefills.items() if id in replicas}
        self._links = {ends: evidence for ends, evidence in self._links.items() if all(id in replicas for id in ends)}

    def learn(self, report: MoveReport, shared: float, now: float) -> None:
        """Learn from an ended migration. `shared` is the size of everything that passed on its path until its end.

        For a move by tokens it is 0 if it is not known, and else without the tokens that the target had.

        A migration that did not move the request, or whose first new token the target did not report, is no evidence.
        A migration that fell back to tokens counts as PATIENCE times its expected KV time, so that a dead link is not
        tried again and again.
        """
        taken = report.whole_s
        if taken is None or report.tokens is None:
            return
        if report.path is Path.KV:
            self._learn_link(report, Observed(now, max(report.sent, shared), taken))
        elif not report.fell_back:
            observed = self._prefills.setdefault(report.target, deque(maxlen=WINDOW))
            observed.append(Observed(now, shared or report.tokens, taken))
        elif profile := self._profiles.get(report.source):
            size = profile.size(report.tokens)
            at_least_s = report.copy_s * max(1.0, size / report.sent) if report.sent else report.copy_s
            believed_s = self.link(report.source, report.target, now).seconds(size)
            self._learn_link(report, Observed(now, size, PATIENCE * max(at_least_s, believed_s)))

    def _learn_link(self, report: MoveReport, observed: Observed) -> None:
        self._links.setdefault((report.source, report.target), self._no_evidence()).add(observed)
        self._kinds[self._within_node(report.source, report.target)].add(observed)

    def _no_evidence(self) -> Evidence:
        return Evidence(self._priors.half_life_s)

    def link(self, source: ReplicaId, target: ReplicaId, now: float) -> Line:
        """Seconds over bytes of KV from source to target, with nothing else on the link."""
        within = self._within_node(source, target)
        prior = self._kinds[within].line(self._priors.within_node if within else self._priors.between_nodes, now)
        profiles = (self._profiles.get(end) for end in (source, target))
        fastest = min((p.staging_bytes_per_s for p in profiles if p and p.staging_bytes_per_s), default=float("inf"))
        evidence = self._links.get((source, target))
        return evidence.line(prior, now, fastest) if evidence else prior.no_faster(fastest)

    def is_measured(self, source: ReplicaId, target: ReplicaId, now: float) -> bool:
        """True if migrations between two nodes, or within one as these replicas are, outweigh the prior."""
        return self._kinds[self._within_node(source, target)].outweighs_prior(now)

    def prefill(self, target: ReplicaId, now: float) -> Line:
        """Seconds until a request goes on at the target, over those of `prefill_s`; with nothing else queued there."""
        evidence = self._no_evidence()
        for observed in self._prefills.get(target, ()):
            evidence.add(replace(observed, size=self.prefill_s(target, round(observed.size))))
        return evidence.line(Line(self._priors.handover_s, 1.0), now)

    def prefill_s(self, target: ReplicaId, tokens: int) -> float:
        """The time of a prefill on the idle target by the formula of step times, in seconds."""
        profile = self._profiles.get(target)
        return (self._speed or (profile.speed if profile else prefill_speed(self._priors.prefill))).prefill_s(tokens)

    def size(self, source: ReplicaId, target: ReplicaId, tokens: Tokens) -> Bytes | None:
        """The KV size of `tokens` tokens; None unless the profiles of both replicas have the same cache."""
        ends = self._profiles.get(source), self._profiles.get(target)
        return ends[0].size(tokens) if ends[0] and ends[1] and ends[0].exchanges_kv(ends[1]) else None

    def _within_node(self, source: ReplicaId, target: ReplicaId) -> bool:
        """True if the profiles of both replicas name the same node."""
        nodes = [self._profiles[id].node for id in (source, target) if id in self._profiles]
        return len(nodes) == 2 and nodes[0] == nodes[1]

    def to_json(self, now: float) -> dict[str, Any]:
        """The lines of all links used and of all replicas, each with its number of observations."""
        return {
            "links": [
                {"source": source, "target": target} | _line("bytes", self.link(source, target, now), len(evidence))
                for (source, target), evidence in sorted(self._links.items())
            ],
            "prefill": [
                {"replica": id} | _line("tokens", self._by_tokens(id, now), len(self._prefills.get(id, ())))
                for id in sorted(self._profiles)
            ],
        }

    def _by_tokens(self, target: ReplicaId, now: float) -> Line:
        """The line over tokens through the times of a short and of a long prefill."""
        short_s, long_s = (self.prefill(target, now).seconds(self.prefill_s(target, size)) for size in (SHORT, LONG))
        return Line.through(SHORT, short_s, LONG, long_s)


def _line(unit: str, line: Line, observations: int) -> dict[str, float]:
    return {f"{unit}_per_s": line.rate, "latency_s": line.latency_s, "observations": observations}

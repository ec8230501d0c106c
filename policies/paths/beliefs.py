"""What is believed of links and replicas: seconds per byte and per token, from profiles and from what moves took.

Both paths of a migration are measured in the same unit: seconds from the order to the first new token at the target.
For KV that is a line over the bytes that are sent, per link, which is a directed pair of replicas. For tokens it is one
over the context that is prefilled, per target. Each is fitted to what migrations took (`lines`). Without evidence:

- a link is believed to be like the others of its kind, within a node or between nodes, but no faster than its ends can
  stage blocks;
- a replica prefills as it did when it was profiled at its start, and the hand-over comes on top.

All times are in seconds of the observations' clock.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from policies.model import Bytes, ReplicaId, Tokens
from policies.paths.choice import PATIENCE
from policies.paths.lines import Evidence, Line, Observed
from policies.plan import MoveReport, Path


@dataclass(frozen=True, slots=True)
class Profile:
    """A replica as measured at its start. `prefill` is over tokens, without the hand-over of a migration.

    Replicas exchange KV where `cache` is the same, and not empty; a token's takes `token_bytes`, a mean over its block.
    `staging_bytes_per_s` is how fast KV blocks are copied into a staging slot; None if it could not be measured.
    """

    node: str
    cache: str
    token_bytes: float
    prefill: Line
    staging_bytes_per_s: float | None = None

    def size(self, tokens: Tokens) -> Bytes:
        """KV of so many tokens."""
        return Bytes(round(tokens * self.token_bytes))

    def exchanges_kv(self, other: "Profile") -> bool:
        """Whether KV blocks of one can be loaded by the other."""
        return bool(self.cache) and self.cache == other.cache


@dataclass(frozen=True, slots=True)
class Priors:
    """What is believed before anything was seen; `handover_s` is what every move by tokens takes beside the prefill.

    Evidence loses half of its weight in `half_life_s` seconds.
    """

    within_node: Line = field(default_factory=lambda: Line.of(1e9, 0.05))
    between_nodes: Line = field(default_factory=lambda: Line.of(5e8, 0.05))
    prefill: Line = field(default_factory=lambda: Line.of(2000.0))
    handover_s: float = 0.02
    half_life_s: float = 300.0


class Beliefs:
    """See the module. What it was told of replicas that are gone is to be forgotten by `keep`."""

    def __init__(self, priors: Priors) -> None:
        self._priors = priors
        self._profiles: dict[ReplicaId, Profile] = {}
        self._links: dict[tuple[ReplicaId, ReplicaId], Evidence] = {}
        self._kinds = {within: self._none() for within in (True, False)}
        self._prefills: dict[ReplicaId, Evidence] = {}

    def profile(self, replica: ReplicaId, profile: Profile) -> None:
        """Take what a replica has measured of itself. What its migrations have shown stays."""
        self._profiles[replica] = profile

    def keep(self, replicas: Collection[ReplicaId]) -> None:
        """Forget all other replicas, and their links."""
        self._profiles = {id: profile for id, profile in self._profiles.items() if id in replicas}
        self._prefills = {id: evidence for id, evidence in self._prefills.items() if id in replicas}
        self._links = {ends: evidence for ends, evidence in self._links.items() if all(id in replicas for id in ends)}

    def learn(self, report: MoveReport, shared: float, now: float) -> None:
        """Learn from a migration that has ended. `shared` is the size of all that had to pass for it to be over.

        A migration that did not move the request, or whose target did not tell when it went on, teaches nothing. One
        that had to give up its copy would have taken longer than it did and was believed to: it counts as longer than
        anybody would wait for, so that a link is not tried in vain for ever.
        """
        taken = report.whole_s
        if taken is None or report.tokens is None:
            return
        if report.path is Path.KV:
            self._learn_link(report, Observed(now, max(report.sent, shared), taken))
        elif not report.fell_back:
            evidence = self._prefills.setdefault(report.target, self._none())
            evidence.add(Observed(now, max(report.tokens, shared), taken))
        elif profile := self._profiles.get(report.source):
            size = profile.size(report.tokens)
            at_least_s = report.copy_s * max(1.0, size / report.sent) if report.sent else report.copy_s
            believed_s = self.link(report.source, report.target, now).seconds(size)
            self._learn_link(report, Observed(now, size, PATIENCE * max(at_least_s, believed_s)))

    def _learn_link(self, report: MoveReport, observed: Observed) -> None:
        self._links.setdefault((report.source, report.target), self._none()).add(observed)
        self._kinds[self._within_node(report.source, report.target)].add(observed)

    def _none(self) -> Evidence:
        return Evidence(self._priors.half_life_s)

    def link(self, source: ReplicaId, target: ReplicaId, now: float) -> Line:
        """Seconds over bytes of KV from source to target, with nothing else on the way."""
        within = self._within_node(source, target)
        prior = self._kinds[within].line(self._priors.within_node if within else self._priors.between_nodes, now)
        for end in (source, target):
            if (profile := self._profiles.get(end)) and profile.staging_bytes_per_s:
                prior = prior.no_faster(profile.staging_bytes_per_s)
        evidence = self._links.get((source, target))
        return evidence.line(prior, now) if evidence else prior

    def prefill(self, target: ReplicaId, now: float) -> Line:
        """Seconds over tokens of context that the target is to prefill, with nothing else queued there."""
        profile = self._profiles.get(target)
        prior = profile.prefill if profile else self._priors.prefill
        prior = replace(prior, latency_s=prior.latency_s + self._priors.handover_s)
        evidence = self._prefills.get(target)
        return evidence.line(prior, now) if evidence else prior

    def size(self, source: ReplicaId, target: ReplicaId, tokens: Tokens) -> Bytes | None:
        """KV of so many tokens; None unless both replicas are known to have caches of one kind."""
        ends = self._profiles.get(source), self._profiles.get(target)
        return ends[0].size(tokens) if ends[0] and ends[1] and ends[0].exchanges_kv(ends[1]) else None

    def _within_node(self, source: ReplicaId, target: ReplicaId) -> bool:
        """Whether both are known to be on one node."""
        nodes = [self._profiles[id].node for id in (source, target) if id in self._profiles]
        return len(nodes) == 2 and nodes[0] == nodes[1]

    def to_json(self, now: float) -> dict[str, Any]:
        """The lines of all links that were used, and of all replicas, and on how many observations they rest."""
        return {
            "links": [
                {"source": source, "target": target} | _shown("bytes", self.link(source, target, now), len(evidence))
                for (source, target), evidence in sorted(self._links.items())
            ],
            "prefill": [
                {"replica": id} | _shown("tokens", self.prefill(id, now), len(self._prefills.get(id, ())))
                for id in sorted(self._profiles)
            ],
        }


def _shown(unit: str, line: Line, observations: int) -> dict[str, float]:
    return {f"{unit}_per_s": line.rate, "latency_s": line.latency_s, "observations": observations}

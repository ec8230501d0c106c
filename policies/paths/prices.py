"""The prices of moves and copies in seconds: of tokens that are computed, of KV that is sent, and of hand-overs.

    computed    the formula of step times (`policies.cost.steps`), beside the requests that decode on the replica
    sent        one line per link, a directed pair of replicas: latency + bytes / rate, fitted to the transfers of moves
                and of prefix copies (`policies.cost.lines`)
    hand-over   one time per path, and one for queued requests, which are not frozen: the median time of moves beyond
                their computation or transfer

Before there is evidence:

- a link is as fast as the other links of its kind (within a node, or between nodes), and as UNMEASURED before their
  first transfer. With or without evidence, no link is faster than its ends can stage blocks;
- a hand-over takes FIRST_HANDOVER_S seconds;
- before step times are known, computing has no price. Moves then go by KV, or by tokens where KV cannot be sent, and
  nothing is copied.

All times are in seconds of the observations' clock.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from policies.cost.lines import Evidence, Line, Observed
from policies.cost.service import ReplicaSpeed
from policies.model import Bytes, ReplicaId, Tokens
from policies.paths.choice import PATIENCE
from policies.plan import MoveReport, Path, Reason
from policies.prefix.copies import CopyReport

UNMEASURED = Line.of(1e9, 0.02)
"""Seconds over bytes of a link before the first transfer over any link of its kind."""
FIRST_HANDOVER_S = 0.03
"""Seconds of a hand-over before the first move."""
HALF_LIFE_S = 300.0
"""The age, in seconds, at which evidence has lost half of its weight."""


class HandOver(StrEnum):
    """The kinds of hand-overs, by the path of the move; QUEUED: by tokens, of a request that its source only queued."""

    KV = "kv"
    TOKENS = "tokens"
    QUEUED = "queued"

    @classmethod
    def of(cls, path: Path, reason: Reason) -> "HandOver":
        """The hand-over of a move."""
        if path is Path.KV:
            return cls.KV
        return cls.QUEUED if reason is Reason.ADMIT else cls.TOKENS


class TargetWork(NamedTuple):
    """The work of a replica: `batch` requests with `context` tokens, and prefills that wait for `wait_s` seconds."""

    batch: int = 0
    context: float = 0.0
    wait_s: float = 0.0


IDLE = TargetWork()
"""No work."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The KV cache of a replica, as measured at its start.

    Replicas exchange KV if their `cache` is the same and not empty. `token_bytes` is the KV of one token, a mean over
    its block. `staging_bytes_per_s` is the rate at which KV blocks are copied into a staging slot; None if it could
    not be measured.
    """

    node: str
    cache: str
    token_bytes: float
    staging_bytes_per_s: float | None = None

    def size(self, tokens: Tokens) -> Bytes:
        """The KV size of `tokens` tokens."""
        return Bytes(round(tokens * self.token_bytes))

    def exchanges_kv(self, other: "Profile") -> bool:
        """True if either replica can load the KV blocks of the other."""
        return bool(self.cache) and self.cache == other.cache


class Prices:
    """The prices of one pool, see the module. The caller has to `keep` only the replicas that exist.

    Links without any transfer are priced by the line `unmeasured`.
    """

    def __init__(self, unmeasured: Line = UNMEASURED) -> None:
        self._unmeasured = unmeasured
        self._profiles: dict[ReplicaId, Profile] = {}
        self._links: dict[tuple[ReplicaId, ReplicaId], Evidence] = {}
        self._kinds = {within: Evidence(HALF_LIFE_S) for within in (True, False)}
        self._handovers = {kind: Evidence(HALF_LIFE_S) for kind in HandOver}
        self._speed: ReplicaSpeed | None = None

    def follow(self, speed: ReplicaSpeed) -> None:
        """Price computation by these step times from now on."""
        self._speed = speed

    def profile(self, replica: ReplicaId, profile: Profile) -> None:
        """Store a replica's own measurements; the evidence from its transfers stays."""
        self._profiles[replica] = profile

    def keep(self, replicas: Collection[ReplicaId]) -> None:
        """Forget all other replicas, and their links."""
        self._profiles = {id: profile for id, profile in self._profiles.items() if id in replicas}
        self._links = {ends: evidence for ends, evidence in self._links.items() if all(id in replicas for id in ends)}

    # --- evidence -------------------------------------------------------------------------------------

    def learn_kv(self, report: MoveReport, passed: float, now: float) -> None:
        """Learn from a move by KV whose first new token is known. `passed` are the bytes sent over its link until its
        copy was done, of other moves included; 0 if they are not known.
        """
        size = max(float(report.sent), passed)
        if report.copy_s > 0 and size > 0:
            self._learn_link(report.source, report.target, Observed(now, size, report.copy_s))
        sent_s = self.link(report.source, report.target, now).seconds(size) if size > 0 else 0.0
        self._learn_handover(report, sent_s, now)

    def learn_tokens(self, report: MoveReport, computed_s: float | None, now: float) -> None:
        """Learn from a move by tokens whose first new token is known. `computed_s` is the price of its prefill and of
        the earlier ones at its target; None: of its own prefill on an idle replica.
        """
        if report.tokens is not None:
            self._learn_handover(report, self.computed_s(report.tokens) if computed_s is None else computed_s, now)

    def learn_given_up(self, report: MoveReport, now: float) -> None:
        """Learn from a move whose copy was given up: the link counts as PATIENCE times slower than it seemed.

        So a dead link is not tried again and again.
        """
        profile = self._profiles.get(report.source)
        if profile is None or report.tokens is None:
            return
        size = profile.size(report.tokens)
        at_least_s = report.copy_s * max(1.0, size / report.sent) if report.sent else report.copy_s
        taken_s = PATIENCE * max(at_least_s, self.link(report.source, report.target, now).seconds(size))
        self._learn_link(report.source, report.target, Observed(now, size, taken_s))

    def learn_copy(self, report: CopyReport, now: float) -> None:
        """Learn from an ended copy. A failed one counts as PATIENCE times its price, as that of a move does."""
        size = self.size(report.donor, report.target, report.tokens)
        if size is None:
            return
        at_least_s = 0.0 if report.done else PATIENCE * self.link(report.donor, report.target, now).seconds(size)
        self._learn_link(report.donor, report.target, Observed(now, size, max(report.took_s, at_least_s)))

    def _learn_link(self, source: ReplicaId, target: ReplicaId, observed: Observed) -> None:
        self._links.setdefault((source, target), Evidence(HALF_LIFE_S)).add(observed)
        self._kinds[self._within_node(source, target)].add(observed)

    def _learn_handover(self, report: MoveReport, priced_s: float, now: float) -> None:
        if report.whole_s is not None and priced_s < inf:
            kind = HandOver.of(report.path, report.reason)
            # The longer the rest takes, the less its noise leaves to be seen of the hand-over.
            weight = FIRST_HANDOVER_S / (FIRST_HANDOVER_S + priced_s)
            self._handovers[kind].add(Observed(now, 0.0, report.whole_s - priced_s, weight))

    # --- prices ---------------------------------------------------------------------------------------

    @property
    def knows_steps(self) -> bool:
        """True if step times are known, so that computing has a price."""
        return self._speed is not None

    def computed_s(self, tokens: int, work: TargetWork = IDLE) -> float:
        """Seconds of the prefill of `tokens` tokens beside the decoding requests of a replica; infinite without step
        times.
        """
        return inf if self._speed is None else self._speed.prefill_s(tokens, 0, work.batch, work.context)

    def link(self, source: ReplicaId, target: ReplicaId, now: float) -> Line:
        """Seconds over bytes of KV from source to target, with nothing else on the link."""
        prior = self._kinds[self._within_node(source, target)].line(self._unmeasured, now)
        fastest = min(self._staging((source, target)), default=inf)
        evidence = self._links.get((source, target))
        return evidence.line(prior, now, fastest) if evidence else prior.no_faster(fastest)

    def is_measured(self, source: ReplicaId, target: ReplicaId, now: float) -> bool:
        """True if transfers between two nodes, or within one as these replicas are, outweigh the first line."""
        return self._kinds[self._within_node(source, target)].outweighs_prior(now)

    def handover_s(self, kind: HandOver, now: float) -> float:
        """Seconds of a move beyond its transfer or its prefill."""
        return self._handovers[kind].line(Line(FIRST_HANDOVER_S, 1.0), now).latency_s

    def size(self, source: ReplicaId, target: ReplicaId, tokens: Tokens) -> Bytes | None:
        """The KV size of `tokens` tokens; None unless the profiles of both replicas have the same cache."""
        ends = self._profiles.get(source), self._profiles.get(target)
        return ends[0].size(tokens) if ends[0] and ends[1] and ends[0].exchanges_kv(ends[1]) else None

    def _staging(self, ends: Iterable[ReplicaId]) -> Iterable[float]:
        profiles = (self._profiles.get(end) for end in ends)
        return (p.staging_bytes_per_s for p in profiles if p is not None and p.staging_bytes_per_s)

    def _within_node(self, source: ReplicaId, target: ReplicaId) -> bool:
        """True if the profiles of both replicas name the same node."""
        nodes = [self._profiles[id].node for id in (source, target) if id in self._profiles]
        return len(nodes) == 2 and nodes[0] == nodes[1]

    def to_json(self, now: float) -> dict[str, Any]:
        """The lines of all links used, each with its number of observations, and the seconds of hand-overs."""
        return {
            "links": [
                {"source": source, "target": target} | _line(self.link(source, target, now), len(evidence))
                for (source, target), evidence in sorted(self._links.items())
            ],
            "handover_s": {kind.value: self.handover_s(kind, now) for kind in HandOver},
        }


def _line(line: Line, observations: int) -> dict[str, float]:
    return {"bytes_per_s": line.rate, "latency_s": line.latency_s, "observations": observations}

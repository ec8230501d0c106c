"""Which moves send KV, which send tokens, and which wait (the paper's adaptive request migration, section V).

Sending KV takes room on links, sending tokens takes prefill time on the target. Each link and each replica has a
*boundary* per epoch: what it can take in without holding memory at the sources for too long, or slowing down what runs
there too much. So every move goes into one of two bins, or waits for the next epoch.

The moves of one epoch are given their paths one after the other: the urgent ones first, of equally urgent ones the
largest first, which packs best (first fit). KV is tried first as long as it takes no more than `PATIENCE` times as
long, counting what is queued already: the request decodes on while its blocks are copied, whereas a prefill holds it up
from the beginning and slows down what decodes at its target. Beyond that the path is tried first that is sooner over.
Where the first has no room, the other one is taken. A bin that is empty takes any one move, however large, by the path
that is sooner over: else a move beyond the boundary would wait for ever.

`choose` is one planner for the whole cluster (the paper's global consensus). In `choose_alone` every source decides
for itself, knowing what was queued when the epoch began but not what the others choose, and may promise what is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

from policies.model import Bytes, ReplicaId, RequestId, Tokens
from policies.plan import Path, Reason

LinkId = NewType("LinkId", str)

PATIENCE = 10.0
"""How many times as long as the prefill that it saves a transfer may take. All the while it takes memory on two
replicas. In the simulator's cost files a request is prefilled 165 to 352 times as fast as it decodes, so a link within
this bound keeps up with what it writes in the meantime.
"""

URGENCY: Mapping[Reason, int] = {
    Reason.OVERLOAD: 0,
    Reason.MANUAL: 0,
    Reason.EVACUATE: 1,
    Reason.MAKE_ROOM: 2,
    Reason.ADMIT: 2,
    Reason.RECLASS: 3,
    Reason.FILL: 3,
    Reason.BALANCE: 4,
    Reason.DRAIN: 5,
}
"""What comes first has the lowest number: a replica out of memory, one that is to be gone, a request without a replica;
then tidiness.
"""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link. `backlog` is what is still to be sent of earlier epochs' transfers."""

    bytes_per_s: float
    boundary: float
    backlog: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a replica can prefill for arriving requests. `backlog` are the tokens in its queue already."""

    tokens_per_s: float
    boundary: float
    backlog: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A move that is decided, and what each path would take. Without `links` its KV cannot be sent."""

    request: RequestId
    source: ReplicaId
    target: ReplicaId
    reason: Reason
    tokens: Tokens
    size: Bytes
    links: tuple[LinkId, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A move's path, and how many seconds each path was predicted to take when it was chosen.

    Without a path the move waits for the next epoch.
    """

    request: RequestId
    path: Path | None
    kv_s: float
    tokens_s: float

    @property
    def predicted_s(self) -> float:
        """The prediction for the path that was chosen; infinite for a move that waits."""
        return {Path.KV: self.kv_s, Path.TOKENS: self.tokens_s, None: float("inf")}[self.path]

    @property
    def sooner(self) -> Path:
        """The path that is predicted to be sooner over."""
        return Path.KV if self.kv_s <= self.tokens_s else Path.TOKENS


def choose(
    candidates: Sequence[Candidate], links: Mapping[LinkId, Link], prefills: Mapping[ReplicaId, Prefill]
) -> list[Choice]:
    """A path for every candidate, in the order in which they are given their turns.

    Raises `KeyError` for a candidate whose links or whose target are not among those given.
    """
    bins = _Bins(links, prefills)
    return [bins.take(candidate) for candidate in sorted(candidates, key=_turn)]


def choose_alone(
    candidates: Sequence[Candidate], links: Mapping[LinkId, Link], prefills: Mapping[ReplicaId, Prefill]
) -> list[Choice]:
    """The same without consensus: each source plans as if the links and its targets were its own."""
    by_source: dict[ReplicaId, list[Candidate]] = {}
    for candidate in candidates:
        by_source.setdefault(candidate.source, []).append(candidate)
    return [choice for own in by_source.values() for choice in choose(own, links, prefills)]


def _turn(candidate: Candidate) -> tuple[int, int, RequestId]:
    return URGENCY[candidate.reason], -candidate.tokens, candidate.request


class _Bins:
    """Links and prefill queues as they fill up while paths are chosen."""

    def __init__(self, links: Mapping[LinkId, Link], prefills: Mapping[ReplicaId, Prefill]) -> None:
        self._links = links
        self._prefills = prefills
        self._bytes = {link_id: link.backlog for link_id, link in links.items()}
        self._tokens = {replica_id: prefill.backlog for replica_id, prefill in prefills.items()}

    def take(self, candidate: Candidate) -> Choice:
        """Give the candidate its path, and its room there."""
        kv_s, tokens_s = self._kv_s(candidate), self._tokens_s(candidate)
        room = {Path.KV: self._has_links(candidate), Path.TOKENS: self._has_prefill(candidate)}
        is_within = all(self._is_within(link, candidate.size) for link in candidate.links)
        by_kv = kv_s <= (PATIENCE if is_within else 1.0) * tokens_s
        order = (Path.KV, Path.TOKENS) if by_kv else (Path.TOKENS, Path.KV)
        path = next((path for path in order if room[path]), None)
        if path is Path.KV:
            for link_id in candidate.links:
                self._bytes[link_id] += candidate.size
        elif path is Path.TOKENS:
            self._tokens[candidate.target] += candidate.tokens
        return Choice(candidate.request, path, kv_s, tokens_s)

    def _kv_s(self, candidate: Candidate) -> float:
        """Until the slowest link has sent all that is queued on it and this; for ever if there is no link."""
        if not candidate.links:
            return float("inf")
        queues = ((self._links[link_id], self._bytes[link_id] + candidate.size) for link_id in candidate.links)
        return max(link.latency_s + queued / link.bytes_per_s for link, queued in queues)

    def _tokens_s(self, candidate: Candidate) -> float:
        prefill = self._prefills[candidate.target]
        return prefill.latency_s + (self._tokens[candidate.target] + candidate.tokens) / prefill.tokens_per_s

    def _has_links(self, candidate: Candidate) -> bool:
        """Whether its KV can be sent in this epoch."""
        links = candidate.links
        return bool(links) and all(self._bytes[link] <= 0 or self._is_within(link, candidate.size) for link in links)

    def _is_within(self, link: LinkId, more: Bytes) -> bool:
        """Whether the link has no more to send than it should, with this."""
        return self._bytes[link] + more <= self._links[link].boundary

    def _has_prefill(self, candidate: Candidate) -> bool:
        """Whether its tokens can be prefilled in this epoch."""
        queued, boundary = self._tokens[candidate.target], self._prefills[candidate.target].boundary
        return queued <= 0 or queued + candidate.tokens <= boundary

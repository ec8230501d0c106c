"""The path of each move: KV, tokens, or neither yet (the paper's adaptive request migration, section V).

Sending KV takes bandwidth on links, sending tokens takes prefill time on the target. Each link and each replica has a
*boundary* per epoch: the amount that it can take in without holding memory at the sources for too long, or slowing
down the target's own requests too much. So every move goes into one of two bins, or waits for the next epoch.

The moves of one epoch get their paths one after the other: urgent ones first, of equally urgent ones the largest
first, which packs best (first fit). KV comes first as long as it takes at most `PATIENCE` times as long as tokens, both
with their queues: a request decodes on while its blocks are copied, whereas a prefill interrupts it from the start and
slows down the decoding at its target. Beyond that factor the faster path comes first. If the first path has no room,
the move takes the other. A request that only leaves the replica of its prefill takes KV alone, since its target is not
for prefills. An empty bin takes any one move, however large, by the faster path: otherwise a move beyond
the boundary would wait for ever.

`choose` is one planner for the whole cluster (the paper's global consensus). In `choose_alone` every source plans by
itself: it sees the queues at the beginning of the epoch but not the other sources' choices, so two sources may book the
same room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NewType

from policies.model import Bytes, ReplicaId, RequestId, Tokens
from policies.plan import Path, Reason

LinkId = NewType("LinkId", str)

PATIENCE = 10.0
"""The longest time of a KV transfer, as a multiple of the prefill that it saves. A transfer holds memory on two
replicas. In the simulator's cost files a request is prefilled 165 to 352 times as fast as it decodes, so a link within
this bound keeps up with the blocks that the request fills during the transfer.
"""

URGENCY: Mapping[Reason, int] = {
    Reason.OVERLOAD: 0,
    Reason.MANUAL: 0,
    Reason.EVACUATE: 1,
    Reason.MAKE_ROOM: 2,
    Reason.ADMIT: 2,
    Reason.DISAGGREGATE: 2,
    Reason.RECLASS: 3,
    Reason.FILL: 3,
    Reason.BALANCE: 4,
    Reason.DRAIN: 5,
}
"""The lowest number is the most urgent: first replicas out of memory, then replicas about to stop, then requests
without room and those whose prefill ends, then optimisations.
"""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link. `boundary` and `backlog`, the rest of earlier epochs' transfers, are in bytes.

    A move over it takes `latency_s` seconds beyond the bytes, its hand-over included.
    """

    bytes_per_s: float
    boundary: float
    backlog: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """A replica's prefill of arriving requests: its boundary, and the prefills that earlier moves have queued there.

    Before these it has prefills of `wait_s` seconds.
    """

    boundary_s: float
    backlog_s: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decided move and its size by either path: the bytes of its KV, and the `prefill_s` of its tokens.

    Of these, and of `tokens`, only what the target lacks counts. `prefill_s` is by the formula of step times, infinite
    before it is known. Without `links` its KV cannot be sent. By tokens,
    its hand-over takes `handover_s`.
    """

    request: RequestId
    source: ReplicaId
    target: ReplicaId
    reason: Reason
    tokens: Tokens
    size: Bytes
    prefill_s: float
    links: tuple[LinkId, ...]
    handover_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A move's path, and the predicted seconds of each path at the time of the choice.

    Without a path the move waits for the next epoch.
    """

    request: RequestId
    path: Path | None
    kv_s: float
    tokens_s: float

    @property
    def predicted_s(self) -> float:
        """The prediction for the chosen path; infinite for a move that waits."""
        return {Path.KV: self.kv_s, Path.TOKENS: self.tokens_s, None: float("inf")}[self.path]

    @property
    def faster(self) -> Path:
        """The path with the shorter prediction: tokens if neither has one."""
        return Path.KV if self.kv_s <= self.tokens_s and isfinite(self.kv_s) else Path.TOKENS


def choose(
    candidates: Sequence[Candidate], links: Mapping[LinkId, Link], prefills: Mapping[ReplicaId, Prefill]
) -> list[Choice]:
    """A path for every candidate, the most urgent and then the largest candidate first.

    Raises `KeyError` for a candidate with a link or a target that is missing in `links` or `prefills`.
    """
    bins = _Bins(links, prefills)
    return [bins.take(candidate) for candidate in sorted(candidates, key=_turn)]


def choose_alone(
    candidates: Sequence[Candidate], links: Mapping[LinkId, Link], prefills: Mapping[ReplicaId, Prefill]
) -> list[Choice]:
    """As `choose`, but without consensus: each source plans as if it had the links and its targets to itself."""
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
        self._seconds = {replica_id: prefill.backlog_s for replica_id, prefill in prefills.items()}

    def take(self, candidate: Candidate) -> Choice:
        """Choose the candidate's path and book its room there."""
        kv_s, tokens_s = self._kv_s(candidate), self._tokens_s(candidate)
        room = {Path.KV: self._has_links(candidate), Path.TOKENS: self._has_prefill(candidate)}
        is_within = all(self._is_within(link, candidate.size) for link in candidate.links)
        by_kv = kv_s <= (PATIENCE if is_within else 1.0) * tokens_s
        order: tuple[Path, ...] = (Path.KV, Path.TOKENS) if by_kv else (Path.TOKENS, Path.KV)
        if candidate.reason is Reason.DISAGGREGATE:
            order = (Path.KV,)
        path = next((path for path in order if room[path]), None)
        if path is Path.KV:
            for link_id in candidate.links:
                self._bytes[link_id] += candidate.size
        elif path is Path.TOKENS:
            self._seconds[candidate.target] += candidate.prefill_s
        return Choice(candidate.request, path, kv_s, tokens_s)

    def _kv_s(self, candidate: Candidate) -> float:
        """Seconds until the slowest link has sent its queue and this candidate's KV; infinite without a link."""
        if not candidate.links:
            return float("inf")
        queues = ((self._links[link_id], self._bytes[link_id] + candidate.size) for link_id in candidate.links)
        return max(link.latency_s + queued / link.bytes_per_s for link, queued in queues)

    def _tokens_s(self, candidate: Candidate) -> float:
        """Seconds until the target has prefilled its queue and this candidate's tokens."""
        before_s = self._prefills[candidate.target].wait_s + self._seconds[candidate.target]
        return before_s + candidate.prefill_s + candidate.handover_s

    def _has_links(self, candidate: Candidate) -> bool:
        """True if the candidate's KV can be sent in this epoch."""
        links = candidate.links
        return bool(links) and all(self._bytes[link] <= 0 or self._is_within(link, candidate.size) for link in links)

    def _is_within(self, link: LinkId, more: Bytes) -> bool:
        """True if the link stays within its boundary with `more` bytes."""
        return self._bytes[link] + more <= self._links[link].boundary

    def _has_prefill(self, candidate: Candidate) -> bool:
        """True if the candidate's tokens can be prefilled in this epoch.

        A request that was queued has to be prefilled in any case: like an arrival, it needs no part of the boundary.
        Before step times are known, nothing shows how much of it a prefill needs.
        """
        if candidate.reason is Reason.ADMIT or not isfinite(candidate.prefill_s):
            return True
        queued_s, boundary_s = self._seconds[candidate.target], self._prefills[candidate.target].boundary_s
        return queued_s <= 0 or queued_s + candidate.prefill_s <= boundary_s

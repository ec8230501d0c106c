"""Choice of each move's path by the prices of both paths, and the accuracy of predictions.

`Estimates.choose` hands the prices to `choice.choose`, with the boundaries of the paper's section V: on a link, the
bytes that pass within `time_limit_s`; on a replica, prefills that take at most the share `slowdown` of an epoch from
the requests that decode there. There is one `Estimates` for the whole cluster, so no link and no target is booked
twice. Earlier moves that are still under way count in full, since no report gives their remainder.

All times are in seconds of the observations' clock.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed
from policies.model import Bytes, ReplicaId, RequestId, Tokens
from policies.paths.choice import Candidate, Choice, Link, LinkId, Prefill, choose, choose_alone
from policies.paths.prices import IDLE, HandOver, Prices, Profile, TargetWork
from policies.plan import Move, MoveReport, Path
from policies.prefix.copies import CopyReport

_MANY = Tokens(1 << 20)
"""Tokens enough for a mean of their bytes."""

_REMEMBERED = 1024
"""The number of newest predictions per path that are compared with actual durations."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The shares of links and replicas that moves may use: seconds of transfers per link, and a share of each epoch.

    `only` is a path that every move takes regardless of boundaries. Without `consensus` every source chooses by itself.
    """

    time_limit_s: float = 10.0
    slowdown: float = 0.2
    only: Path | None = None
    consensus: bool = True


@dataclass(frozen=True, slots=True)
class Errors:
    """The accuracy of the predictions for one path, over the newest `count` moves.

    `ratio` is the median of predicted / actual, `error` the median of |predicted - actual| / actual.
    """

    count: int
    ratio: float
    error: float


Present = Callable[[RequestId, ReplicaId], Tokens]
"""The first tokens of a request whose KV a replica has."""


def nothing_present(request: RequestId, replica: ReplicaId) -> Tokens:
    """Implements `Present`: no token."""
    return Tokens(0)


WorkOf = Callable[[ReplicaId, float], TargetWork]
"""The work of a replica at a time in seconds."""


def no_work(replica: ReplicaId, now: float) -> TargetWork:
    """Implements `WorkOf`: none."""
    return IDLE


class Estimates:
    """The prices of one pool and the path choices that follow from them. An epoch has `epoch_s` seconds."""

    def __init__(self, boundaries: Boundaries, epoch_s: float, prices: Prices | None = None) -> None:
        self._boundaries = boundaries
        self._epoch_s = epoch_s
        self._prices = prices or Prices()
        self._shared: dict[RequestId, tuple[Path, float]] = {}
        """By request, the path of its move and, by KV, the bytes that pass until its end, by tokens the seconds of the
        prefills until its end.
        """
        self._predicted: dict[Path, deque[tuple[float, float]]] = {path: deque(maxlen=_REMEMBERED) for path in Path}

    def follow(self, speed: ReplicaSpeed) -> None:
        """Price computation by these step times from now on."""
        self._prices.follow(speed)

    def profile(self, replica: ReplicaId, profile: Profile) -> None:
        """Store a replica's own measurements; the evidence from its transfers stays."""
        self._prices.profile(replica, profile)

    def keep(self, replicas: Collection[ReplicaId]) -> None:
        """Forget all other replicas, and their links."""
        self._prices.keep(replicas)

    def learn(self, report: MoveReport, now: float) -> None:
        """Learn from an ended move; from a successful one only once its first new token has been reported.

        A move that did not move the request is no evidence.
        """
        if report.moved is None or (report.moved and report.whole_s is None):
            return
        chosen, shared = self._shared.pop(report.request, (None, None))
        shared = shared if chosen is report.path else None
        if report.moved and report.tokens is not None:
            if report.path is Path.KV:
                self._prices.learn_kv(report, shared or 0.0, now)
            elif report.fell_back:
                self._prices.learn_given_up(report, now)
            else:
                self._prices.learn_tokens(report, shared, now)
        if report.predicted_s is not None and report.whole_s and not report.fell_back:
            self._predicted[report.path].append((report.predicted_s, report.whole_s))

    def forget(self, request: RequestId) -> None:
        """Drop the state of a request that has ended."""
        self._shared.pop(request, None)

    def keep_requests(self, requests: Collection[RequestId]) -> None:
        """Drop the state of all other requests."""
        self._shared = {request: shared for request, shared in self._shared.items() if request in requests}

    def errors(self, path: Path) -> Errors | None:
        """The accuracy of the predictions for a path; None before there were any."""
        pairs = self._predicted[path]
        if not pairs:
            return None
        ratio = median(predicted / actual for predicted, actual in pairs)
        return Errors(len(pairs), ratio, median(abs(predicted - actual) / actual for predicted, actual in pairs))

    def choose(
        self,
        moves: Sequence[Move],
        busy: Iterable[Move],
        now: float,
        without_kv: Set[RequestId] = frozenset(),
        present: Present = nothing_present,
        work_of: WorkOf = no_work,
    ) -> list[Choice]:
        """A path for every move, the most urgent first. `busy` are the moves under way, with their paths.

        KV is chosen only between replicas with the same cache in their profiles, and for no request `without_kv`. By
        either path, tokens that are `present` on the target cost nothing; `work_of` a target makes its prefills longer.
        """
        if self._boundaries.only is not None:
            return [Choice(move.request, self._boundaries.only, 0.0, 0.0) for move in moves]
        queue = _Queue()
        for move in busy:
            queue.add(self._candidate(move, present, work_of(move.target, now), now), move.path)
        work = {target: work_of(target, now) for target in dict.fromkeys(move.target for move in moves)}
        candidates = [
            self._candidate(move, present, work[move.target], now, move.request not in without_kv) for move in moves
        ]
        links = {link: self._link(each, queue.bytes.get(link, 0.0), now) for each in candidates for link in each.links}
        bound_s = self._boundaries.slowdown * self._epoch_s
        prefills = {
            target: Prefill(bound_s, queue.seconds.get(target, 0.0), found.wait_s) for target, found in work.items()
        }
        choices = (choose if self._boundaries.consensus else choose_alone)(candidates, links, prefills)
        self._remember({each.request: each for each in candidates}, choices)
        return choices

    @contextmanager
    def proposing(self) -> Iterator[None]:
        """Forget the choices made within the block: their moves do not begin."""
        shared = dict(self._shared)
        try:
            yield
        finally:
            self._shared = shared

    def exchange_kv(self, source: ReplicaId, target: ReplicaId) -> bool:
        """True if a move between the two replicas may go by KV, as far as their profiles are known."""
        return self._boundaries.only is not Path.TOKENS and self._prices.size(source, target, Tokens(1)) is not None

    def hand_over_s(
        self, move: Move, prefill_s: float, last: Tokens, busy: Iterable[Move], now: float, present: Present
    ) -> float:
        """Seconds from the first token of a request to the second one, which its move to another replica takes by KV.

        Blocks leave as the prefill of `prefill_s` seconds fills them: what takes longer counts, once more for each of
        the moves of the link under way, and at least the `last` tokens; then comes the hand-over. `present` is as in
        `choose`. Infinite without KV. One move at a time takes no time between nodes, or within one, while no transfer
        between such was measured.
        """
        candidate = self._candidate(move, present, IDLE, now)
        if not candidate.links:
            return float("inf")
        busy = [other for other in busy if other.path is Path.KV]
        if not busy and not self._prices.is_measured(move.source, move.target, now):
            return 0.0
        line = self._prices.link(move.source, move.target, now)
        before = sum((other.source, other.target) == (move.source, move.target) for other in busy)
        late_s = max(0.0, candidate.size * line.per_unit_s - prefill_s)
        last_bytes = candidate.size * min(1.0, last / candidate.tokens)
        sent_s = line.latency_s + max((before + 1) * late_s, last_bytes * line.per_unit_s)
        return sent_s + self._prices.handover_s(HandOver.KV, now)

    def decide(
        self,
        move: Move,
        busy: Iterable[Move],
        now: float,
        present: Present = nothing_present,
        work_of: WorkOf = no_work,
    ) -> Choice:
        """A path for a move that must not wait: the faster one if neither has room. The rest is as in `choose`."""
        [choice] = self.choose([move], busy, now, present=present, work_of=work_of)
        return choice if choice.path is not None else replace(choice, path=choice.faster)

    def copying(self, donor: ReplicaId, target: ReplicaId, now: float) -> Line | None:
        """Seconds over the tokens of a copy of KV.

        None if the two cannot exchange KV, if moves send tokens only, and before step times are known: the computation
        that a copy saves has no price then.
        """
        size = self._prices.size(donor, target, _MANY)
        if size is None or self._boundaries.only is Path.TOKENS or not self._prices.knows_steps:
            return None
        line = self._prices.link(donor, target, now)
        return Line(line.latency_s, line.per_unit_s * size / _MANY)

    def learn_copy(self, report: CopyReport, now: float) -> None:
        """Learn from an ended copy."""
        self._prices.learn_copy(report, now)

    def _candidate(self, move: Move, present: Present, work: TargetWork, now: float, has_kv: bool = True) -> Candidate:
        # The newest token has no KV yet: the target computes it in any case.
        lacking = Tokens(max(1, move.tokens - present(move.request, move.target)))
        size = self._prices.size(move.source, move.target, lacking) if has_kv else None
        links = () if size is None else (LinkId(f"{move.source}>{move.target}"),)
        prefill_s = self._prices.computed_s(lacking, work)
        handover_s = self._prices.handover_s(HandOver.of(Path.TOKENS, move.reason), now)
        return Candidate(
            move.request, move.source, move.target, move.reason, lacking, size or Bytes(0), prefill_s, links, handover_s
        )

    def _link(self, candidate: Candidate, queued: float, now: float) -> Link:
        line = self._prices.link(candidate.source, candidate.target, now)
        latency_s = line.latency_s + self._prices.handover_s(HandOver.KV, now)
        return Link(line.rate, line.rate * self._boundaries.time_limit_s, queued, latency_s)

    def _remember(self, candidates: Mapping[RequestId, Candidate], choices: Sequence[Choice]) -> None:
        """Note what passes on each move's path until the move ends, simultaneous moves included.

        Transfers share a link evenly: when one ends, each other has sent as many bytes, or all of its own. A replica
        prefills one request after the other, as predicted.
        """
        sent: dict[LinkId, list[Bytes]] = {}
        for choice in choices:
            candidate = candidates[choice.request]
            if choice.path is Path.TOKENS:
                self._shared[choice.request] = (choice.path, choice.tokens_s - candidate.handover_s)
            elif choice.path is Path.KV:
                sent.setdefault(candidate.links[0], []).append(candidate.size)
        for choice in choices:
            if choice.path is Path.KV:
                size, link = candidates[choice.request].size, candidates[choice.request].links[0]
                shared = sum(min(size, other) for other in sent[link])
                self._shared[choice.request] = (choice.path, shared)

    def to_json(self, now: float) -> dict[str, Any]:
        """The prices of links and hand-overs, and the accuracy of predictions."""
        found = {path: self.errors(path) for path in Path}
        errors = {path.value: asdict(error) if error else None for path, error in found.items()}
        return self._prices.to_json(now) | {"errors": errors}


class _Queue:
    """Bytes on links, and seconds of prefills at targets."""

    def __init__(self) -> None:
        self.bytes: dict[LinkId, float] = {}
        self.seconds: dict[ReplicaId, float] = {}

    def add(self, candidate: Candidate, path: Path | None) -> None:
        """Add a move to the queue of its path; a move that waits is in no queue."""
        if path is Path.TOKENS:
            self.seconds[candidate.target] = self.seconds.get(candidate.target, 0.0) + candidate.prefill_s
        elif path is Path.KV:
            for link in candidate.links:
                self.bytes[link] = self.bytes.get(link, 0.0) + candidate.size

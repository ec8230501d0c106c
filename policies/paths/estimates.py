"""Which path each move of an epoch is to take, by what is believed of links and replicas; and how good predictions are.

`Estimates.choose` hands the beliefs to `choice.choose`, with the boundaries of the paper's section V: on a link, the
bytes that pass within `time_limit_s`; on a replica, the tokens whose prefill takes at most the share `slowdown` of an
epoch from those that decode there. There is one `Estimates` for the whole cluster, so no link and no target is promised
twice.
What was ordered before and has not ended counts in full, since how much of it is left is not known.

All times are in seconds of the observations' clock.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from policies.model import Bytes, ReplicaId, RequestId
from policies.paths.beliefs import Beliefs, Priors, Profile
from policies.paths.choice import Candidate, Choice, Link, LinkId, Prefill, choose, choose_alone
from policies.plan import Move, MoveReport, Path

_REMEMBERED = 1024
"""Predictions of each path that are compared with what moves took."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """How much of its links and replicas a cluster spends on moves. An epoch has `epoch_s` seconds.

    `only` is a path that every move takes, whatever the boundaries. Without `consensus` every source chooses by itself.
    """

    epoch_s: float = 1.0
    time_limit_s: float = 10.0
    slowdown: float = 0.2
    only: Path | None = None
    consensus: bool = True


@dataclass(frozen=True, slots=True)
class Errors:
    """How predictions of one path compared with what it took, over the newest `count` moves.

    `ratio` is the median of predicted / actual, `error` the median of |predicted - actual| / actual.
    """

    count: int
    ratio: float
    error: float


class Estimates:
    """See the module."""

    def __init__(self, boundaries: Boundaries, priors: Priors | None = None) -> None:
        self._boundaries = boundaries
        self._beliefs = Beliefs(priors or Priors())
        self._shared: dict[RequestId, tuple[Path, float]] = {}
        self._predicted: dict[Path, deque[tuple[float, float]]] = {path: deque(maxlen=_REMEMBERED) for path in Path}

    def profile(self, replica: ReplicaId, profile: Profile) -> None:
        """Take what a replica has measured of itself. What its migrations have shown stays."""
        self._beliefs.profile(replica, profile)

    def keep(self, replicas: Collection[ReplicaId]) -> None:
        """Forget all other replicas, and their links."""
        self._beliefs.keep(replicas)

    def learn(self, report: MoveReport, now: float) -> None:
        """Learn from a move that has ended; a request that moved teaches something once it is known when it went on."""
        if report.moved is None or (report.moved and report.whole_s is None):
            return
        chosen, shared = self._shared.pop(report.request, (None, 0.0))
        self._beliefs.learn(report, shared if chosen is report.path else 0.0, now)
        if report.predicted_s is not None and report.whole_s and not report.fell_back:
            self._predicted[report.path].append((report.predicted_s, report.whole_s))

    def forget(self, request: RequestId) -> None:
        """The request is over."""
        self._shared.pop(request, None)

    def errors(self, path: Path) -> Errors | None:
        """How good the predictions for a path were; None before there were any."""
        pairs = self._predicted[path]
        if not pairs:
            return None
        ratio = median(predicted / actual for predicted, actual in pairs)
        return Errors(len(pairs), ratio, median(abs(predicted - actual) / actual for predicted, actual in pairs))

    def choose(
        self, moves: Sequence[Move], busy: Iterable[Move], now: float, without_kv: Set[RequestId] = frozenset()
    ) -> list[Choice]:
        """A path for every move, in the order of their urgency; `busy` are moves that are under way, with their paths.

        KV is chosen only between replicas whose profiles say that their caches are alike, and not `without_kv`.
        """
        if self._boundaries.only is not None:
            return [Choice(move.request, self._boundaries.only, 0.0, 0.0) for move in moves]
        queue = _Queue()
        for move in busy:
            queue.add(self._candidate(move), move.path)
        candidates = [self._candidate(move, move.request not in without_kv) for move in moves]
        links = {link: self._link(each, queue.bytes.get(link, 0.0), now) for each in candidates for link in each.links}
        targets = dict.fromkeys(each.target for each in candidates)
        prefills = {target: self._prefill(target, queue.tokens.get(target, 0.0), now) for target in targets}
        choices = (choose if self._boundaries.consensus else choose_alone)(candidates, links, prefills)
        self._remember({each.request: each for each in candidates}, choices)
        return choices

    def decide(self, move: Move, busy: Iterable[Move], now: float) -> Choice:
        """A path for a move that is not to wait: where there is no room, the one that is sooner over."""
        [choice] = self.choose([move], busy, now)
        return choice if choice.path is not None else replace(choice, path=choice.sooner)

    def _candidate(self, move: Move, has_kv: bool = True) -> Candidate:
        size = self._beliefs.size(move.source, move.target, move.tokens) if has_kv else None
        links = () if size is None else (LinkId(f"{move.source}>{move.target}"),)
        return Candidate(move.request, move.source, move.target, move.reason, move.tokens, size or Bytes(0), links)

    def _link(self, candidate: Candidate, queued: float, now: float) -> Link:
        line = self._beliefs.link(candidate.source, candidate.target, now)
        return Link(line.rate, line.rate * self._boundaries.time_limit_s, queued, line.latency_s)

    def _prefill(self, target: ReplicaId, queued: float, now: float) -> Prefill:
        line = self._beliefs.prefill(target, now)
        seconds = self._boundaries.slowdown * self._boundaries.epoch_s
        return Prefill(line.rate, line.rate * seconds, queued, line.latency_s)

    def _remember(self, candidates: Mapping[RequestId, Candidate], choices: Sequence[Choice]) -> None:
        """What has to pass until each move is over, with those that begin at the same time.

        Transfers share a link evenly: when one is over, each other has sent as much, or all of its own. A replica
        prefills one request after the other.
        """
        queue = _Queue()
        sent: dict[LinkId, list[Bytes]] = {}
        for choice in choices:
            candidate = candidates[choice.request]
            queue.add(candidate, choice.path)
            if choice.path is Path.TOKENS:
                self._shared[choice.request] = (choice.path, queue.tokens[candidate.target])
            elif choice.path is Path.KV:
                sent.setdefault(candidate.links[0], []).append(candidate.size)
        for choice in choices:
            if choice.path is Path.KV:
                size, link = candidates[choice.request].size, candidates[choice.request].links[0]
                shared = sum(min(size, other) for other in sent[link])
                self._shared[choice.request] = (choice.path, shared)

    def to_json(self, now: float) -> dict[str, Any]:
        """What is believed, on how many observations, and how good predictions were."""
        found = {path: self.errors(path) for path in Path}
        errors = {path.value: asdict(error) if error else None for path, error in found.items()}
        return self._beliefs.to_json(now) | {"errors": errors}


class _Queue:
    """Bytes on links and tokens at targets."""

    def __init__(self) -> None:
        self.bytes: dict[LinkId, float] = {}
        self.tokens: dict[ReplicaId, float] = {}

    def add(self, candidate: Candidate, path: Path | None) -> None:
        """Put a move where its path leads; one that waits leads nowhere."""
        if path is Path.TOKENS:
            self.tokens[candidate.target] = self.tokens.get(candidate.target, 0.0) + candidate.tokens
        elif path is Path.KV:
            for link in candidate.links:
                self.bytes[link] = self.bytes.get(link, 0.0) + candidate.size

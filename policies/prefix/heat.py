"""How often prompts begin with each prefix: the rates by which prefixes are copied before anybody asks for them.

A radix tree of the placed prompts: a node is a run of blocks that all prompts through it have in common, under the name
of its first block. Names are chained, so two runs with the same name at one place are equal up to there.

A node's rate is that of the prompts through it, averaged with exponential decay over the last `WINDOW_S` seconds. No
node has a higher rate than the nodes before it. Nodes that no prompt has used for the longest time are dropped first,
the last ones of a prompt before those in front of them.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import exp

WINDOW_S = 300.0
"""The time constant of rates, in seconds: about as long as a conversation rests between two turns."""
KEPT_NAMES = 1 << 19
"""The most names of all nodes together: 4 MiB."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """The names of a prefix, the number of those before its last run, and the prompts per second that begin with it."""

    names: Sequence[int]
    before: int
    rate: float


@dataclass(slots=True, eq=False)
class _Node:
    """A run of names behind those of `parent`. `uses` is a number of prompts that decays from the time `at` on."""

    names: "array[int]"
    parent: "_Node | None"
    uses: float
    at: float


class PrefixHeat:
    """The tree of one pool. Times are in seconds of the caller's clock; at most `kept` names are remembered."""

    def __init__(self, kept: int = KEPT_NAMES) -> None:
        self._kept = kept
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        """By the name of the first block. A node comes before all nodes on its way from the root."""
        self._size = 0
        self._seen = self._again = 0.0
        self._at = 0.0

    @property
    def reuse(self) -> float:
        """The share of the prompts' blocks that earlier prompts had, by the same decay; 0 without prompts."""
        return self._again / self._seen if self._seen else 0.0

    def add(self, names: Sequence[int], now: float) -> None:
        """Count a prompt with these names."""
        if not names:
            return
        path, at = self._follow(names)
        self._count(at, len(names), now)
        if at < len(names):
            node = _Node(array("Q", names[at:]), path[-1] if path else None, 0.0, now)
            self._nodes[names[at]] = node
            self._size += len(node.names)
            path.append(node)
        for node in reversed(path):
            node.uses = _decayed(node.uses, now - node.at) + 1.0
            node.at = now
            self._nodes.move_to_end(node.names[0])
        while self._size > self._kept:
            _, dropped = self._nodes.popitem(last=False)
            self._size -= len(dropped.names)

    def ranking(self, now: float) -> "Ranking":
        """All runs by their rates."""
        runs = ((_decayed(node.uses, now - node.at) / WINDOW_S, len(node.names), node) for node in self._nodes.values())
        return Ranking(sorted(runs, key=lambda run: -run[0]))

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the tree is in order."""
        assert self._size == sum(len(node.names) for node in self._nodes.values()) <= self._kept
        for name, node in self._nodes.items():
            assert node.names[0] == name
            if (before := node.parent) is not None:
                assert self._nodes[before.names[0]] is before, "a node outlives the one before it"
                assert _decayed(before.uses, node.at - before.at) >= node.uses * (1 - 1e-9)

    def _follow(self, names: Sequence[int]) -> tuple[list[_Node], int]:
        """The nodes that a prompt goes through, and the number of their names. A node that it leaves is split."""
        path: list[_Node] = []
        at = 0
        while at < len(names) and (node := self._nodes.get(names[at])) is not None:
            common = _common(node.names, names[at : at + len(node.names)])
            if common < len(node.names):
                node = self._split(node, common)
            path.append(node)
            at += common
        return path, at

    def _split(self, node: _Node, count: int) -> _Node:
        """Divide a node behind its first `count` names; the node in front."""
        front = _Node(node.names[:count], node.parent, node.uses, node.at)
        node.names, node.parent = node.names[count:], front
        self._nodes[node.names[0]] = node
        self._nodes[front.names[0]] = front
        self._nodes.move_to_end(front.names[0])
        return front

    def _count(self, again: int, seen: int, now: float) -> None:
        self._seen = _decayed(self._seen, now - self._at) + seen
        self._again = _decayed(self._again, now - self._at) + again
        self._at = now


@dataclass(frozen=True, slots=True)
class Ranking:
    """Runs with their rates and numbers of blocks, the hottest first. A replica is given by the names that it has."""

    _runs: Sequence[tuple[float, int, _Node]]

    def hottest(self, count: int, names: Container[int]) -> list[HotPrefix]:
        """The hottest prefixes with a run of which `names` has the beginning; a prefix before longer ones."""
        here = islice((run for run in self._runs if run[2].names[0] in names), count)
        prefixes = [HotPrefix(*_whole(node), rate) for rate, _, node in here]
        return sorted(prefixes, key=lambda prefix: (-prefix.rate, len(prefix.names)))

    def needed(self, names: Container[int]) -> Callable[[float], int]:
        """The number of blocks, by rate, of the runs with at least that rate of which `names` has the beginning."""
        here = [(rate, count) for rate, count, node in self._runs if node.names[0] in names]
        rates, totals = [-rate for rate, _ in here], list(accumulate((count for _, count in here), initial=0))
        return lambda rate: totals[bisect_right(rates, -rate)]


def _decayed(uses: float, seconds: float) -> float:
    return uses * exp(-seconds / WINDOW_S)


def _common(run: Sequence[int], names: Sequence[int]) -> int:
    """The number of equal names at the beginning: chained names that differ once differ from there on."""
    return bisect_left(range(len(names)), True, key=lambda at: run[at] != names[at])


def _whole(node: _Node) -> tuple[Sequence[int], int]:
    """All names up to the end of a node, and the number of those before its own."""
    runs = [node.names]
    before = node.parent
    while before is not None:
        runs.append(before.names)
        before = before.parent
    names = array("Q")
    for run in reversed(runs):
        names.extend(run)
    return tuple(names), len(names) - len(node.names)

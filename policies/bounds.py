"""Lower bound and full repack: the numbers of replicas to measure policies against.

Both use request sizes only and ignore the requests' current replicas, as if moves cost nothing.

Where requests share blocks, two bounds hold, and the larger one is taken (`least_bins`). One is L2 over what each
request has for itself, since these tokens are beside their request. The other takes any requests whose prompts begin
with the same P tokens, and the D distinct tokens that they have behind these. Each of them is on at least one replica,
with one of its requests, and so with the P tokens: that replica has room for C - P of them at most. So the requests
need D / (C - P) replicas, rounded up. Such requests are those below a node of the tree of prompts; at its root, P is 0
and D are the distinct tokens of all. Bounds of several nodes do not add up: a replica may have requests of each.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, Protocol

from policies.cluster.cluster import Cluster
from policies.prefix.sharing import ActivePrompt, ActivePrompts


class Sized(Protocol):
    """A request with its size in tokens, and the prompt of which others may have a part."""

    @property
    def tokens(self) -> int:
        """The tokens of its KV."""
        ...

    @property
    def prompt(self) -> ActivePrompt | None:
        """The blocks that it may share; None: none."""
        ...


def martello_toth_l2(sizes: Iterable[int], capacity: int) -> int:
    """The lower bound L2 on the number of bins (S. Martello and P. Toth, Discrete Applied Mathematics 28, 1990).

    For a threshold 0 <= k <= C/2, sizes above C/2 need a bin each. Of these, J1 are above C - k, so that nothing of
    size k or more joins them; J2 are the others. J3 are the sizes in [k, C/2]; those that exceed the room left in the
    bins of J2 need more bins:

        L(k) = |J1| + |J2| + max(0, ceil((sum J3 - (|J2| C - sum J2)) / C)),  L2 = max over k of L(k)

    L(0) is at least the total divided by C. A larger k raises L only if it shifts a size w from J2 to J1, and the
    smallest such k is best, as it leaves most in J3: so k = C - w + 1 for every w above C/2, and 0, are enough.

    O(n log n). Raises `ValueError` for a size that is not in 1..capacity.
    """
    ordered = _ordered(sizes, capacity)
    sums = [0, *accumulate(ordered)]
    half = bisect_right(ordered, capacity // 2)
    large = len(ordered) - half
    best = large + max(0, _ceil_div(sums[-1] - large * capacity, capacity))
    for first in range(half, len(ordered)):  # the sizes from `first` on are J1
        left = (first - half) * capacity - (sums[first] - sums[half])
        smallest = bisect_left(ordered, capacity - ordered[first] + 1, 0, half)
        best = max(best, large + _ceil_div(sums[half] - sums[smallest] - left, capacity))
    return best


def least_bins(sized: Collection[Sized], capacity: int, prompts: ActivePrompts | None) -> int:
    """A lower bound on the number of bins, where bins have the common blocks of their requests once.

    Without `prompts` it is L2. Raises `ValueError` for a size that is not in 1..capacity.
    """
    if prompts is None:
        return martello_toth_l2((each.tokens for each in sized), capacity)
    own = (prompts.own(each.tokens, each.prompt) for each in sized)
    begun = (
        _ceil_div(behind, capacity - common)
        for common, behind in _common_beginnings(sized, prompts)
        if common < capacity
    )
    return max(martello_toth_l2(own, capacity), *begun)


class HeldRequest(NamedTuple):
    """Implements `Sized` for a request that has KV blocks."""

    tokens: int
    prompt: ActivePrompt | None


def least_replicas(cluster: Cluster) -> int | None:
    """The fewest replicas that could hold the KV caches of a cluster's requests; None where these share no blocks.

    The replicas have the largest capacity, that of a new one or the present one of any other. A request that exceeds
    it counts as a whole replica.
    """
    if not cluster.prompts.block_tokens:
        return None
    capacity = max((cluster.capacity, *(replica.capacity for replica in cluster.replicas.values())))
    held = [
        HeldRequest(request.tokens, request.prompt) if request.tokens <= capacity else HeldRequest(capacity, None)
        for request in cluster.requests.values()
        if request.replica is not None and request.tokens > 0
    ]
    return least_bins(held, capacity, cluster.prompts) if held and capacity else 0


def _common_beginnings(sized: Iterable[Sized], prompts: ActivePrompts) -> Iterator[tuple[int, int]]:
    """The length of each common beginning of prompts, the empty one included, and the distinct tokens behind it.

    Linear in the nodes of the tree, but for their sorting.
    """
    behind: dict[ActivePrompt | None, int] = {None: 0}
    for each in sized:
        behind[each.prompt] = behind.get(each.prompt, 0) + each.tokens - _length(each.prompt, prompts)
        node = each.prompt
        while node is not None and (above := _above(node)) not in behind:
            behind[above] = 0
            node = above
    nodes = sorted((node for node in behind if node is not None), key=attrgetter("blocks"), reverse=True)
    for node in nodes:
        above = _above(node)
        behind[above] += behind[node] + _length(node, prompts) - _length(above, prompts)
    return ((_length(node, prompts), tokens) for node, tokens in behind.items())


def _above(node: ActivePrompt) -> ActivePrompt | None:
    """The node before it on its prompt; None for the empty beginning."""
    return node.parent if node.parent is not None and node.parent.parent is not None else None


def _length(node: ActivePrompt | None, prompts: ActivePrompts) -> int:
    """The tokens of a common beginning."""
    return 0 if node is None else node.blocks * prompts.block_tokens


def best_fit_decreasing(sizes: Iterable[int], capacity: int) -> int:
    """The number of bins after a repack: the largest size first, each into the fullest bin that has room.

    O(n log n) comparisons. Raises `ValueError` for a size that is not in 1..capacity.
    """
    rooms: list[int] = []  # of bins that are not full, ascending
    bins = 0
    for size in reversed(_ordered(sizes, capacity)):
        index = bisect_left(rooms, size)
        if index < len(rooms):
            room = rooms.pop(index)
        else:
            room = capacity
            bins += 1
        if room > size:
            insort(rooms, room - size)
    return bins


def _ceil_div(amount: int, by: int) -> int:
    return -(-amount // by)


def _ordered(sizes: Iterable[int], capacity: int) -> list[int]:
    ordered = sorted(sizes)
    if ordered and not 0 < ordered[0] <= ordered[-1] <= capacity:
        raise ValueError(f"sizes must be in 1..{capacity}, not {ordered[0] if ordered[0] < 1 else ordered[-1]}")
    return ordered

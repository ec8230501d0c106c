"""Hit rates that no placement of the same prompts can exceed by much: of one cache for all, unlimited or of equal size.

Both see the requests in the order of their arrival, each answered at once, and need no memory for running requests.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.model import RequestId
from simulator.workload.workload import Job


@dataclass(frozen=True, slots=True)
class HitRates:
    """The shares of prompt tokens that one cache for all has: without limit, and with the memory of all replicas.

    `pooled` is None for any number of replicas.
    """

    unlimited: float
    pooled: float | None


def oracles(jobs: Sequence[Job], block_tokens: int, capacity: int | None) -> HitRates:
    """The hit rates of one cache; `capacity` is the memory of all replicas together, in tokens."""
    ordered = _by_arrival(jobs)
    pooled = None if capacity is None else _hit_rate(ordered, block_tokens, capacity // block_tokens)
    return HitRates(_hit_rate(ordered, block_tokens, None), pooled)


def _by_arrival(jobs: Iterable[Job]) -> Sequence[Job]:
    """The requests in the order of their arrival, if every answer takes no time."""
    due_s: dict[RequestId, float] = {}
    for job in jobs:
        earliest_s = 0.0 if job.after is None else due_s[job.after] + job.think_s
        due_s[job.id] = max(job.arrival_s, earliest_s)
    return sorted(jobs, key=lambda job: due_s[job.id])


def _hit_rate(jobs: Iterable[Job], block_tokens: int, blocks: int | None) -> float:
    """The hit rate of a cache that drops the least recently used of more than `blocks` blocks, of a prompt the last."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = tokens = 0
    for job in jobs:
        tokens += job.prompt
        usable = job.names[: (job.prompt - 1) // block_tokens]
        hits += next((i for i, name in enumerate(usable) if name not in cache), len(usable)) * block_tokens
        for name in reversed(job.context):
            cache[name] = None
            cache.move_to_end(name)
        while blocks is not None and len(cache) > blocks:
            cache.popitem(last=False)
    return hits / tokens if tokens else 0.0

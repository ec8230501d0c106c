"""Copies of prefixes that no request waits for: which ones, from a pool's memory. Nothing here changes the memory."""

from collections.abc import Callable

from policies.decision.memory import PoolMemory
from policies.model import ReplicaId, Tokens
from policies.prefix.copies import MOST_PREFIXES, CopyTarget, PrefixCopy, evacuate
from policies.prefix.heat import WINDOW_S, Ranking
from policies.prefix.routing import Router


def evacuation(memory: PoolMemory, donor: ReplicaId, now: float) -> tuple[PrefixCopy, ...]:
    """The copies of a replica's prefixes to those that stay, to make before it stops; empty without copies.

    Only prefixes in the memory of its KV cache count, and only replicas that run, of the same version of the model.
    """
    router = memory.router
    status = memory.statuses.get(donor)
    if not router.copies or status is None or not router.block_tokens:
        return ()
    tree, ranking = router.tree, router.heat.ranking(now)
    prefixes = ranking.hottest(MOST_PREFIXES, tree.names(donor))
    return evacuate(
        donor,
        [(prefix, tree.match(prefix.names, promised=False)) for prefix in prefixes],
        _targets(memory, donor, ranking, now),
        router.block_tokens,
        router.speed.prefill_s,
        router.heat.reuse,
        WINDOW_S,
    )


def _targets(memory: PoolMemory, donor: ReplicaId, ranking: Ranking, now: float) -> list[CopyTarget]:
    """The replicas that may get copies from `donor` now."""
    found, model = [], memory.statuses[donor].model
    for replica in memory.cluster.running():
        status = memory.statuses.get(replica.id)
        if replica.id == donor or status is None or status.model != model or replica.free <= 0:
            continue
        if (line := memory.idle_link(donor, replica.id, now)) is not None:
            needed = _needed(memory.router, replica.id, ranking)
            found.append(CopyTarget(replica.id, replica.capacity, Tokens(replica.free), line, needed))
    return found


def _needed(router: Router, replica: ReplicaId, ranking: Ranking) -> Callable[[float], Tokens]:
    """See `CopyTarget.needed`."""
    blocks = ranking.needed(router.tree.names(replica))
    return lambda rate: Tokens(blocks(rate) * router.block_tokens)

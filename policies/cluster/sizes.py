"""A request's size on each replica, where the blocks that it shares with the requests there count once.

`Cluster.prompts` (`policies.prefix.sharing`) has the blocks that requests share.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.model import ReplicaId
from policies.prefix.sharing import ActivePrompt


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a request of `tokens` tokens. With a `prompt`, it needs none for the blocks of `block_tokens` tokens
    of its prompt that other requests of a replica use. The request itself uses those of the replicas in `own`.

    It follows the prompts of running requests, so it is for use before the cluster's next change.
    """

    tokens: int
    prompt: ActivePrompt | None = None
    block_tokens: int = 0
    own: tuple[ReplicaId, ...] = ()

    def on(self, replica: Replica) -> int:
        """The tokens that a replica needs for it."""
        if self.prompt is None:
            return self.tokens
        return self.tokens - self.prompt.shared(replica.id, self.own.count(replica.id)) * self.block_tokens

    def plus(self, tokens: int) -> "Size":
        """The size of a request that is larger by some tokens of its own."""
        return Size(self.tokens + tokens, self.prompt, self.block_tokens, self.own)

    def groups(self) -> Iterator[tuple[int, Collection[ReplicaId]]]:
        """A number of tokens and the replicas that share these or more, those first that share most.

        A replica is in a group again if it shares more, and its own ones in any case.
        """
        if self.prompt is None:
            return
        known = len(set(self.own))
        for node in self.prompt.upwards():
            if len(node.users) > known:
                known = len(node.users)
                yield node.blocks * self.block_tokens, node.users


def size_of(cluster: Cluster, request: Request) -> Size:
    """The request's size on every replica: on its own one, that which its departure frees.

    Its blocks on a replica that it is leaving are no reason to go back there.
    """
    if request.prompt is None:
        return Size(request.tokens)
    own = tuple(replica.id for replica in request.places)
    return Size(request.tokens, request.prompt, cluster.prompts.block_tokens, own)


def size_on(cluster: Cluster, request: Request, replica: Replica) -> int:
    """The tokens that the request adds to a replica, or has added to its own: see `size_of`."""
    return request.tokens if request.prompt is None else size_of(cluster, request).on(replica)


def distinct_tokens(cluster: Cluster, requests: Iterable[Request]) -> int:
    """The distinct tokens of requests, if all of them were on one replica."""
    if not cluster.prompts.block_tokens:
        return sum(request.tokens for request in requests)
    return cluster.prompts.distinct((request.tokens, request.prompt) for request in requests)


def choose(replicas: Iterable[Replica], size: Size, widest: bool) -> Replica | None:
    """The best or, with `widest`, the worst fit for a size, among replicas with room for it.

    The best fit shares most, of equals it has the least room; the worst fit is left with the most room.
    """
    if widest:
        return max(replicas, key=lambda r: (r.room - size.on(r), r.order), default=None)
    return min(replicas, key=lambda r: (size.on(r), r.room, r.order), default=None)

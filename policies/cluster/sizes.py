"""A request's size on each replica, where the blocks that it shares with the requests there count once."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from policies.cluster.replica import Replica
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


def choose(replicas: Iterable[Replica], size: Size, widest: bool) -> Replica | None:
    """The best or, with `widest`, the worst fit for a size, among replicas with room for it.

    The best fit shares most, of equals it has the least room; the worst fit is left with the most room.
    """
    if widest:
        return max(replicas, key=lambda r: (r.room - size.on(r), r.order), default=None)
    return min(replicas, key=lambda r: (size.on(r), r.room, r.order), default=None)

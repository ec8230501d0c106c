"""Marginal sizes: what a request adds to a replica whose running requests have the beginning of its prompt.

Requests whose prompts begin alike use the same KV blocks of a replica, as long as both run there. So a request of n
tokens, the first s of which others on the replica have, adds n - s tokens when it comes, and frees n - s when it
leaves. A block stays as long as one request uses it. In any order of arrivals, the sizes so defined add up to the
distinct tokens of the replica's requests.

The prompts of a pool's requests are a tree. A node stands for a run of blocks that the same prompts have, `users` for
the requests on each replica whose prompts go through it. So a request that shares nothing with others costs one look at
one node, however long its prompt is, and one that shares costs a look at every branch of its prompt.

    common instructions, 90 blocks ----- document A, 60 blocks --- a question about A
                                     |                         '-- another one
                                     '-- document B, 70 blocks

Names are those of full blocks (`policies.prefix.names`): equal names stand for equal contexts up to the end of a block.
An engine computes the last token of every prompt itself, so a block that ends with this token is never shared.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from policies.model import ReplicaId
from policies.prefix.names import in_common


@dataclass(slots=True, eq=False)
class ActivePrompt:
    """The node at the end of a prompt. Compared by identity.

    `names` are the blocks since the `parent`'s last one, `blocks` the number of all blocks up to here, `requests` the
    number of requests whose prompts go through here, `ends` that of those whose prompts end here.
    """

    names: tuple[int, ...]
    blocks: int
    parent: "ActivePrompt | None"
    children: dict[int, "ActivePrompt"] = field(default_factory=dict)
    requests: int = 0
    ends: int = 0
    users: dict[ReplicaId, int] = field(default_factory=dict)

    def upwards(self) -> "Iterator[ActivePrompt]":
        """The nodes of the prompt, the last one first, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def shared(self, replica: ReplicaId, own: int = 0) -> int:
        """The number of the prompt's blocks that requests on a replica use; `own` uses are those of this prompt's."""
        node = self
        while node.parent is not None:
            if node.users.get(replica, 0) > own:
                return node.blocks
            node = node.parent
        return 0

    @property
    def is_shared(self) -> bool:
        """True if other requests of the pool have the prompt's first block."""
        return any(node.requests > 1 for node in self.upwards())


class ActivePrompts:
    """The prompts of a pool's requests, in blocks of `block_tokens` tokens; 0: requests share no blocks.

    `begin` and `end` frame the life of a request, `enter` and `leave` its use of a replica's blocks. A request may use
    the blocks of two replicas, and twice those of one. All four are inner loops of an epoch, so they go up the tree by
    themselves.
    """

    def __init__(self, block_tokens: int = 0) -> None:
        self.block_tokens = block_tokens
        self._root = ActivePrompt((), 0, None)
        self._saved: dict[ReplicaId, int] = {}

    # --- requests -------------------------------------------------------------------------------------

    def find(self, names: Sequence[int], tokens: int) -> ActivePrompt | None:
        """The node of a prompt of `tokens` tokens, for queries; None without a block that may be shared.

        No request begins. The node need not be in the tree, and has to be used before the tree's next change.
        """
        return self._find(names, tokens, _upper)

    def begin(self, names: Sequence[int], tokens: int) -> ActivePrompt | None:
        """A request with a prompt of `tokens` tokens begins. Returns its node; None without blocks to share."""
        prompt = self._find(names, tokens, _split)
        if prompt is None:
            return None
        assert prompt.parent is not None, "the root is no prompt"
        prompt.parent.children[prompt.names[0]] = prompt
        prompt.ends += 1
        node = prompt
        while node.parent is not None:
            node.requests += 1
            node = node.parent
        return prompt

    def end(self, prompt: ActivePrompt) -> None:
        """A request with this prompt ends, which uses no replica any more."""
        prompt.ends -= 1
        node = prompt
        while (parent := node.parent) is not None:
            node.requests -= 1
            if not node.ends and len(node.children) < 2:
                self._remove(node, parent)
            node = parent

    # --- replicas -------------------------------------------------------------------------------------

    def enter(self, prompt: ActivePrompt, replica: ReplicaId) -> int:
        """A request uses the prompt's blocks on a replica. Returns the tokens of those that others there have."""
        shared, node = 0, prompt
        while node.parent is not None:
            count = node.users.get(replica, 0)
            if count and not shared:
                shared = node.blocks * self.block_tokens
            node.users[replica] = count + 1
            node = node.parent
        self._save(replica, shared)
        return shared

    def leave(self, prompt: ActivePrompt, replica: ReplicaId) -> int:
        """A request leaves the prompt's blocks on a replica. Returns the tokens of those that others there have."""
        shared, node = 0, prompt
        while node.parent is not None:
            count = node.users[replica] - 1
            if count:
                shared = shared or node.blocks * self.block_tokens
                node.users[replica] = count
            else:
                del node.users[replica]
            node = node.parent
        self._save(replica, -shared)
        return shared

    def saved(self, replica: ReplicaId) -> int:
        """The tokens by which the sizes of a replica's requests exceed its distinct tokens."""
        return self._saved.get(replica, 0)

    def distinct(self, requests: Iterable[tuple[int, ActivePrompt | None]]) -> int:
        """The distinct tokens of requests, given by their tokens and prompts, if all of them were on one replica."""
        seen: set[ActivePrompt] = set()
        total = 0
        for tokens, prompt in requests:
            total += tokens
            if prompt is not None:
                common = next((node for node in prompt.upwards() if node in seen), None)
                total -= common.blocks * self.block_tokens if common is not None else 0
                seen.update(prompt.upwards())
        return total

    def own(self, tokens: int, prompt: ActivePrompt | None) -> int:
        """The tokens of a request that no other request of the pool has."""
        if prompt is None:
            return tokens
        common = next((node for node in prompt.upwards() if node.requests > 1), None)
        return tokens - (common.blocks * self.block_tokens if common is not None else 0)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless all counts add up, and no node could be left out."""
        for node in self._nodes():
            children = node.children.values()
            assert node.requests == node.ends + sum(child.requests for child in children) > 0, "requests"
            assert node.ends or len(children) > 1, "a node that nobody needs"
            assert node.parent is not None, "parents"
            assert node.blocks == node.parent.blocks + len(node.names), "blocks"
            assert all(name == child.names[0] and child.parent is node for name, child in node.children.items())
            for replica in {replica for child in children for replica in child.users}:
                assert node.users.get(replica, 0) >= sum(child.users.get(replica, 0) for child in children), "users"

    # --- inside ---------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[ActivePrompt]:
        left = list(self._root.children.values())
        while left:
            node = left.pop()
            yield node
            left += node.children.values()

    def _save(self, replica: ReplicaId, tokens: int) -> None:
        if tokens:
            self._saved[replica] = self._saved.get(replica, 0) + tokens
            if not self._saved[replica]:
                del self._saved[replica]

    def _find(
        self, names: Sequence[int], tokens: int, cut: Callable[[ActivePrompt, int], ActivePrompt]
    ) -> ActivePrompt | None:
        """The node of a prompt. `cut` returns the upper part of a node after whose first names the prompt goes on."""
        if not (names and self.block_tokens):
            return None
        usable = tuple(names[: max(0, tokens - 1) // self.block_tokens])
        node, done = self._root, 0
        while done < len(usable) and (child := node.children.get(usable[done])) is not None:
            common = in_common(child.names, usable[done : done + len(child.names)])
            node = child if common == len(child.names) else cut(child, common)
            done += common
        if done < len(usable):
            return ActivePrompt(usable[done:], len(usable), node)
        return node if usable else None

    def _remove(self, node: ActivePrompt, parent: ActivePrompt) -> None:
        """Remove a node at which no prompt ends or parts: one without requests, or one to join with that below it."""
        if not node.requests:
            del parent.children[node.names[0]]
        else:
            (child,) = node.children.values()
            child.names, child.parent = (*node.names, *child.names), parent
            parent.children[child.names[0]] = child


def _upper(node: ActivePrompt, at: int) -> ActivePrompt:
    """The part of a node before its name number `at`, as a node that is not in the tree."""
    blocks = node.blocks - len(node.names) + at
    return ActivePrompt(node.names[:at], blocks, node.parent, {}, node.requests, users=dict(node.users))


def _split(node: ActivePrompt, at: int) -> ActivePrompt:
    """Cut a node before its name number `at`. Returns the upper part; the lower one keeps its identity."""
    upper = _upper(node, at)
    assert node.parent is not None, "the root has no names"
    node.parent.children[upper.names[0]] = upper
    upper.children[node.names[at]] = node
    node.names, node.parent = node.names[at:], upper
    return upper

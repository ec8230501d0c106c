"""The prefix cache of one simulated replica: the blocks of prompts, in use or left over, as in vLLM's block pool.

    in use     computed for, or found by, a request that runs; its memory is a part of the request's
    left over  in memory that nothing else needs: the least recently used is dropped first, of a prompt the last one

Blocks have names only (`Job.context`): a cache without content. Without a session, the blocks of a request's output
have none, and are not found again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.model import RequestId
from policies.prefix.change import CacheChange, NetChanges, Tier
from policies.prefix.evacuation import CachedContext

_REMEMBERED = 4096
"""The most contexts of ended requests that are remembered."""


@dataclass(slots=True)
class _Use:
    """The names of a request's blocks, and how many of these are in the cache because of it."""

    names: Sequence[int]
    held: int = 0


@dataclass(slots=True)
class SimulatedCache:
    """Blocks of `block_tokens` tokens. The caller keeps the memory: see `trim`."""

    block_tokens: int
    users: dict[int, int] = field(default_factory=dict)
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _contexts: OrderedDict[int, tuple[Sequence[int], float]] = field(default_factory=OrderedDict)
    """The names of contexts and the times of their last uses, by their last names; the newest one is the last."""
    shared: int = 0
    _uses: dict[RequestId, _Use] = field(default_factory=dict)
    _changed: NetChanges = field(default_factory=NetChanges)
    _reported: bool = False

    @property
    def shared_tokens(self) -> int:
        """The tokens by which the sizes of the running requests exceed their memory, since they share blocks."""
        return self.shared * self.block_tokens

    def claim(self, request: RequestId, names: Sequence[int], tokens: int, computed: int = 0) -> int:
        """Use the first blocks of a context that are there, and return the tokens that need no computation.

        `names` are those of all blocks that the request will fill. The last of its `tokens` tokens is always computed.
        If `computed` ones are already, their blocks are added, and no others are looked for. Blocks are kept until
        `release`; another call may find more.
        """
        use = self._uses.setdefault(request, _Use(names))
        if computed > use.held * self.block_tokens:
            self.fill(request, computed)
            return computed
        last = min(len(names), (tokens - 1) // self.block_tokens)
        while use.held < last and self._has(names[use.held]):
            self._use(names[use.held])
            use.held += 1
        return use.held * self.block_tokens

    def active(self, names: Sequence[int]) -> int:
        """The tokens of the first blocks that running requests use."""
        return (
            next((index for index, name in enumerate(names) if name not in self.users), len(names)) * self.block_tokens
        )

    def leading(self, names: Sequence[int]) -> int:
        """The number of names up to the first one that is missing."""
        return next((index for index, name in enumerate(names) if not self._has(name)), len(names))

    def fill(self, request: RequestId, tokens: int) -> None:
        """Add the blocks of a request's first `tokens` tokens, which are computed or have arrived."""
        use = self._uses[request]
        for name in use.names[use.held : tokens // self.block_tokens]:
            if not self._has(name):
                self._changed.toggle(name)
            self._use(name)
            use.held += 1

    def take_in(self, names: Sequence[int]) -> None:
        """Add blocks that have been copied here, and that nobody uses yet. The last of them is dropped first."""
        for name in reversed(names):
            if not self._has(name):
                self._changed.toggle(name)
                self.idle[name] = None

    def remember(self, names: Sequence[int], now: float) -> None:
        """Remember the context of a request that has ended."""
        if names:
            self._contexts[names[-1]] = names, now
            self._contexts.move_to_end(names[-1])
            while len(self._contexts) > _REMEMBERED:
                self._contexts.popitem(last=False)

    def contexts(self, now: float) -> list[CachedContext]:
        """The remembered contexts of which a block is there, the newest first; the others are forgotten."""
        found: list[CachedContext] = []
        for last, (names, at) in reversed(list(self._contexts.items())):
            if held := self.leading(names):
                found.append(CachedContext(len(found), names[:held], now - at, held))
            else:
                del self._contexts[last]
        return found

    def release(self, request: RequestId) -> None:
        """Leave a request's blocks over, if it uses any."""
        use = self._uses.pop(request, None)
        if use is None:
            return
        for name in reversed(use.names[: use.held]):
            self.users[name] -= 1
            if self.users[name]:
                self.shared -= 1
            else:
                del self.users[name]
                self.idle[name] = None

    def trim(self, tokens: float) -> None:
        """Drop blocks until those left over fit into `tokens` tokens."""
        while self.idle and len(self.idle) * self.block_tokens > tokens:
            name, _ = self.idle.popitem(last=False)
            self._changed.toggle(name)

    def change(self) -> CacheChange | None:
        """The change since the last call, the first time as a whole; None if there is none."""
        if self._reported and not self._changed:
            return None
        stored, removed = self._changed.take(self._has)
        whole, self._reported = not self._reported, True
        return CacheChange({Tier.HBM: stored}, {} if whole else {Tier.HBM: removed}, whole)

    def _use(self, name: int) -> None:
        users = self.users.get(name, 0)
        self.users[name] = users + 1
        if users:
            self.shared += 1
        else:
            self.idle.pop(name, None)

    def _has(self, name: int) -> bool:
        return name in self.users or name in self.idle

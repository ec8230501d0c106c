"""The prefix cache of one simulated replica: the blocks of prompts, in use or idle (`policies.engine.blocks`).

The memory of a block in use is a part of its request's. Idle ones are in memory that nothing else needs. Blocks have
names only (`Job.context`): a cache without content. Without a session, the blocks of a request's output have none, and
are not found again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from policies.engine.blocks import Block, NamedBlocks
from policies.model import RequestId
from policies.prefix.change import CacheChange, Tier
from policies.prefix.evacuation import CachedContext

_REMEMBERED = 4096
"""The most contexts of ended requests that are remembered."""


@dataclass(slots=True)
class _Use:
    """The names of all blocks that a request will fill, and the blocks that it uses: the first ones."""

    names: Sequence[int]
    blocks: list[Block] = field(default_factory=list)


@dataclass(slots=True)
class SimulatedCache:
    """Blocks of `block_tokens` tokens. The caller keeps the memory: see `trim`."""

    block_tokens: int
    blocks: NamedBlocks[Block] = field(default_factory=NamedBlocks)
    _contexts: OrderedDict[int, tuple[Sequence[int], float]] = field(default_factory=OrderedDict)
    """The names of contexts and the times of their last uses, by their last names; the newest one is the last."""
    _uses: dict[RequestId, _Use] = field(default_factory=dict)
    _reported: bool = False

    @property
    def shared_tokens(self) -> int:
        """The tokens by which the sizes of the running requests exceed their memory, since they share blocks."""
        return self.blocks.shared * self.block_tokens

    def claim(self, request: RequestId, names: Sequence[int], tokens: int, computed: int = 0) -> int:
        """Use the first blocks of a context that are there, and return the tokens that need no computation.

        `names` are those of all blocks that the request will fill. The last of its `tokens` tokens is always computed.
        If `computed` ones are already, their blocks are added, and no others are looked for. Blocks are kept until
        `release`; another call may find more.
        """
        use = self._uses.setdefault(request, _Use(names))
        if computed > len(use.blocks) * self.block_tokens:
            self.fill(request, computed)
            return computed
        last = min(len(names), (tokens - 1) // self.block_tokens)
        found = self.blocks.match(names[len(use.blocks) : last])
        self.blocks.claim(found)
        use.blocks += found
        return len(use.blocks) * self.block_tokens

    def active(self, names: Sequence[int]) -> int:
        """The tokens of the first blocks that running requests use."""
        used = takewhile(lambda block: block.users, self.blocks.match(names))
        return sum(1 for _ in used) * self.block_tokens

    def leading(self, names: Sequence[int]) -> int:
        """The number of names up to the first one that is missing."""
        return len(self.blocks.match(names))

    def fill(self, request: RequestId, tokens: int) -> None:
        """Add the blocks of a request's first `tokens` tokens, which are computed or have arrived."""
        use = self._uses[request]
        names = use.names[len(use.blocks) : tokens // self.block_tokens]
        filled = [self.blocks.enter(Block(), name) for name in names]
        self.blocks.claim(filled)
        use.blocks += filled

    def take_in(self, names: Sequence[int]) -> None:
        """Add blocks that have been copied here, and that nobody uses yet. The last of them is dropped first."""
        for name in reversed(names):
            self.blocks.enter(Block(), name)

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
        """End a request's use of its blocks, if it uses any."""
        if (use := self._uses.pop(request, None)) is not None:
            self.blocks.release(use.blocks)

    def trim(self, tokens: float) -> None:
        """Drop idle blocks until they fit into `tokens` tokens."""
        if self.blocks.idle:
            self.blocks.trim(max(0, int(tokens // self.block_tokens)))

    def change(self) -> CacheChange | None:
        """The change since the last call, the first time as a whole; None if there is none."""
        if self._reported and not self.blocks.has_changed:
            return None
        stored, removed = self.blocks.take_changes()
        whole, self._reported = not self._reported, True
        return CacheChange({Tier.HBM: stored}, {} if whole else {Tier.HBM: removed}, whole)

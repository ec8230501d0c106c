"""KV blocks of a paced engine and their prefix cache, modelled on vLLM's block pool.

    blank  --allocate-->  used  --release-->  idle (if sealed) or blank
    idle   --claim----->  used
    idle   --allocate, least recently used first; drops the content-->  used

A full block is sealed under its digest, which covers the context up to its end. Contexts with the same beginning find
it by its digest, during and after the run of its request. Blank and idle blocks are free. The pool records every change
of its names as vLLM does.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from migration.kv.cache_events import BlocksRemoved, BlocksStored, CacheEvent
from policies.prefix.names import name_of


@dataclass(slots=True, eq=False)
class Block:
    """One block: its content (packed tokens), its digest if it is sealed, and the number of requests that use it."""

    held: bytearray = field(default_factory=bytearray)
    digest: bytes | None = None
    users: int = 0


class BlockPool:
    """`size` blocks, a number that may change."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._blank = size
        self._sealed: dict[bytes, Block] = {}
        self._idle: OrderedDict[bytes, Block] = OrderedDict()
        self._events: list[CacheEvent] = []

    @property
    def free(self) -> int:
        """The number of blocks that no request uses; below zero if requests use more than there are now."""
        return self._blank + len(self._idle)

    @property
    def names(self) -> list[int]:
        """The names of all sealed blocks."""
        return [name_of(digest) for digest in self._sealed]

    def take_events(self) -> list[CacheEvent]:
        """The changes of the names since the last call."""
        events, self._events = self._events, []
        return events

    def match(self, digests: Iterable[bytes]) -> list[Block]:
        """The sealed blocks with these digests, up to the first missing one."""
        found = []
        for digest in digests:
            block = self._sealed.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def room_beside(self, blocks: Iterable[Block]) -> int:
        """The number of free blocks after a claim of `blocks`."""
        return self.free - sum(not block.users for block in blocks)

    def claim(self, blocks: Iterable[Block]) -> None:
        """Add a user to each of these sealed blocks."""
        for block in blocks:
            if not block.users and block.digest is not None:
                del self._idle[block.digest]
            block.users += 1

    def allocate(self) -> Block | None:
        """An empty block with one user; None if all are in use."""
        if self.free <= 0:
            return None
        self._blank -= 1
        self._evict()
        return Block(users=1)

    def resize(self, size: int) -> None:
        """Have that many blocks from now on. Those in use stay; unused content is dropped for what is missing."""
        self._blank += size - self.size
        self.size = size
        self._evict()

    def _evict(self) -> None:
        """Drop unused content, the least recently used first, until no blank block is missing."""
        while self._blank < 0 and self._idle:
            digest, _ = self._idle.popitem(last=False)
            self._unseal(digest)
            self._blank += 1

    def seal(self, block: Block, digest: bytes) -> None:
        """Let a full block be found by its digest, unless another block is."""
        if digest not in self._sealed:
            block.digest = digest
            self._sealed[digest] = block
            self._events.append(BlocksStored([name_of(digest)]))

    def _unseal(self, digest: bytes) -> None:
        del self._sealed[digest]
        self._events.append(BlocksRemoved([name_of(digest)]))

    def release(self, blocks: Sequence[Block]) -> None:
        """Remove a user from a request's blocks, in context order; of the unused ones, the last is evicted first."""
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                if block.digest is None:
                    self._blank += 1
                else:
                    self._idle[block.digest] = block
        self._evict()

    def delete(self, names: Container[int] | None) -> int:
        """Delete the names of blocks, None: of all; their number. Blocks that requests use keep their content."""
        found = [digest for digest in self._sealed if names is None or name_of(digest) in names]
        for digest in found:
            self._sealed[digest].digest = None
            if self._idle.pop(digest, None) is not None:
                self._blank += 1
            self._unseal(digest)
        return len(found)

    def forget(self) -> None:
        """Drop the content of all free blocks."""
        for digest in self._idle:
            self._unseal(digest)
        self._blank += len(self._idle)
        self._idle.clear()

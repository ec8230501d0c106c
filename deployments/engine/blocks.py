"""KV blocks of a paced engine and their prefix cache, modelled on vLLM's block pool.

    blank  --allocate-->  used  --release-->  idle (if sealed) or blank
    idle   --claim----->  used
    idle   --allocate, least recently used first; drops the content-->  used

A full block is sealed under a name, the hash of the context up to its end. Contexts with the same beginning find it by
this name, during and after the run of its request. Blank and idle blocks are free.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Block:
    """One block: its content (packed tokens), its name if it is sealed, and the number of requests that use it."""

    held: bytearray = field(default_factory=bytearray)
    name: bytes | None = None
    users: int = 0


class BlockPool:
    """A fixed number of blocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._blank = size
        self._named: dict[bytes, Block] = {}
        self._idle: OrderedDict[bytes, Block] = OrderedDict()

    @property
    def free(self) -> int:
        """The number of blocks that no request uses."""
        return self._blank + len(self._idle)

    def match(self, names: Iterable[bytes]) -> list[Block]:
        """The sealed blocks with these names, up to the first missing one."""
        found = []
        for name in names:
            block = self._named.get(name)
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
            if not block.users and block.name is not None:
                del self._idle[block.name]
            block.users += 1

    def allocate(self) -> Block | None:
        """An empty block with one user; None if all are in use."""
        if self._blank:
            self._blank -= 1
        elif self._idle:
            name, _ = self._idle.popitem(last=False)
            del self._named[name]
        else:
            return None
        return Block(users=1)

    def seal(self, block: Block, name: bytes) -> None:
        """Give a full block its name in the cache, unless another block has this name."""
        if name not in self._named:
            block.name = name
            self._named[name] = block

    def release(self, blocks: Sequence[Block]) -> None:
        """Remove a user from a request's blocks, in context order; of the unused ones, the last is evicted first."""
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                if block.name is None:
                    self._blank += 1
                else:
                    self._idle[block.name] = block

    def forget(self) -> None:
        """Drop the content of all free blocks."""
        for name in self._idle:
            del self._named[name]
        self._blank += len(self._idle)
        self._idle.clear()

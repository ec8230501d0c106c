"""KV blocks of a paced engine and their prefix cache, as vLLM's block pool has them.

    blank  --allocate-->  used  --release-->  idle (if it was sealed) or blank
    idle   --claim----->  used
    idle   --allocate, least recently used first: what it held is forgotten-->  used

A full block is sealed under a name for everything up to its end; a context that begins the same finds it by that
name, whether its request still runs or has ended. Blank and idle blocks are free.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Block:
    """One block: what it holds (packed tokens), its name once it is sealed, and how many requests use it."""

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
        """Blocks that no request uses."""
        return self._blank + len(self._idle)

    def match(self, names: Iterable[bytes]) -> list[Block]:
        """The sealed blocks of these names, up to the first that is missing."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def room_beside(self, blocks: Iterable[Block]) -> int:
        """Blocks that would be free if these were claimed."""
        return self.free - sum(not block.users for block in blocks)

    def claim(self, blocks: Iterable[Block]) -> None:
        """One request more uses each of these sealed blocks."""
        for block in blocks:
            if not block.users and block.name is not None:
                del self._idle[block.name]
            block.users += 1

    def allocate(self) -> Block | None:
        """A block that holds nothing, for one user; None when all are in use."""
        if self._blank:
            self._blank -= 1
        elif self._idle:
            name, _ = self._idle.popitem(last=False)
            del self._named[name]
        else:
            return None
        return Block(users=1)

    def seal(self, block: Block, name: bytes) -> None:
        """A block is full: it can be found by its name, unless another one is found by it already."""
        if name not in self._named:
            block.name = name
            self._named[name] = block

    def release(self, blocks: Sequence[Block]) -> None:
        """A request's blocks, in context order, have a user less; of those unused, the end of it goes first."""
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                if block.name is None:
                    self._blank += 1
                else:
                    self._idle[block.name] = block

    def forget(self) -> None:
        """Forget what free blocks hold."""
        for name in self._idle:
            del self._named[name]
        self._blank += len(self._idle)
        self._idle.clear()

"""The account of an engine's KV blocks and of its prefix cache, modelled on vLLM's block pool.

    blank  --allocate-->  used  --release-->  idle (if named) or blank
    idle   --claim----->  used
    idle   --trim, least recently used first; drops the content-->  blank

A full block gets a name, which stands for the context up to its end. Contexts with the same beginning find it by its
name, during and after the run of its request. Idle blocks are free.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from policies.prefix.change import NetChanges


@dataclass(slots=True, eq=False)
class Block:
    """One block: its name, if it has one, and the number of requests that use it."""

    name: int | None = None
    users: int = 0


B = TypeVar("B", bound=Block)


class NamedBlocks(Generic[B]):
    """The blocks that can be found by their names, in an engine whose memory is counted elsewhere.

    `idle` ones have no users; the least recently used one is first. `shared` is the number of users beyond the first
    ones of all blocks.
    """

    def __init__(self) -> None:
        self.named: dict[int, B] = {}
        self.idle: OrderedDict[int, B] = OrderedDict()
        self.shared = 0
        self._changed = NetChanges()

    @property
    def has_changed(self) -> bool:
        """True if names have come or left since the last `take_changes`."""
        return bool(self._changed)

    def take_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The names that have come since the last call, and those that have left."""
        return self._changed.take(self.named.__contains__)

    def match(self, names: Iterable[int]) -> list[B]:
        """The blocks with these names, up to the first missing one."""
        found = []
        for name in names:
            block = self.named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def claim(self, blocks: Iterable[B]) -> None:
        """Add a user to each of these named blocks."""
        for block in blocks:
            if block.users:
                self.shared += 1
            elif block.name is not None:
                del self.idle[block.name]
            block.users += 1

    def enter(self, block: B, name: int) -> B:
        """Let a full block be found by its name, unless another block is. Without users it is idle.

        Returns the block that is found.
        """
        if (found := self.named.get(name)) is not None:
            return found
        block.name = name
        self.named[name] = block
        if not block.users:
            self.idle[name] = block
        self._changed.toggle(name)
        return block

    def release(self, blocks: Sequence[B]) -> int:
        """Remove a user from a request's blocks, in context order; of the unused ones, the last is dropped first.

        Returns the number of blocks that became blank: unused ones without a name.
        """
        blank = 0
        for block in reversed(blocks):
            block.users -= 1
            if block.users:
                self.shared -= 1
            elif block.name is None:
                blank += 1
            else:
                self.idle[block.name] = block
        return blank

    def trim(self, limit: int) -> int:
        """Drop idle blocks, the least recently used first, until at most `limit` are left; returns their number."""
        dropped = 0
        while self.idle and len(self.idle) > limit:
            name, _ = self.idle.popitem(last=False)
            self._drop_name(name)
            dropped += 1
        return dropped

    def delete(self, names: Container[int] | None) -> int:
        """Delete the names of blocks, None: of all; their number. Blocks that requests use keep their content."""
        found = [name for name in self.named if names is None or name in names]
        for name in found:
            self.named[name].name = None
            self.idle.pop(name, None)
            self._drop_name(name)
        return len(found)

    def _drop_name(self, name: int) -> None:
        del self.named[name]
        self._changed.toggle(name)


class BlockPool(NamedBlocks[B]):
    """`size` blocks, a number that may change; `blank` makes an empty one."""

    def __init__(self, size: int, blank: Callable[[], B]) -> None:
        super().__init__()
        self.size = size
        self._blank = blank
        self._used = 0

    @property
    def free(self) -> int:
        """The number of blocks that no request uses; below zero if requests use more than there are now."""
        return self.size - self._used

    def room_beside(self, blocks: Iterable[B]) -> int:
        """The number of free blocks after a claim of `blocks`."""
        return self.free - sum(not block.users for block in blocks)

    def claim(self, blocks: Iterable[B]) -> None:
        """See `NamedBlocks.claim`."""
        blocks = list(blocks)
        self._used += sum(not block.users for block in blocks)
        super().claim(blocks)

    def allocate(self) -> B | None:
        """An empty block with one user; None if all are in use."""
        if self.free <= 0:
            return None
        block = self._blank()
        block.users = 1
        self._used += 1
        self._make_room()
        return block

    def resize(self, size: int) -> None:
        """Have that many blocks from now on. Those in use stay; idle ones are dropped for what is missing."""
        self.size = size
        self._make_room()

    def release(self, blocks: Sequence[B]) -> int:
        """See `NamedBlocks.release`."""
        idle = len(self.idle)
        blank = super().release(blocks)
        self._used -= blank + len(self.idle) - idle
        self._make_room()
        return blank

    def _make_room(self) -> None:
        """Drop idle blocks for which there is no memory."""
        self.trim(max(0, self.free))

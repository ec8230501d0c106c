"""The blocks that a worker's copier may touch while steps run. Its thread and the worker's main thread share them.

A step writes to the blocks of the requests that take part in it. The copier touches no such block:

    reads   full blocks of a running request. A full block is never written again before the request ends or is
            preempted, and the main thread voids the request's table before the first step that may reuse the block.
    writes  blocks allocated to a load that waits for them. vLLM does not run its request, names the blocks in its
            prefix cache only once all have arrived, and frees them only once `BlockLoads.finished` reports the load.

The main thread calls, in every step and in this order:

    BlockTables.void, BlockLoads.begin, .cache, .close   before the step writes to any block
    BlockTables.apply                                    once the forward pass is complete, or launched on a GPU
    BlockLoads.finished, .arrived                        at the end of the step

On a GPU, launched work runs later. A fence is an event that the main thread records in the stream of the steps; the
copier's stream waits for it on the GPU. The fences of a table follow the steps that filled its blocks, the fence of a
load precedes the step that allocated its blocks; none waits for later steps. In the other direction the host orders:
the copier checks a table, and reports blocks as arrived, only after it has synchronized its stream.

Between two steps, the main thread may give blocks other ids (`renumber`): it waits for the copy under way, moves the
contents, and maps the ids of tables and loads.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from migration.protocol.errors import BlocksGone, LoadOver, TransferFailed
from migration.protocol.layouts import ShardPart


class Fence(Protocol):
    """A point in the stream of the steps; implemented by `torch.cuda.Event`."""

    def wait(self) -> None:
        """Have the calling thread's current stream wait for this point."""
        ...

    def query(self) -> bool:
        """True once the work before this point is complete."""
        ...


class FencedBlocks(NamedTuple):
    """Cache blocks in context order, and the fence after which the copier's stream may touch them."""

    blocks: Sequence[int]
    fence: Fence | None


# --- blocks to read -----------------------------------------------------------------------------------


@dataclass(slots=True)
class TableChange:
    """The change of one request's block table in one step.

    `computed` is the number of tokens whose KV is complete after the step. Draft tokens of speculative decoding count,
    even those that the step will reject: nobody asks for blocks of tokens that are not known. `blocks` are appended to
    the table, or replace it. `caught_up` if the step yields a token: none of the request's known tokens remains to be
    computed, and from now on each step computes one or more.
    """

    key: str
    computed: int
    blocks: list[int]
    replace: bool
    caught_up: bool
    held: bool = False
    """The request is a hold (see `connector`)."""


@dataclass(slots=True)
class BlockTable:
    """A running request's cache blocks in context order, and the number of tokens whose KV they hold after all steps.

    Once it has `caught_up`, they hold the KV of all tokens that the replica knows but the newest. The first `complete`
    blocks are full. `filling` has larger numbers of full blocks, in rising order, each with the fence of the step that
    reached it.
    """

    computed: int
    blocks: list[int]
    caught_up: bool
    held: bool = False
    complete: int = 0
    filling: deque[tuple[int, Fence]] = field(default_factory=deque)

    def fill(self, full: int, fence: Fence) -> None:
        """Record a step after which `full` blocks are full, and forget the fences of complete steps."""
        if full > (self.filling[-1][0] if self.filling else self.complete):
            self.filling.append((full, fence))
        while self.filling and self.filling[0][1].query():
            self.complete, _ = self.filling.popleft()

    def fence_of(self, blocks: int) -> Fence | None:
        """The fence after which the first `blocks` blocks are full; None if they are by now."""
        return next((fence for full, fence in self.filling if full >= blocks), None) if blocks > self.complete else None


class BlockTables:
    """The block tables of the running requests, by their keys."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.copying = threading.Lock()
        """Held during a copy: block ids do not change meanwhile."""
        self._lock = threading.Lock()
        self._tables: dict[str, BlockTable] = {}
        self._watched: set[str] = set()
        """Keys of requests whose next change somebody waits for."""

    def __len__(self) -> int:
        return len(self._tables)

    def void(self, keys: Collection[str]) -> bool:
        """Remove the tables of requests that ended or were preempted. True if somebody has waited for one of them."""
        with self._lock:
            for key in keys:
                self._tables.pop(key, None)
            return self._end_watches(keys)

    def apply(self, changes: Collection[TableChange], fence: Fence | None) -> bool:
        """Apply the changes of a step; `fence` follows the step. True if somebody has waited for one of them."""
        with self._lock:
            for change in changes:
                table = self._tables.get(change.key)
                if table is None or change.replace:
                    table = BlockTable(change.computed, change.blocks, change.caught_up, change.held)
                    self._tables[change.key] = table
                else:
                    table.computed, table.caught_up = change.computed, change.caught_up
                    table.blocks.extend(change.blocks)
                if fence is not None:
                    table.fill(change.computed // self._block_size, fence)
            return self._end_watches(change.key for change in changes)

    def _end_watches(self, keys: Iterable[str]) -> bool:
        """End the watches of requests; True if there was one."""
        if not self._watched:
            return False
        watched = self._watched.intersection(keys)
        self._watched -= watched
        return bool(watched)

    def renumber(self, ids: "np.ndarray[Any, Any]") -> None:
        """Block `b` has the id `ids[b]` from now on. Called with `copying` held.

        New ids were those of free blocks: a table that has one is of a request that has ended since the last step.
        """
        self.lose(ids[ids != np.arange(len(ids))].tolist())
        with self._lock:
            for table in self._tables.values():
                table.blocks[:] = ids[table.blocks].tolist()

    def lose(self, blocks: Iterable[int]) -> None:
        """Remove the tables that have any of these blocks, whose contents are lost. Called with `copying` held.

        Their requests have ended, but no step has voided them yet.
        """
        lost = frozenset(blocks)
        with self._lock:
            for key, table in list(self._tables.items()):
                if not lost.isdisjoint(table.blocks):
                    del self._tables[key]

    def computed(self, key: str) -> int | None:
        """The number of tokens of a request whose KV is in its blocks; None if it holds no blocks."""
        with self._lock:
            table = self._tables.get(key)
            return None if table is None else table.computed

    def computed_beyond(self, key: str, tokens: int) -> int | None:
        """As `computed`, if there are more than `tokens`.

        Else None, and the next `apply` or `void` with this request returns True.
        """
        with self._lock:
            table = self._tables.get(key)
            if table is not None and table.computed > tokens:
                return table.computed
            self._watched.add(key)
            return None

    def unwatch(self, key: str) -> None:
        """End the wait for a request, which may have ended before: nothing changes then any more."""
        with self._lock:
            self._watched.discard(key)

    def held(self, key: str) -> int | None:
        """The number of blocks of the hold `key`; None if there is no such hold, or not yet."""
        with self._lock:
            table = self._tables.get(key)
            return len(table.blocks) if table is not None and table.held else None

    @contextmanager
    def reading(self, key: str, first: int, last: int, partial: bool = False) -> Iterator[FencedBlocks]:
        """Full blocks [first, last) of a request, which the body copies; if `partial`, the last one need not be full.

        A step may write into a partial block during the copy, behind the tokens that the replica knows. These are
        out of the engine, so the steps that computed their KV are complete: no fence is needed for them.

        Raises:
            BlocksGone: the request holds no blocks, or lost them meanwhile: the copy may hold another request's KV.
            TransferFailed: a block is not full, or known tokens are not computed.
        """
        with self.copying:
            with self._lock:
                table = self._tables.get(key)
                if table is None:
                    raise BlocksGone("the request holds no blocks (waiting, preempted or ended)")
                if partial:
                    if not table.caught_up or last > len(table.blocks):
                        raise TransferFailed(f"only {table.computed} of the known tokens are computed")
                elif last * self._block_size > table.computed:
                    raise TransferFailed(f"only {table.computed} tokens are computed, block {last} is not full")
                held = FencedBlocks(table.blocks[first:last], None if partial else table.fence_of(last))
            yield held
        with self._lock:
            if self._tables.get(key) is not table:
                raise BlocksGone("the request lost its blocks while they were copied")


# --- blocks to write ----------------------------------------------------------------------------------


class Parts:
    """The parts of a shard that have arrived, of one of `cells` layers times heads."""

    def __init__(self, cells: int) -> None:
        self._missing = cells
        self._arrived: list[ShardPart] = []

    @property
    def whole(self) -> bool:
        """True once nothing is missing."""
        return not self._missing

    def lack(self, part: ShardPart) -> bool:
        """True if nothing of the part has arrived."""
        return not any(part.overlaps(other) for other in self._arrived)

    def add_part(self, part: ShardPart) -> None:
        """The part has arrived."""
        self._arrived.append(part)
        self._missing -= part.cells


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """A load that vLLM admitted: its request, and the blocks of its context from index `first` on.

    Without blocks there is nothing to fill, and vLLM runs the request: the cache holds the whole context, or lacks a
    block before the load.
    """

    load: str
    request_id: str
    first: int
    blocks: list[int]


@dataclass(slots=True)
class _LoadProgress:
    """The state of a load. Messages of vLLM's scheduler and of the replica arrive in any order."""

    admitted: BlockLoad | None = None
    fence: Fence | None = None
    missing: set[int] = field(default_factory=set)
    """Indexes of the context's blocks that have not arrived, or not whole."""
    parts: dict[int, Parts] = field(default_factory=dict)
    """The parts of these blocks that have arrived."""
    writing: bool = False
    arrived: bool = False
    """vLLM knows, or is about to, that all blocks are filled."""
    cached: bool = False
    """The blocks are in vLLM's prefix cache."""
    held: bool = False
    """vLLM keeps the blocks until the load is reported as finished."""
    ended: bool = False
    """vLLM's request has ended."""
    forgotten: bool = False
    """The replica is done with the load."""

    @property
    def open(self) -> bool:
        """True while blocks may be written."""
        return self.admitted is not None and not self.ended and not self.forgotten

    @property
    def filled(self) -> bool:
        """True while vLLM keeps blocks that have all arrived."""
        return self.held and self.open and not self.missing


class BlockLoads:
    """The loads under way, by their names."""

    def __init__(self) -> None:
        self.cells = 1
        """Layers times heads of the worker's shard."""
        self.copying = threading.Lock()
        """Held while blocks are written: block ids do not change meanwhile."""
        self._lock = threading.Lock()
        self._loads: dict[str, _LoadProgress] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, admitted: BlockLoad, fence: Fence | None) -> None:
        """Record the blocks of a load; `fence` follows all steps that used them before."""
        with self._lock:
            progress = self._loads.setdefault(admitted.load, _LoadProgress())
            progress.admitted, progress.fence = admitted, fence
            progress.missing = set(range(admitted.first, admitted.first + len(admitted.blocks)))
            progress.held = bool(admitted.blocks)

    def renumber(self, ids: "np.ndarray[Any, Any]") -> None:
        """Block `b` has the id `ids[b]` from now on. Called with `copying` held."""
        with self._lock:
            for progress in self._loads.values():
                if progress.admitted is not None:
                    progress.admitted.blocks[:] = ids[progress.admitted.blocks].tolist()

    def cache(self, load: str) -> None:
        """Record that the load's blocks are in vLLM's prefix cache."""
        with self._lock:
            if progress := self._loads.get(load):
                progress.cached = True

    def close(self, load: str) -> None:
        """Record the end of the load's request in vLLM."""
        with self._lock:
            self._loads.setdefault(load, _LoadProgress()).ended = True
            self._tidy(load)

    def forget(self, load: str) -> None:
        """Record that the replica is done with a load."""
        with self._lock:
            self._loads.setdefault(load, _LoadProgress()).forgotten = True
            self._tidy(load)

    def decided(self, load: str) -> bool:
        """False if blocks of the load have to wait: vLLM has not admitted it yet."""
        with self._lock:
            progress = self._loads.get(load)
            return progress is not None and (progress.admitted is not None or progress.ended or progress.forgotten)

    def filled(self, load: str) -> int | None:
        """The number of blocks, once all of them have arrived and while the load's request waits; before, None."""
        with self._lock:
            progress = self._loads.get(load)
            if progress is None or progress.admitted is None or not progress.filled:
                return None
            return len(progress.admitted.blocks)

    def missing(self, load: str) -> int | None:
        """The number of blocks that have not arrived; None if the load is not admitted, or over."""
        with self._lock:
            progress = self._loads.get(load)
            return len(progress.missing) if progress is not None and progress.open else None

    def loaded(self, load: str) -> bool:
        """True once the load's blocks are in vLLM's prefix cache."""
        with self._lock:
            progress = self._loads.get(load)
            return progress is not None and progress.cached

    @contextmanager
    def writing(
        self, load: str, first: int, last: int, part: ShardPart | None = None
    ) -> Iterator[tuple[FencedBlocks, int]]:
        """The cache blocks for blocks [first, last) of a load, without the first `skip`, which the cache held already.

        The body fills the blocks, or a `part` of each, if there are any. If it raises, they stay missing.

        Raises:
            LoadOver: the load has ended.
            TransferFailed: it does not wait for these blocks.
        """
        with self.copying:
            with self._lock:
                progress = self._loads.get(load)
                if progress is None or progress.admitted is None or not progress.open:
                    raise LoadOver("the load has ended")
                start, blocks = progress.admitted.first, progress.admitted.blocks
                low = max(first, start)
                if not 0 <= first < last <= start + len(blocks) or not self._lacks(progress, range(low, last), part):
                    raise TransferFailed(f"the load does not wait for blocks [{first}, {last})")
                progress.writing = True
            try:
                yield FencedBlocks(blocks[low - start : max(low, last) - start], progress.fence), low - first
                with self._lock:
                    self._fill(progress, range(low, last), part)
            finally:
                with self._lock:
                    progress.writing = False

    def _lacks(self, progress: _LoadProgress, blocks: range, part: ShardPart | None) -> bool:
        """True if these blocks of a load are missing, and of each all of the part; None: of each everything."""
        lacking = progress.missing.issuperset(blocks)
        if not progress.parts or not lacking:
            return lacking
        arrived = [progress.parts[block] for block in blocks if block in progress.parts]
        return all(parts.lack(part) for parts in arrived) if part is not None else not arrived

    def _fill(self, progress: _LoadProgress, blocks: range, part: ShardPart | None) -> None:
        """Blocks of a load have arrived, or a part of each."""
        if part is None:
            progress.missing.difference_update(blocks)
            return
        for block in blocks:
            parts = progress.parts.setdefault(block, Parts(self.cells))
            parts.add_part(part)
            if parts.whole:
                progress.missing.discard(block)

    def arrived(self) -> list[str]:
        """The loads whose blocks have all been filled, each once."""
        with self._lock:
            found = [load for load, progress in self._loads.items() if progress.filled and not progress.arrived]
            for load in found:
                self._loads[load].arrived = True
        return found

    def finished(self) -> set[str]:
        """vLLM's ids of ended requests whose blocks are not written any more, each once: vLLM may free these."""
        found: set[str] = set()
        with self._lock:
            for load, progress in list(self._loads.items()):
                if progress.admitted is not None and progress.held and progress.ended and not progress.writing:
                    found.add(progress.admitted.request_id)
                    progress.held = False
                    self._tidy(load)
        return found

    def _tidy(self, load: str) -> None:
        """Drop a load of which no message can come any more."""
        progress = self._loads[load]
        if progress.ended and progress.forgotten and not progress.held:
            del self._loads[load]

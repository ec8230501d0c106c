"""The copies between KV cache blocks and a staging slot.

Staged bytes keep their order in memory:

    for each layer, by layer number: for each block: its bytes

Copies move whole machine words, whatever the cache's type: no value is converted, and types that torch cannot index
(8-bit floats) need no special case. The staged bytes are the same for both kinds of device; the copies differ. On a
GPU, layers at a constant distance from each other are one tensor [L, B, ...], so that one kernel copies blocks of all
of them. On a CPU they are one tensor of rows, each a block of a layer, since torch indexes an inner axis element by
element there (measured: 300 times slower). Words have 4 bytes there, since torch copies 8-byte words at half the
speed (measured, torch 2.13).

A cache of unlike heads takes a part of the staged bytes (`ShardPart`), which it reads where they lie: the staged shard
is [L, blocks, ...] of whole layers, and its heads are one of the other axes.

Layers that another worker keeps for this one (`RemoteRows`) are copied from and to there: staged bytes are always those
of whole blocks.

One operation per copy matters on a CPU. Each operation gives the interpreter's lock away, and the copier shares it with
the thread that runs the engine's steps: on a busy machine, each operation more may wait for milliseconds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from migration.kv.layers import Layer, Stack, as_words, dense, layers_of, runs, stack_rows
from migration.kv.pages import give_back
from migration.protocol.errors import TransferFailed
from migration.protocol.layouts import ShardPart, ShardShape


class RowsLost(TransferFailed):
    """The worker that keeps layers of this one is lost, and with it all KV."""


class RemoteRows(Protocol):
    """The KV of the layers that another worker runs for this one (`pair`). A row is a block of a layer, in words of 4
    bytes.
    """

    @property
    def remote(self) -> range:
        """The layers: some of the first or of the last ones. They change between two copies only."""
        ...

    def read_rows(self, layer: int, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Copy blocks of a remote layer into `rows` [blocks, words]. Raises RowsLost."""
        ...

    def write_rows(self, layer: int, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Copy `rows` [blocks, words] into blocks of a remote layer. Raises RowsLost."""
        ...

    def note_rows(self, blocks: Sequence[int]) -> None:
        """Blocks of all layers have been written."""
        ...

    def move_rows(self, moved: Sequence[tuple[int, int]]) -> None:
        """Blocks have changed their ids, (from, to)."""
        ...

    def lose_rows(self, first: int) -> None:
        """The memory of all blocks from `first` on is given back."""
        ...


class CacheLayout:
    """The KV tensors of all layers; a layer that shares another layer's cache is left out."""

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, for_gpu: bool | None = None) -> None:
        """`for_gpu` selects the kind of copies; by default, that of the cache's device.

        Raises:
            TransferFailed: the cache cannot be moved by blocks.
        """
        layers = layers_of(caches, num_blocks)
        devices = {layer.blocks.device for layer in layers}
        if len(devices) != 1:
            raise TransferFailed(f"the KV cache is on {len(devices)} devices")
        self._device = devices.pop()
        self._num_blocks = num_blocks
        self._shape = _shape(layers)
        self._layers = layers
        self._on_gpu = self._device.type == "cuda" if for_gpu is None else for_gpu
        self._stacks = {range(len(layers)): self._stacked([layer.blocks for layer in layers], self._word)}
        """The layers of a range, as they are copied."""
        self.block_bytes: int = sum(layer.blocks[0].numel() * layer.blocks.element_size() for layer in layers)
        self.elsewhere: RemoteRows | None = None
        """Where the layers are that are not here; None if all are."""
        self._parts: dict[ShardPart, list[Stack]] = {}
        """The cells that parts of shards fill, as far as parts have come."""

    @property
    def device(self) -> torch.device:
        """The cache's device."""
        return self._device

    @property
    def _word(self) -> int:
        """The most bytes that are copied as one value."""
        return 8 if self._on_gpu else 4

    def _stacked(self, layers: Sequence[torch.Tensor], widest: int) -> list[Stack]:
        """Layers [B, ...], as they are copied."""
        found = runs(as_words([dense(layer) for layer in layers], widest))
        return [Stack(run, 1) for run in found] if self._on_gpu else [s for run in found for s in stack_rows(run)]

    @property
    def kernels(self) -> int:
        """The number of copies of one gather or scatter; on a GPU, kernels."""
        return len(self._stacks[range(len(self._layers))])

    @property
    def shape(self) -> ShardShape:
        """The layers and heads that the cache holds of every block."""
        return self._shape

    def gather(self, blocks: Sequence[int], out: Any) -> None:
        """Copy `blocks` of every layer into `out`: len(blocks) * block_bytes bytes of host or GPU memory.

        Returns when the copy is complete and visible to other processes. On a GPU it is made in the calling thread's
        current stream.

        Raises:
            TransferFailed: a block does not exist, or `out` has another size; nothing was copied.
            RowsLost: the layers elsewhere are lost.
        """
        index = self._index(blocks)
        for stack, staged in self._staged(len(blocks), out):
            if stack.tensor.device == staged.device:
                torch.index_select(stack.tensor, stack.axis, stack.places(index), out=staged)
            else:
                staged.copy_(stack.tensor.index_select(stack.axis, stack.places(index)))
        for elsewhere, layer, rows in self._staged_elsewhere(len(blocks), out):
            elsewhere.read_rows(layer, blocks, rows)
        self._settle()

    def scatter(self, blocks: Sequence[int], staged_count: int, skip: int, source: Any) -> None:
        """Copy staged blocks [skip, skip + len(blocks)) of `staged_count` into the cache blocks `blocks`.

        Returns when the staged bytes have been read.

        Raises:
            TransferFailed: a block does not exist, or too few are staged; nothing was copied.
            RowsLost: the layers elsewhere are lost.
        """
        try:
            self.place(blocks, staged_count, skip, source)
        finally:
            # Also if a copy failed: the caller may free the blocks, and no copy before it may still write to them.
            self._settle()

    def place(self, blocks: Sequence[int], staged_count: int, skip: int, source: Any) -> None:
        """Like `scatter`, but on a GPU the copy is only launched, in the calling thread's current stream."""
        if skip < 0 or skip + len(blocks) > staged_count:
            raise TransferFailed(f"{len(blocks)} blocks after {skip} are more than the {staged_count} staged")
        index = self._index(blocks)
        for stack, staged in self._staged(staged_count, source):
            if len(blocks) < staged_count:
                layers = staged.unflatten(stack.axis, (-1, staged_count))
                staged = layers.narrow(stack.axis + 1, skip, len(blocks)).flatten(stack.axis, stack.axis + 1)
            stack.tensor.index_copy_(stack.axis, stack.places(index), staged.to(stack.tensor.device))
        for elsewhere, layer, rows in self._staged_elsewhere(staged_count, source):
            elsewhere.write_rows(layer, blocks, rows[skip : skip + len(blocks)])
        if self.elsewhere is not None:
            self.elsewhere.note_rows(blocks)
        if isinstance(source, torch.Tensor) and source.device.type == "cuda":
            # The allocator of the copier's stream must not give the memory to somebody else before the copy is made.
            source.record_stream(torch.cuda.current_stream(source.device))

    def move(self, moved: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of every layer here to the place of others, (from, to); no block is both. Returns once done.

        Raises:
            TransferFailed: a block does not exist; nothing was copied.
        """
        before, after = (self._index(ids) for ids in zip(*moved, strict=True))
        for stack in self._here():
            rows = stack.tensor.index_select(stack.axis, stack.places(before))
            stack.tensor.index_copy_(stack.axis, stack.places(after), rows)
        self._settle()

    def give_back(self, first: int) -> None:
        """See `pages.give_back`, of all layers."""
        give_back([layer.blocks for layer in self._layers], first)

    def scatter_part(self, blocks: Sequence[int], staged_count: int, skip: int, source: Any, part: ShardPart) -> None:
        """Like `scatter`, of a `part` of `staged_count` staged blocks of a worker with other layers or heads."""
        if skip < 0 or skip + len(blocks) > staged_count:
            raise TransferFailed(f"{len(blocks)} blocks after {skip} are more than the {staged_count} staged")
        if self.elsewhere is not None:
            raise TransferFailed("a paired replica takes no parts of blocks")
        index = self._index(blocks)
        staged = self._part_of(source, staged_count, part)[:, skip : skip + len(blocks)]
        try:
            first = 0
            for stack in self._part_stacks(part):
                values = staged[first : first + stack.layers].reshape(stack.staged_shape(len(blocks)))
                stack.tensor.index_copy_(stack.axis, stack.places(index), values.to(stack.tensor.device))
                first += stack.layers
        finally:
            self._settle()

    def take_part(self, staged_count: int, source: Any, part: ShardPart, taken: torch.Tensor) -> None:
        """Copy a `part` of `staged_count` staged blocks to its place in `taken`, which is as a result of `take`.

        Returns when they have been read. Raises TransferFailed as `scatter` does.
        """
        staged = self._part_of(source, staged_count, part)
        whole = taken.view(staged.dtype).view(self._shape.layers, staged_count, *self._axes(part, self._shape.heads))
        to = whole.narrow(0, part.to_layer, part.layers).narrow(part.head_axis + 2, part.to_head, part.heads)
        to.copy_(staged)
        self._settle()

    def new_taken(self, count: int) -> torch.Tensor:
        """Memory for `take_part`, of `count` blocks."""
        return torch.empty(count * self.block_bytes, dtype=torch.uint8, device=self._device)

    def staged_bytes(self, part: ShardPart) -> int:
        """Bytes of a block in the staged shard that `part` is of. Raises TransferFailed if the cache cannot be cut."""
        shape = self._shape
        if (
            not shape.heads
            or max(part.to_layer + part.layers - shape.layers, part.to_head + part.heads - shape.heads) > 0
        ):
            raise TransferFailed(f"the KV cache has no such part: {part}")
        return self.block_bytes // (shape.layers * shape.heads) * part.staged_cells

    def _part_of(self, memory: Any, count: int, part: ShardPart) -> torch.Tensor:
        """A part of `count` staged blocks of another worker, as words [layers, count, ...]."""
        if len(memory) != count * self.staged_bytes(part):
            raise TransferFailed(f"{len(memory)} bytes are not {count} blocks of {self.staged_bytes(part)}")
        words = _flat(memory, self._device).view(self._part_stacks(part)[0].tensor.dtype)
        whole = words.view(part.staged_layers, count, *self._axes(part, part.staged_heads))
        heads = whole.narrow(0, part.from_layer, part.layers)
        return heads.narrow(part.head_axis + 2, part.from_head, part.heads)

    def _axes(self, part: ShardPart, heads: int) -> list[int]:
        """The shape of a block of a layer with that number of heads, in words."""
        sizes = list(self._cut_layer(self._layers[0], part).shape[1:])
        sizes[part.head_axis] = heads
        sizes[-1] = (
            sizes[-1] * self._layers[0].blocks.element_size() // self._part_stacks(part)[0].tensor.element_size()
        )
        return sizes

    def _part_stacks(self, part: ShardPart) -> list[Stack]:
        """The cells that a part fills, as they are copied."""
        if part not in self._parts:
            layers = self._layers[part.to_layer : part.to_layer + part.layers]
            cut = [
                self._cut_layer(layer, part).narrow(part.head_axis + 1, part.to_head, part.heads) for layer in layers
            ]
            # The innermost axis of a staged shard, too, has to be whole words.
            content = cut[0].shape[-1] * cut[0].element_size()
            self._parts[part] = self._stacked(cut, math.gcd(self._word, content))
        return self._parts[part]

    def _cut_layer(self, layer: Layer, part: ShardPart) -> torch.Tensor:
        """A layer with its heads on the part's axis: with one head, it may be on any other."""
        assert layer.head_axis is not None, "a part of a cache with heads"
        return layer.blocks.movedim(layer.head_axis, part.head_axis + 1)

    def take(self, source: Any) -> torch.Tensor:
        """A copy of staged bytes in memory of the cache's device, for `place`. Returns when they have been read."""
        taken = _flat(source, self._device).to(self._device, copy=True)
        self._settle()
        return taken

    def _here(self) -> list[Stack]:
        """The layers that are here, as they are copied."""
        here = self._range_here()
        if here not in self._stacks:
            layers = [layer.blocks for layer in self._layers[here.start : here.stop]]
            # Views that a step makes in inference mode can be written in no other one.
            with torch.inference_mode(False):
                self._stacks[here] = self._stacked(layers, self._word)
        return self._stacks[here]

    def _range_here(self) -> range:
        count, remote = len(self._layers), range(0) if self.elsewhere is None else self.elsewhere.remote
        if not remote:
            return range(count)
        return range(remote.start) if remote.start else range(remote.stop, count)

    def _staged_elsewhere(self, count: int, memory: Any) -> Iterator[tuple[RemoteRows, int, torch.Tensor]]:
        """Each layer that is elsewhere with its part of the staged bytes, [count, words]. All layers are equal then."""
        if self.elsewhere is None:
            return
        rows = _flat(memory, self._device).view(torch.int32).view(len(self._layers), count, -1)
        for layer in self.elsewhere.remote:
            yield self.elsewhere, layer, rows[layer]

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        """Block ids as a tensor. Checked, since an index out of range inside the worker would end the engine."""
        if not blocks or min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise TransferFailed(f"no such KV blocks: {blocks[:4]}...")
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def _staged(self, count: int, memory: Any) -> list[tuple[Stack, torch.Tensor]]:
        """Each stack of layers here with its part of the staged bytes, in the stack's shape with `count` blocks."""
        if len(memory) != count * self.block_bytes:
            raise TransferFailed(f"{len(memory)} bytes are not {count} blocks of {self.block_bytes}")
        flat = _flat(memory, self._device)
        parts: list[tuple[Stack, torch.Tensor]] = []
        # The layers in front are elsewhere, if any: all are equal then.
        offset = self._range_here().start * len(flat) // len(self._layers)
        for stack in self._here():
            shape, dtype = stack.staged_shape(count), stack.tensor.dtype
            end = offset + math.prod(shape) * dtype.itemsize
            parts.append((stack, flat[offset:end].view(dtype).view(shape)))
            offset = end
        return parts

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _shape(layers: Sequence[Layer]) -> ShardShape:
    """The shape of shards with these layers."""
    layer, count = layers[0], len(layers)
    if len({other.describe() for other in layers}) > 1 or layer.head_axis is None:
        return ShardShape(count, 0, None, "", ";".join(other.describe() for other in layers))
    head_axis = layer.head_axis - 1 if layer.heads > 1 else None
    return ShardShape(count, layer.heads, head_axis, str(layer.blocks.dtype), layer.describe_head())


def _flat(memory: Any, device: torch.device) -> torch.Tensor:
    """Staged bytes as a tensor over the same memory: a memoryview is host memory, a CuPy array GPU memory."""
    if isinstance(memory, torch.Tensor):
        return memory
    if isinstance(memory, memoryview):
        return torch.frombuffer(memory, dtype=torch.uint8)
    # Without `device`, torch asks CUDA for the memory's device, and copies memory of another GPU.
    flat = torch.as_tensor(memory, device=device)
    if flat.data_ptr() != memory.data.ptr:
        raise TransferFailed(f"the staging slot is not in memory that {device} can use")
    return flat

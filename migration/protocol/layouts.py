"""Layouts of KV blocks, and how the shards of an engine's workers become those of another engine's workers.

Every worker of an engine holds a shard of each KV block: some of the model's layers, and of each some of its KV heads.
With tensor parallelism over n workers, rank r has the r-th part of the heads; if there are fewer heads than workers,
several workers have the same one. What a block holds (tokens, weights, dtype) does not depend on that. So blocks can be
copied between engines with unlike numbers of workers, if a part of a staged shard can be read where it lies.

All ranges are half-open: [first, last).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from migration.protocol.errors import TransferFailed
from policies.causes import Cause


class Extent(NamedTuple):
    """The numbers from `first` to before `last`."""

    first: int
    last: int

    @property
    def size(self) -> int:
        """The length of the range; negative for none."""
        return self.last - self.first

    def meet(self, other: "Extent") -> "Extent":
        """The numbers in both."""
        return Extent(max(self.first, other.first), min(self.last, other.last))


def heads_of(rank: int, workers: int, heads: int) -> Extent:
    """The KV heads of the worker `rank` of `workers`, of a model with `heads` of them, as vLLM divides them."""
    own, copies = max(1, heads // workers), max(1, workers // max(1, heads))
    first = rank // copies * own
    return Extent(first, first + own)


class ShardShape(NamedTuple):
    """A worker's shard of a block as its memory shows it: as `ShardLayout`, but for the numbers of layers and heads.

    Where layers differ, or the axis of their heads is not known, `heads` is 0, and `order` describes all layers.
    """

    layers: int
    heads: int
    head_axis: int | None
    dtype: str
    order: str


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One worker's shard of every KV block.

    It holds `heads`, numbered over the whole model, of `layers`. `order` describes a head of a block of a layer: its
    axes, in the order of memory. Among these, the axis of the heads is number `head_axis`; None with one head, whose
    axis may be anywhere. `block_bytes` is the shard's size. `indivisible` is the reason why a shard can only be
    exchanged whole, with one of an equal layout.
    """

    layers: Extent
    heads: Extent
    block_size: int
    dtype: str
    order: str
    head_axis: int | None
    block_bytes: int
    indivisible: str = ""

    @property
    def cells(self) -> int:
        """Layers times heads."""
        return self.layers.size * self.heads.size


class ShardPart(NamedTuple):
    """A part of a staged shard, and its place in the shard of the worker that takes it: `layers` times `heads` cells.

    The staged shard has `staged_layers` times `staged_heads` cells. The part begins there at `from_layer` and
    `from_head`, and in the other shard at `to_layer` and `to_head`. In both, heads are the axis `head_axis` of a block
    of a layer.
    """

    layers: int
    heads: int
    head_axis: int
    staged_layers: int
    staged_heads: int
    from_layer: int
    from_head: int
    to_layer: int
    to_head: int

    @property
    def cells(self) -> int:
        """Layers times heads."""
        return self.layers * self.heads

    @property
    def staged_cells(self) -> int:
        """The cells of the staged shard."""
        return self.staged_layers * self.staged_heads

    def overlaps(self, other: "ShardPart") -> bool:
        """True if both have a cell of the shard that takes them in common."""
        layers = Extent(self.to_layer, self.to_layer + self.layers)
        heads = Extent(self.to_head, self.to_head + self.heads)
        return (
            layers.meet(Extent(other.to_layer, other.to_layer + other.layers)).size > 0
            and heads.meet(Extent(other.to_head, other.to_head + other.heads)).size > 0
        )


class Cut(NamedTuple):
    """The part of the sent shard number `shard` that the target's worker of rank `worker` takes; None: all of it."""

    shard: int
    worker: int
    part: ShardPart | None


@dataclass(frozen=True, slots=True)
class Resharding:
    """How shards become other shards.

    `senders` are the ranks of the source's workers whose shards are sent: of several with the same heads, one. The
    `cuts` fill every layer and head of the target's workers exactly once.
    """

    senders: tuple[int, ...]
    cuts: tuple[Cut, ...]

    def taken(self, shard: int) -> list[Cut]:
        """The cuts of the sent shard number `shard`."""
        return [cut for cut in self.cuts if cut.shard == shard]


def reshard(source: Sequence[ShardLayout], target: Sequence[ShardLayout]) -> Resharding | None:
    """How the shards of the source's workers become those of the target's, both in the order of ranks.

    None if the layouts are equal: each shard goes whole to the worker of the same rank.

    Raises:
        TransferFailed: they cannot, for the reason in its text.
    """
    if tuple(source) == tuple(target):
        return None
    _check_alike(source, target)
    taken = [
        (rank, worker, cells)
        for worker, shard in enumerate(target)
        for rank, cells in _sources(_Cells(shard.layers, shard.heads), source)
    ]
    senders = tuple(sorted({rank for rank, _, _ in taken}))
    return Resharding(
        senders,
        tuple(
            Cut(senders.index(rank), worker, _part(source[rank], target[worker], cells))
            for rank, worker, cells in taken
        ),
    )


def _check_alike(source: Sequence[ShardLayout], target: Sequence[ShardLayout]) -> None:
    """Raise TransferFailed if shards cannot be cut, or their cells are not the same."""
    shards = [*source, *target]
    if not source or not target:
        raise _unlike("the KV cache of one of the replicas cannot be moved")
    if reason := next((shard.indivisible for shard in shards if shard.indivisible), ""):
        raise _unlike(f"the replicas' workers hold unlike shards of the KV cache, which cannot be cut: {reason}")
    for name, values in (
        ("block sizes", {shard.block_size for shard in shards}),
        ("types", {shard.dtype for shard in shards}),
        ("orders in memory", {shard.order for shard in shards}),
        ("orders in memory", {shard.head_axis for shard in shards if shard.head_axis is not None}),
        ("sizes of a head", {shard.block_bytes / shard.cells for shard in shards}),
    ):
        if len(values) > 1:
            raise _unlike(f"the replicas' KV caches have unlike {name}")


def _unlike(reason: str) -> TransferFailed:
    return TransferFailed(reason, Cause.FINGERPRINT)


class _Cells(NamedTuple):
    """All `heads` of all `layers`."""

    layers: Extent
    heads: Extent

    def meet(self, other: "_Cells") -> "_Cells":
        return _Cells(self.layers.meet(other.layers), self.heads.meet(other.heads))

    def without(self, inner: "_Cells") -> "list[_Cells]":
        """The other cells of this range, `inner` being some of it."""
        (low, high), (left, right) = inner
        around = (
            _Cells(Extent(self.layers.first, low), self.heads),
            _Cells(Extent(high, self.layers.last), self.heads),
            _Cells(inner.layers, Extent(self.heads.first, left)),
            _Cells(inner.layers, Extent(right, self.heads.last)),
        )
        return [cells for cells in around if cells]

    def __bool__(self) -> bool:
        return self.layers.size > 0 and self.heads.size > 0


def _sources(wanted: _Cells, source: Sequence[ShardLayout]) -> list[tuple[int, _Cells]]:
    """A partition of the wanted cells, each part with the lowest rank that holds it."""
    found: list[tuple[int, _Cells]] = []
    missing = [wanted]
    for rank, shard in enumerate(source):
        held = _Cells(shard.layers, shard.heads)
        met = [(cells, both) for cells in missing if (both := cells.meet(held))]
        found += [(rank, both) for _, both in met]
        for cells, both in met:
            missing.remove(cells)
            missing += cells.without(both)
    if missing:
        raise _unlike("the source's workers lack layers or heads of the target's")
    return found


def _part(source: ShardLayout, target: ShardLayout, cells: _Cells) -> ShardPart | None:
    if (source.layers, source.heads) == (target.layers, target.heads) == cells:
        return None
    axes = [shard.head_axis for shard in (source, target) if shard.head_axis is not None]
    return ShardPart(
        layers=cells.layers.size,
        heads=cells.heads.size,
        head_axis=axes[0] if axes else 0,
        staged_layers=source.layers.size,
        staged_heads=source.heads.size,
        from_layer=cells.layers.first - source.layers.first,
        from_head=cells.heads.first - source.heads.first,
        to_layer=cells.layers.first - target.layers.first,
        to_head=cells.heads.first - target.heads.first,
    )

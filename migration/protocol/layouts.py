"""Layouts of KV blocks.

Every worker of an engine holds a shard of each KV block: some of the model's layers, and of each some of its KV heads.
With tensor parallelism over n workers, rank r has the r-th part of the heads; if there are fewer heads than workers,
several workers have the same one.

All ranges are half-open: [first, last).
"""

from dataclasses import dataclass
from typing import NamedTuple


class Extent(NamedTuple):
    """The numbers from `first` to before `last`."""

    first: int
    last: int

    @property
    def size(self) -> int:
        """How many there are; negative for none."""
        return self.last - self.first


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

"""Layouts of shards for tests that need no memory behind them."""

from migration.protocol.layouts import Extent, ShardLayout, heads_of


def shards(
    workers: int = 1, heads: int = 1, layers: int = 1, block_size: int = 4, cell_bytes: int = 4, whole: str = ""
) -> tuple[ShardLayout, ...]:
    """The shards of `workers` workers, of a model with `heads` KV heads, each of `cell_bytes` per layer and block.

    With a reason, `whole`, they cannot be cut.
    """
    own = (heads_of(rank, workers, heads) for rank in range(workers))
    return tuple(
        ShardLayout(Extent(0, layers), h, block_size, "int32", "packed", 0, layers * h.size * cell_bytes, whole)
        for h in own
    )

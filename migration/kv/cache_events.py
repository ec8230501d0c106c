"""The changes of an engine's prefix cache, as vLLM's scheduler publishes them, step by step.

vLLM's events are those of vllm/distributed/kv_events.py, of which only the names of blocks are decoded here. Mell's
connector adds one of its own, `PoolContents`. A batch has the changes in the order in which vLLM made them, and behind
them the events of the connector: so the contents are those of the pool at the end of their batch, whatever the steps
in flight have changed since.

A name is the low 64 bits of vLLM's hash of a block. Two blocks may have the same name: each is stored and removed by
an event of its own.
"""

import array
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

NAME_BYTES = 8
"""Bytes of a name in `PoolContents`."""


class BlocksStored(msgspec.Struct, tag="BlockStored", frozen=True, gc=False):
    """Blocks of these names are in the cache from now on."""

    block_hashes: list[int]


class BlocksRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True, gc=False):
    """A block of each of these names has left the cache."""

    block_hashes: list[int]


class CacheCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True, gc=False):
    """All blocks have left the cache."""


class PoolContents(msgspec.Struct, tag="PoolContents", frozen=True, gc=False):
    """The names of all blocks in the cache, encoded by `encode_names`."""

    names: bytes


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared | PoolContents


class _Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """vLLM's `KVEventBatch`."""

    ts: float
    events: list[CacheEvent]


_batches = msgspec.msgpack.Decoder(_Batch)


def decode_batch(payload: bytes) -> Sequence[CacheEvent]:
    """The events of an encoded batch. Raises msgspec.DecodeError."""
    return _batches.decode(payload).events


def decode_names(names: bytes) -> Sequence[int]:
    """The inverse of `encode_names`."""
    decoded = array.array("Q", names)
    if sys.byteorder == "little":
        decoded.byteswap()
    return decoded


def encode_names(names: Iterable[int]) -> bytes:
    """Names as `PoolContents` has them: 8 bytes each, the highest first."""
    return b"".join(name.to_bytes(NAME_BYTES, "big") for name in names)


def pool_contents(pool: Any) -> PoolContents:
    """The present contents of vLLM's `BlockPool`, whose blocks all belong to one group of layers."""
    keys = [block.block_hash for block in pool.blocks]
    return PoolContents(b"".join([key[_NAME] for key in keys if key is not None]))


def delete_blocks(pool: Any, names: bytes | None) -> int:
    """Remove the blocks of these names (see `encode_names`; None: all) from vLLM's prefix cache; their number.

    Blocks of requests stay with them, and are only not found any more.
    """
    wanted = None if names is None else {names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)}
    keyed = ((block.block_id, block.block_hash) for block in pool.blocks)
    found = {id for id, key in keyed if key is not None and (wanted is None or key[_NAME] in wanted)}
    pool.evict_blocks(found)
    return len(found)


_NAME = slice(-12, -4)
"""The place of the name in a block's key: its hash, and 4 bytes for its group (`make_block_hash_with_group_id`)."""

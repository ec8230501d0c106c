"""The changes of an engine's prefix cache, as vLLM's scheduler publishes them, step by step.

vLLM's events are those of vllm/distributed/kv_events.py, of which only the names of blocks are decoded here: they are
about the pool, the memory of the accelerator. Mell's connector adds the changes of the tier of host memory, if there is
one, and `PoolContents`. A batch has the changes in the order in which vLLM made them, and behind them the events of the
connector: so the contents are those of pool and tier at the end of their batch, whatever the steps in flight have
changed since.

A name is the low 64 bits of vLLM's hash of a block. Two blocks may have the same name: each is stored and removed by
an event of its own.
"""

import array
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

NAME_BYTES = 8
"""Bytes of an encoded name."""


class BlocksStored(msgspec.Struct, tag="BlockStored", frozen=True, gc=False):
    """Blocks of these names are in the cache from now on."""

    block_hashes: list[int]


class BlocksRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True, gc=False):
    """A block of each of these names has left the cache."""

    block_hashes: list[int]


class CacheCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True, gc=False):
    """All blocks have left the cache."""


class HostStored(msgspec.Struct, tag="HostStored", frozen=True, gc=False):
    """Blocks of these names, encoded by `encode_names`, are in the tier of host memory from now on."""

    names: bytes


class HostRemoved(msgspec.Struct, tag="HostRemoved", frozen=True, gc=False):
    """A block of each of these names, encoded by `encode_names`, has left the tier of host memory."""

    names: bytes


class PoolContents(msgspec.Struct, tag="PoolContents", frozen=True, gc=False):
    """The names of all blocks in the cache, and of those in the tier of host memory, encoded by `encode_names`."""

    names: bytes
    host: bytes = b""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared | HostStored | HostRemoved | PoolContents


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


def split_names(names: bytes) -> list[bytes]:
    """The encoded names, one by one."""
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def key_name(key: bytes) -> bytes:
    """The encoded name in the key of a block: behind its hash come 4 bytes for its group of layers.

    Keys of vLLM's pool (`make_block_hash_with_group_id`) and of its offloading (`make_offload_key`) are alike.
    """
    return key[-12:-4]


def pool_contents(pool: Any, host: Iterable[bytes] = ()) -> PoolContents:
    """The present contents of vLLM's `BlockPool`, whose blocks all belong to one group of layers.

    `host` are the encoded names of the blocks in the tier of host memory.
    """
    keys = [block.block_hash for block in pool.blocks]
    return PoolContents(b"".join([key_name(key) for key in keys if key is not None]), b"".join(host))


def delete_blocks(pool: Any, names: bytes | None) -> int:
    """Remove the blocks of these names (see `encode_names`; None: all) from vLLM's prefix cache; their number.

    Blocks of requests stay with them, and are only not found any more.
    """
    wanted = None if names is None else set(split_names(names))
    keyed = ((block.block_id, block.block_hash) for block in pool.blocks)
    found = {id for id, key in keyed if key is not None and (wanted is None or key_name(key) in wanted)}
    pool.evict_blocks(found)
    return len(found)

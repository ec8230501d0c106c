"""Sizes of staging slots, and time limits of copies: both follow from the bytes of KV blocks.

A copy goes by chunks, and a chunk fills a slot. Beside its bytes, a chunk costs messages between two replicas, which
take about a millisecond whatever its size. So a slot holds as many blocks as it takes for the copies of a chunk to
outweigh its messages, on the device that holds the KV cache, but no more than the longest context has.

A copy that takes much longer than expected has failed: the link or the peer is gone, and the request goes by tokens.
The expectation is the scheduler's prediction for the same move, which knows the link and the other moves on it.
"""

from dataclasses import dataclass

from policies.model import Blocks, Bytes

MIB = 1 << 20

HOST_CHUNK, GPU_CHUNK = 8 * MIB, 64 * MIB
"""The least efficient chunks. A CPU copies 8 MiB in 1 to 4 ms. On an H100, slots of 8 MiB moved 15 GB/s, messages
included, and slots of 64 MiB 107 GB/s.
"""
LEAST_BLOCKS = 2
"""The fewest blocks of a slot, however large they are: the speed of staging is measured between one block and more."""
MAPPED_SLOTS, SENT_SLOTS = 4, 6
"""Slots of one worker. The target reads a mapped slot itself, so only outgoing blocks take slots: two in each of the
stages gather and scatter. If blocks are sent, incoming ones take slots, too: one in each stage of either direction
(gather, send; receive, scatter), and two to spare.
"""
LATE = 4.0
"""The time after which a copy has failed, as a multiple of its expected time: moves that begin later share the link."""
SLOWEST = 1e8
"""The least rate of a link that is waited for, in bytes per second. A failed copy makes the scheduler expect a slower
link; without a bound, each failure would make the next time limit longer.
"""
SLOWEST_PREFILL = 100.0
"""The least rate of a prefill that a migration waits for, in tokens per second, whatever else its replica computes."""


@dataclass(frozen=True, slots=True)
class StagingSizes:
    """The staging slots of a replica: `count` slots of `slot_bytes` payload for each of its `workers`."""

    workers: int
    count: int
    slot_bytes: int

    @property
    def memory(self) -> Bytes:
        """Payload bytes of all slots together."""
        return Bytes(self.workers * self.count * self.slot_bytes)


def efficient_slot(shard_bytes: int, context: Blocks, on_gpu: bool) -> Bytes:
    """The payload of a slot: whole shards of `shard_bytes`, for contexts of up to `context` blocks.

    0 for shards of no bytes: the blocks cannot be moved.
    """
    if not shard_bytes:
        return Bytes(0)
    chunk = -(-(GPU_CHUNK if on_gpu else HOST_CHUNK) // shard_bytes)
    return Bytes(max(LEAST_BLOCKS, min(chunk, context)) * shard_bytes)


def time_limit_s(size: float, bytes_per_s: float | None, floor_s: float) -> float:
    """Seconds after which a copy of `size` bytes has failed, at an expected rate; without one, at the least rate.

    `floor_s` is for everything that does not depend on the bytes: messages, connections, and a busy machine.
    """
    return floor_s + LATE * size / max(bytes_per_s or 0.0, SLOWEST)


def prefill_limit_s(tokens: int, floor_s: float) -> float:
    """Seconds after which the source's prefill of `tokens` tokens is not waited for any more.

    `floor_s` is for its turn: the prefills before it, and a busy machine.
    """
    return floor_s + tokens / SLOWEST_PREFILL

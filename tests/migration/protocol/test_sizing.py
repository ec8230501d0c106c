"""Sizes of slots and time limits of copies, for any bytes and links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migration.protocol.sizing import (
    GPU_CHUNK,
    HOST_CHUNK,
    LATE,
    LEAST_BLOCKS,
    MIB,
    SLOWEST,
    StagingSizes,
    efficient_slot,
    time_limit_s,
)
from policies.model import Blocks

Shards = st.integers(1, 4 << 30)
Contexts = st.integers(0, 1 << 20).map(Blocks)
Sizes = st.floats(0.0, 1e13)
Rates = st.none() | st.floats(0.0, 1e13)
Floors = st.floats(0.0, 100.0)


@given(Shards, Contexts, st.booleans())
def test_slot_holds_whole_blocks_and_at_least_two(shard: int, context: Blocks, on_gpu: bool) -> None:
    blocks, rest = divmod(efficient_slot(shard, context, on_gpu), shard)
    assert rest == 0 and blocks >= LEAST_BLOCKS


@given(Shards, Contexts, st.booleans())
def test_slot_is_efficient_unless_the_longest_context_is_smaller(shard: int, context: Blocks, on_gpu: bool) -> None:
    slot = efficient_slot(shard, context, on_gpu)
    assert slot >= min(GPU_CHUNK if on_gpu else HOST_CHUNK, context * shard)


@given(Shards, Contexts, st.booleans())
def test_slot_is_no_larger_than_it_has_to_be(shard: int, context: Blocks, on_gpu: bool) -> None:
    """With one block less it would be inefficient, have one block, or be smaller than a context."""
    less = efficient_slot(shard, context, on_gpu) - shard
    assert less < max(min(GPU_CHUNK if on_gpu else HOST_CHUNK, context * shard), LEAST_BLOCKS * shard)


@pytest.mark.parametrize(
    ("shard", "on_gpu", "mib"),
    [
        (2 * MIB, True, 64),
        (5 * MIB // 4, True, 65),
        (128 << 10, False, 8),
        (20 * MIB, False, 40),
        (80 * MIB, True, 160),
    ],
    ids=["8B", "70B on four GPUs", "tiny on a CPU", "70B on a CPU", "blocks above a chunk"],
)
def test_slot_of_a_model(shard: int, on_gpu: bool, mib: int) -> None:
    assert efficient_slot(shard, Blocks(1000), on_gpu) == mib * MIB


def test_blocks_that_cannot_be_moved_take_no_memory() -> None:
    assert efficient_slot(0, Blocks(1000), True) == 0


def test_memory_is_that_of_all_workers() -> None:
    assert StagingSizes(workers=4, count=6, slot_bytes=64 * MIB).memory == 1536 * MIB


@given(Sizes, Rates, Floors)
def test_limit_is_never_below_its_floor_and_always_finite(size: float, rate: float | None, floor_s: float) -> None:
    assert floor_s <= time_limit_s(size, rate, floor_s) <= floor_s + LATE * size / SLOWEST


@given(Sizes, st.floats(SLOWEST, 1e13), Floors)
def test_limit_leaves_a_multiple_of_the_expected_time(size: float, rate: float, floor_s: float) -> None:
    assert time_limit_s(size, rate, floor_s) - floor_s == pytest.approx(LATE * size / rate, abs=1e-9)


@given(Sizes, Sizes, Rates)
def test_limit_grows_with_the_bytes(one: float, other: float, rate: float | None) -> None:
    small, large = sorted((one, other))
    assert time_limit_s(small, rate, 1.0) <= time_limit_s(large, rate, 1.0)


@given(Sizes, Rates, st.floats(0.0, 1e13))
def test_limit_does_not_grow_with_the_rate(size: float, rate: float | None, more: float) -> None:
    assert time_limit_s(size, (rate or 0.0) + more, 1.0) <= time_limit_s(size, rate, 1.0)

"""Copies between a KV cache and a staging slot, on CPU tensors of every layout that vLLM may use."""

from collections.abc import Sequence

import pytest
import torch

from migration.errors import TransferFailed
from migration.kv.layout import CacheLayout

BLOCKS = 8
BLOCK_FIRST, KV_FIRST = (BLOCKS, 2, 4, 3), (2, BLOCKS, 4, 3)
shapes = pytest.mark.parametrize("shape", [BLOCK_FIRST, KV_FIRST], ids=["blocks first", "keys and values first"])


def cache(shape: Sequence[int], *dtypes: torch.dtype, fill: bool = True) -> dict[str, torch.Tensor]:
    """A cache with one layer per dtype; every element differs from its neighbours."""
    size = torch.Size(shape).numel()
    values = [torch.arange(size) % 120 + i if fill else torch.zeros(size) for i in range(len(dtypes))]
    return {f"layer.{i}": v.to(d).reshape(tuple(shape)) for i, (v, d) in enumerate(zip(values, dtypes, strict=True))}


def block(tensor: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    return tensor.select(dim, index)


def staging(layout: CacheLayout, count: int) -> memoryview:
    return memoryview(bytearray(count * layout.block_bytes))


@shapes
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,), (torch.bfloat16,) * 3, (torch.float32, torch.bfloat16, torch.uint8)],
    ids=["one layer", "several layers", "layers of several types"],
)
def test_blocks_survive_the_way_to_another_cache(shape: Sequence[int], dtypes: tuple[torch.dtype, ...]) -> None:
    source, target = cache(shape, *dtypes), cache(shape, *dtypes, fill=False)
    here, there = CacheLayout(source, BLOCKS), CacheLayout(target, BLOCKS)
    memory = staging(here, 3)
    here.gather([5, 0, 2], memory)
    there.scatter([1, 7, 3], 3, 0, memory)
    dim = shape.index(BLOCKS)
    for name, tensor in target.items():
        for old, new in [(5, 1), (0, 7), (2, 3)]:
            assert torch.equal(block(tensor, dim, new), block(source[name], dim, old))


@shapes
def test_blocks_that_were_not_named_are_left_alone(shape: Sequence[int]) -> None:
    target = cache(shape, torch.float32, fill=False)
    layout = CacheLayout(target, BLOCKS)
    layout.scatter([2], 1, 0, memoryview(bytearray(b"\1" * layout.block_bytes)))
    touched = [bool(block(target["layer.0"], shape.index(BLOCKS), i).any()) for i in range(BLOCKS)]
    assert touched == [i == 2 for i in range(BLOCKS)]


@shapes
def test_staged_blocks_can_be_skipped(shape: Sequence[int]) -> None:
    source, target = cache(shape, torch.bfloat16), cache(shape, torch.bfloat16, fill=False)
    layout = CacheLayout(source, BLOCKS)
    memory = staging(layout, 4)
    layout.gather([4, 5, 6, 7], memory)
    CacheLayout(target, BLOCKS).scatter([0], 4, 2, memory)
    dim = shape.index(BLOCKS)
    assert torch.equal(block(target["layer.0"], dim, 0), block(source["layer.0"], dim, 6))


def test_caches_that_are_views_of_other_memory_are_copied_alike() -> None:
    source = {"a": cache(KV_FIRST, torch.float32)["layer.0"].permute(0, 1, 3, 2)}
    target = {"a": torch.zeros(2, BLOCKS, 4, 3).permute(0, 1, 3, 2)}
    layout = CacheLayout(source, BLOCKS)
    memory = staging(layout, 1)
    layout.gather([3], memory)
    CacheLayout(target, BLOCKS).scatter([6], 1, 0, memory)
    assert torch.equal(target["a"][:, 6], source["a"][:, 3])


def test_layers_are_staged_by_name_whatever_their_order() -> None:
    source = cache(BLOCK_FIRST, torch.float32, torch.float32)
    memories = []
    for caches in (source, dict(reversed(source.items()))):
        layout = CacheLayout(caches, BLOCKS)
        memories.append(staging(layout, 2))
        layout.gather([1, 2], memories[-1])
    assert bytes(memories[0]) == bytes(memories[1])


@shapes
def test_block_bytes_count_all_layers(shape: Sequence[int]) -> None:
    assert CacheLayout(cache(shape, torch.float32, torch.bfloat16), BLOCKS).block_bytes == 2 * 4 * 3 * (4 + 2)


@pytest.mark.parametrize("blocks", [[], [-1], [0, BLOCKS]], ids=["no block", "below zero", "past the last"])
def test_blocks_that_do_not_exist_are_refused(blocks: list[int]) -> None:
    layout = CacheLayout(cache(BLOCK_FIRST, torch.float32), BLOCKS)
    with pytest.raises(TransferFailed, match="no such KV blocks"):
        layout.gather(blocks, staging(layout, len(blocks)))
    with pytest.raises(TransferFailed, match="no such KV blocks"):
        layout.scatter(blocks, len(blocks), 0, staging(layout, len(blocks)))


@pytest.mark.parametrize(("skip", "count"), [(-1, 1), (3, 1), (1, 3)], ids=["negative skip", "behind", "too many"])
def test_more_blocks_than_were_staged_are_refused(skip: int, count: int) -> None:
    layout = CacheLayout(cache(BLOCK_FIRST, torch.float32), BLOCKS)
    with pytest.raises(TransferFailed, match="than the 3 staged"):
        layout.scatter(list(range(count)), 3, skip, staging(layout, 3))


@pytest.mark.parametrize("size", [-1, 1], ids=["a byte short", "a byte long"])
def test_memory_of_another_size_is_refused_and_nothing_copied(size: int) -> None:
    caches = cache(BLOCK_FIRST, torch.float32)
    layout, before = CacheLayout(caches, BLOCKS), caches["layer.0"].clone()
    memory = memoryview(bytearray(2 * layout.block_bytes + size))
    with pytest.raises(TransferFailed, match="are not 2 blocks"):
        layout.gather([0, 1], memory)
    with pytest.raises(TransferFailed, match="are not 2 blocks"):
        layout.scatter([0, 1], 2, 0, memory)
    assert torch.equal(caches["layer.0"], before)


def test_cache_without_a_block_dimension_is_refused() -> None:
    with pytest.raises(TransferFailed, match=r"KV cache of a: no dimension of \(3, 4\) counts 8 blocks"):
        CacheLayout({"a": torch.zeros(3, 4)}, BLOCKS)


def test_of_two_dimensions_that_could_count_blocks_the_first_does() -> None:
    layout = CacheLayout({"a": torch.zeros(BLOCKS, BLOCKS, 2)}, BLOCKS)
    assert layout.describe() == f"torch.float32:0:({BLOCKS}, 2)"


@pytest.mark.parametrize(
    "other",
    [
        cache(KV_FIRST, torch.float32),
        cache(BLOCK_FIRST, torch.bfloat16),
        cache(BLOCK_FIRST, torch.float32, torch.float32),
        cache((BLOCKS, 2, 4, 5), torch.float32),
    ],
    ids=["dimensions", "type", "number of layers", "shape of a block"],
)
def test_caches_that_differ_describe_themselves_differently(other: dict[str, torch.Tensor]) -> None:
    assert CacheLayout(other, BLOCKS).describe() != CacheLayout(cache(BLOCK_FIRST, torch.float32), BLOCKS).describe()


def test_caches_that_differ_only_in_the_number_of_blocks_are_alike() -> None:
    small, large = cache((4, 2, 4, 3), torch.float32), cache((9, 2, 4, 3), torch.float32)
    assert CacheLayout(small, 4).describe() == CacheLayout(large, 9).describe()

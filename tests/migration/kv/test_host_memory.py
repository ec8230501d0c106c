"""Blocks in memory of the host: they come back unchanged, and not at all if anything about them has changed."""

from collections.abc import Callable, Sequence

import pytest
import torch

from migration.kv.host.host_memory import HostBlocks

BLOCKS, SLOTS = 12, 6
NAMES = [bytes([index]) * 8 for index in range(BLOCKS)]


def cache(pages: Sequence[int] = (96, 96, 96), seed: int = 1) -> list[torch.Tensor]:
    """The layers of a cache, filled at random; those of a size lie in one allocation, as vLLM's do."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(-128, 128, (BLOCKS * sum(pages),), dtype=torch.int8, generator=generator)
    return [part.view(BLOCKS, -1) for part in memory.split([BLOCKS * page for page in pages])]


def bytes_of(layers: Sequence[torch.Tensor], block: int) -> list[torch.Tensor]:
    return [layer[block].clone() for layer in layers]


def names(*blocks: int) -> list[bytes]:
    return [NAMES[block] for block in blocks]


@pytest.mark.parametrize(
    "pages", [(96, 96, 96), (64,), (24, 40, 40), (10, 6), (7, 16)], ids=["equal", "one layer", "words", "pairs", "odd"]
)
def test_blocks_come_back_unchanged_in_other_blocks(pages: Sequence[int]) -> None:
    layers = cache(pages)
    memory = HostBlocks(layers, SLOTS)
    before = [bytes_of(layers, block) for block in (3, 7, 4)]
    memory.store([3, 7, 4], [5, 0, 2], names(3, 7, 4))
    for layer in layers:
        layer.random_()
    others = [bytes_of(layers, block) for block in range(BLOCKS)]
    assert memory.load([5, 0, 2], names(3, 7, 4), [1, 9, 8]) == 3
    assert memory.load([2], names(4), [11]) == 1, "a part of them alone"
    for block, want in zip((1, 9, 8, 11), [*before, before[2]], strict=True):
        assert all(torch.equal(layer[block], each) for layer, each in zip(layers, want, strict=True))
    for block in set(range(BLOCKS)) - {1, 9, 8, 11}:
        assert all(torch.equal(layer[block], each) for layer, each in zip(layers, others[block], strict=True))


def test_slots_are_overwritten() -> None:
    layers = cache()
    memory = HostBlocks(layers, SLOTS)
    memory.store([1, 2], [0, 1], names(1, 2))
    memory.store([3], [1], names(3))
    want = bytes_of(layers, 3)
    assert memory.load([1], names(2), [5]) == 0
    assert memory.load([0, 1], names(1, 3), [5, 6]) == 2
    assert all(torch.equal(layer[6], each) for layer, each in zip(layers, want, strict=True))


def noise(layer: torch.Tensor) -> None:
    layer[4, 17] += 1


def swapped_parts(layer: torch.Tensor) -> None:
    layer[4] = torch.cat([layer[4, 48:], layer[4, :48]])


def zeroed(layer: torch.Tensor) -> None:
    layer[4] = 0


@pytest.mark.parametrize("spoil", [noise, swapped_parts, zeroed])
def test_a_changed_block_is_not_loaded_and_neither_are_those_behind_it(spoil: Callable[[torch.Tensor], None]) -> None:
    layers = cache()
    memory = HostBlocks(layers, SLOTS)
    memory.store([1, 2, 3], [3, 4, 5], names(1, 2, 3))
    for part in memory._host._here():
        spoil(part.tensor.view(torch.int8).view(3, SLOTS, -1)[1])
    before = layers[0].clone()
    assert memory.load([3, 4, 5], names(1, 2, 3), [7, 8, 9]) == 1
    before[7] = before[1]
    assert torch.equal(layers[0], before), "only the block before it"


def test_a_block_whose_layers_have_changed_places_is_not_loaded() -> None:
    layers = cache()
    memory = HostBlocks(layers, SLOTS)
    memory.store([1], [3], names(1))
    (stack,) = memory._host._here()
    host = stack.tensor.view(torch.int8).view(3, SLOTS, -1)
    host[[0, 1], 3] = host[[1, 0], 3]
    assert memory.load([3], names(1), [7]) == 0


@pytest.mark.parametrize("slot", [3, 4], ids=["another block", "nothing"])
def test_a_slot_with_something_else_is_not_loaded(slot: int) -> None:
    memory = HostBlocks(cache(), SLOTS)
    memory.store([1], [3], names(1))
    assert memory.load([slot], names(2), [7]) == 0


def test_a_failed_store_leaves_nothing_to_be_loaded() -> None:
    memory = HostBlocks(cache(), SLOTS)
    memory.store([1], [3], names(1))
    with pytest.raises(Exception, match="no such KV blocks"):
        memory.store([BLOCKS], [3], names(1))
    assert memory.load([3], names(1), [7]) == 0


def test_memory_counts_the_bytes_of_a_block() -> None:
    assert HostBlocks(cache((96, 32)), SLOTS).block_bytes == 128

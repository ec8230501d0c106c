"""Memory that comes with its use, and goes."""

import psutil
import pytest
import torch

from migration.kv.pages import UntouchedPages, give_back

BLOCKS, BLOCK = 64, 1 << 18


def cache(block_bytes: int) -> torch.Tensor:
    """A cache as vLLM makes it."""
    with UntouchedPages():
        return torch.zeros(BLOCKS * block_bytes, dtype=torch.int8, device="cpu")


def test_a_cache_is_in_memory_as_far_as_it_is_written() -> None:
    before = psutil.Process().memory_info().rss
    made = cache(1 << 21)
    assert psutil.Process().memory_info().rss - before < 4 << 20, "128 MiB of it are not there yet"
    made[: 1 << 26] = 1
    assert psutil.Process().memory_info().rss - before == pytest.approx(1 << 26, rel=0.1)
    assert not made[1 << 26 :].any()


def test_other_tensors_are_as_always() -> None:
    with UntouchedPages():
        assert torch.zeros(8, dtype=torch.int8).tolist() == [0] * 8
        assert torch.zeros((2, 3)).shape == (2, 3)
        assert torch.ones(1 << 21, dtype=torch.int8).all()


def layers_first(raw: torch.Tensor) -> list[torch.Tensor]:
    """Two layers, one behind the other."""
    return list(raw.view(2, BLOCKS, -1).unbind(0))


def blocks_first(raw: torch.Tensor) -> list[torch.Tensor]:
    """Two layers, whose blocks alternate."""
    return list(raw.view(BLOCKS, 2, -1).unbind(1))


@pytest.mark.parametrize("arranged", [layers_first, blocks_first])
@pytest.mark.parametrize("block_bytes", [BLOCK, 3 << 11], ids=["whole pages", "parts of pages"])
def test_blocks_that_are_given_back_are_zeros_and_others_stay(arranged: object, block_bytes: int) -> None:
    raw = cache(block_bytes)
    layers = arranged(raw)  # type: ignore[operator]
    raw.fill_(7)
    first = 20
    give_back(layers, first)
    for layer in layers:
        assert (layer[:first] == 7).all(), "blocks below keep their content"
    # Pages are given back whole, so at most two pages of each range keep something.
    kept = sum(int((layer[first:] == 7).sum()) for layer in layers)
    assert kept <= 2 * 2 * 4096
    raw.fill_(5)
    assert all((layer == 5).all() for layer in layers), "the memory can be used again"


def test_nothing_behind_the_cache_is_given_back() -> None:
    raw = torch.full((1 << 20,), 3, dtype=torch.int8)
    inner = raw[: 1 << 19].view(BLOCKS, 2, -1)
    give_back(list(inner.unbind(1)), 4)
    assert (raw[1 << 19 :] == 3).all()

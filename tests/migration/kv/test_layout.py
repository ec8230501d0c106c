"""Copies between a KV cache and a staging slot, on CPU tensors of every layout that vLLM may use."""

from collections.abc import Sequence

import pytest
import torch

from migration.kv.layout import CacheLayout
from migration.protocol.errors import TransferFailed
from tests.migration.kv.caches import LAYOUTS, paged

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
def test_blocks_arrive_unchanged_in_another_cache(shape: Sequence[int], dtypes: tuple[torch.dtype, ...]) -> None:
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
def test_other_blocks_are_unchanged(shape: Sequence[int]) -> None:
    target = cache(shape, torch.float32, fill=False)
    layout = CacheLayout(target, BLOCKS)
    layout.scatter([2], 1, 0, memoryview(bytearray(b"\1" * layout.block_bytes)))
    touched = [bool(block(target["layer.0"], shape.index(BLOCKS), i).any()) for i in range(BLOCKS)]
    assert touched == [i == 2 for i in range(BLOCKS)]


@shapes
def test_first_staged_blocks_can_be_skipped(shape: Sequence[int]) -> None:
    source, target = cache(shape, torch.bfloat16), cache(shape, torch.bfloat16, fill=False)
    layout = CacheLayout(source, BLOCKS)
    memory = staging(layout, 4)
    layout.gather([4, 5, 6, 7], memory)
    CacheLayout(target, BLOCKS).scatter([0], 4, 2, memory)
    dim = shape.index(BLOCKS)
    assert torch.equal(block(target["layer.0"], dim, 0), block(source["layer.0"], dim, 6))


def test_caches_that_are_views_are_copied_like_others() -> None:
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


def test_first_of_two_possible_block_dimensions_counts() -> None:
    layout = CacheLayout({"a": torch.zeros(BLOCKS, BLOCKS, 2)}, BLOCKS)
    assert layout.shape == (1, 0, None, "", f"torch.float32({BLOCKS}, 2)@(1, 2)")


@pytest.mark.parametrize(
    "other",
    [
        cache(KV_FIRST, torch.float32),
        cache(BLOCK_FIRST, torch.bfloat16),
        cache(BLOCK_FIRST, torch.float32, torch.float32),
        cache((BLOCKS, 2, 4, 5), torch.float32),
        {"layer.0": torch.zeros(BLOCKS, 4, 2, 3).permute(0, 2, 1, 3)},
    ],
    ids=["dimensions", "type", "number of layers", "shape of a block", "order in memory"],
)
def test_different_caches_have_different_shapes(other: dict[str, torch.Tensor]) -> None:
    assert CacheLayout(other, BLOCKS).shape != CacheLayout(cache(BLOCK_FIRST, torch.float32), BLOCKS).shape


def test_number_of_blocks_is_not_in_the_shape() -> None:
    small, large = cache((4, 2, 4, 3), torch.float32), cache((9, 2, 4, 3), torch.float32)
    assert CacheLayout(small, 4).shape == CacheLayout(large, 9).shape


# --- the layouts of vLLM's GPU backends ---------------------------------------------------------------

gpu_layouts = pytest.mark.parametrize("name", LAYOUTS)


def blocks_of(caches: dict[str, torch.Tensor], *ids: int) -> list[torch.Tensor]:
    """The given blocks of every layer as integers, since random bytes may be NaN."""
    return [layer.view(torch.int16)[i] for layer in caches.values() for i in ids]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@gpu_layouts
@pytest.mark.parametrize("for_gpu", [False, True], ids=["for a CPU", "for a GPU"])
def test_blocks_of_every_layout_arrive_unchanged(name: str, for_gpu: bool) -> None:
    source, target = paged(name, BLOCKS, seed=1), paged(name, BLOCKS)
    here, there = (CacheLayout(caches, BLOCKS, for_gpu) for caches in (source, target))
    memory = staging(here, 3)
    here.gather([5, 0, 2], memory)
    there.scatter([7, 3], 3, 1, memory)
    assert same(blocks_of(target, 7, 3), blocks_of(source, 0, 2))
    assert not any(block.any() for block in blocks_of(target, 0, 1, 2, 4, 5, 6))


@gpu_layouts
def test_staged_bytes_do_not_depend_on_the_kind_of_copy(name: str) -> None:
    source, staged = paged(name, BLOCKS, seed=1), []
    for for_gpu in (False, True):
        layout = CacheLayout(source, BLOCKS, for_gpu)
        staged.append(staging(layout, 2))
        layout.gather([6, 1], staged[-1])
    assert bytes(staged[0]) == bytes(staged[1])


@gpu_layouts
def test_one_kernel_copies_all_layers_of_an_allocation(name: str) -> None:
    assert CacheLayout(paged(name, BLOCKS), BLOCKS, for_gpu=True).kernels == 1


@pytest.mark.parametrize(("name", "copies"), [("LBHNC", 1), ("BLNHC", 1), ("LHBNC", 12)])
def test_on_a_cpu_one_copy_moves_all_layers_whose_blocks_are_contiguous(name: str, copies: int) -> None:
    assert CacheLayout(paged(name, BLOCKS), BLOCKS).kernels == copies


@pytest.mark.parametrize("name", ["LBHNC", "BLNHC", "LHBNC"])
def test_both_kinds_of_copies_stage_the_same_bytes(name: str) -> None:
    caches = paged(name, BLOCKS, seed=1)
    staged: list[memoryview] = []
    for for_gpu in (False, True):
        layout = CacheLayout(caches, BLOCKS, for_gpu)
        staged.append(staging(layout, 3))
        layout.gather([6, 0, 3], staged[-1])
    assert staged[0] == staged[1]


@pytest.mark.parametrize("name", ["LBHNC", "BLNHC", "LHBNC"])
def test_skipped_blocks_are_left_out_of_every_layer(name: str) -> None:
    source, target = paged(name, BLOCKS, seed=1), paged(name, BLOCKS)
    layout = CacheLayout(source, BLOCKS)
    memory = staging(layout, 3)
    layout.gather([5, 1, 4], memory)
    CacheLayout(target, BLOCKS).scatter([7, 2], 3, 1, memory)
    for layer, blocks in target.items():
        filled = [i for i in range(BLOCKS) if blocks[i].view(torch.int16).any()]
        assert filled == [2, 7]
        for old, new in [(1, 7), (4, 2)]:
            assert torch.equal(blocks[new].view(torch.int16), source[layer][old].view(torch.int16))


def test_layers_in_several_allocations_need_one_kernel_each() -> None:
    caches = cache(BLOCK_FIRST, torch.bfloat16, torch.bfloat16, torch.float32)
    assert CacheLayout(caches, BLOCKS, for_gpu=True).kernels == 3


def test_layers_at_uneven_distances_are_not_merged() -> None:
    buffer = torch.arange(4 * BLOCKS * 8, dtype=torch.int32).view(4, BLOCKS, 8)
    caches = {f"layer.{i}": buffer[at] for i, at in enumerate([0, 1, 3])}
    layout, staged = CacheLayout(caches, BLOCKS, for_gpu=True), memoryview(bytearray(3 * 8 * 4))
    layout.gather([2], staged)
    assert layout.kernels == 2
    assert torch.equal(torch.frombuffer(staged, dtype=torch.int32).view(3, 8), buffer[[0, 1, 3], 2])


def test_layers_are_sorted_by_number_not_alphabetically() -> None:
    caches = paged("LBHNC", BLOCKS, layers=12, seed=1)
    layout = CacheLayout(caches, BLOCKS)
    staged = staging(layout, 1)
    layout.gather([4], staged)
    third = torch.frombuffer(staged, dtype=torch.bfloat16).view(12, 2, 4, 6)[2]
    assert torch.equal(third.view(torch.int16), caches["model.layers.2.self_attn.attn"][4].view(torch.int16))


@gpu_layouts
def test_staged_block_keeps_its_order_in_memory(name: str) -> None:
    """A block that is contiguous in the cache is then one contiguous copy."""
    caches = paged(name, BLOCKS, layers=1, heads=2, tokens=4, content=6, seed=1)
    layout = CacheLayout(caches, BLOCKS)
    staged = staging(layout, 1)
    layout.gather([3], staged)
    block = caches["model.layers.0.self_attn.attn"][3]
    in_memory = block.permute(1, 0, 2) if "NHC" in name else block
    assert bytes(staged) == in_memory.contiguous().view(torch.uint8).numpy().tobytes()


@gpu_layouts
def test_orders_in_memory_are_in_the_shape(name: str) -> None:
    """With as many heads as tokens in a block, the layouts differ in their axis order only."""
    described = CacheLayout(paged(name, BLOCKS, heads=4, tokens=4), BLOCKS).shape
    other = "LBHNC" if "NHC" in name else "LBNHC"
    assert described != CacheLayout(paged(other, BLOCKS, heads=4, tokens=4), BLOCKS).shape


def test_kernel_blocks_of_one_block_are_merged() -> None:
    split = {name: layer.reshape(BLOCKS * 2, 2, 2, 6) for name, layer in paged("LBHNC", BLOCKS, seed=1).items()}
    layout = CacheLayout(split, BLOCKS)
    staged = staging(layout, 1)
    layout.gather([3], staged)
    expected = b"".join(layer[6:8].contiguous().view(torch.uint8).numpy().tobytes() for layer in split.values())
    assert bytes(staged) == expected


def test_layers_that_share_a_cache_are_copied_once() -> None:
    caches = paged("LBHNC", BLOCKS, layers=3)
    bytes_of_three = CacheLayout(caches, BLOCKS).block_bytes
    caches["model.layers.3.self_attn.attn"] = caches["model.layers.1.self_attn.attn"]
    assert CacheLayout(caches, BLOCKS).block_bytes == bytes_of_three


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float64], ids=str)
def test_bits_of_every_type_are_kept(dtype: torch.dtype) -> None:
    source, target = paged("LBNHC", BLOCKS, dtype=dtype, seed=1), paged("LBNHC", BLOCKS, dtype=dtype)
    layout = CacheLayout(source, BLOCKS)
    staged = staging(layout, 1)
    layout.gather([3], staged)
    CacheLayout(target, BLOCKS).scatter([3], 1, 0, staged)
    ends = [[layer.view(torch.uint8)[3] for layer in caches.values()] for caches in (source, target)]
    assert same(*ends)


def test_unaligned_layers_are_copied() -> None:
    buffer = torch.arange(3 + BLOCKS * 5, dtype=torch.uint8)
    layout = CacheLayout({"a": buffer[3:].view(BLOCKS, 5)}, BLOCKS, for_gpu=True)
    staged = staging(layout, 2)
    layout.gather([1, 6], staged)
    assert bytes(staged) == bytes(range(8, 13)) + bytes(range(33, 38))


@pytest.mark.parametrize(
    ("caches", "error"),
    [
        ({}, "on 0 devices"),
        ({"a": torch.zeros(BLOCKS, 2), "b": torch.zeros(BLOCKS, 2, device="meta")}, "on 2 devices"),
        ({"a": [torch.zeros(BLOCKS, 2)]}, "KV cache of a: list is not a tensor"),
        ({"a": torch.zeros(BLOCKS * 64, dtype=torch.int8)}, "no dimension"),
        ({"a": torch.zeros(0, 2, 4, 6)}, "no dimension"),
        ({"a": torch.zeros(BLOCKS, 2, 8)[:, :, ::2], "b": torch.zeros(BLOCKS, 3, dtype=torch.int8)}, "differ too much"),
    ],
    ids=["nothing", "several devices", "several tensors", "raw bytes", "no blocks", "types that do not align"],
)
def test_unsupported_caches_are_refused(caches: dict[str, torch.Tensor], error: str) -> None:
    with pytest.raises(TransferFailed, match=error):
        CacheLayout(caches, BLOCKS)


@pytest.mark.slow
@gpu_layouts
@pytest.mark.parametrize("kernel_tokens", [None, 16], ids=["whole blocks", "kernel blocks"])
def test_layouts_are_those_that_vllm_makes(name: str, kernel_tokens: int | None) -> None:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layers, heads, tokens = 3, 2, 32
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=8, dtype=torch.bfloat16)
    kind = KVCacheLayout[name]
    if kernel_tokens and not (kind.is_layer_compact and kind.is_block_compact):
        pytest.skip("vLLM does not split blocks that are not one piece")
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, layers, kind)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
    ours = paged(name, BLOCKS, layers, heads, tokens, 16, seed=1)
    buffer = torch.empty(0, dtype=torch.int8).set_(ours[names[0]].untyped_storage())
    placed = KVCacheTensor(len(buffer), names, layer_stride, block_stride)
    theirs = dict(zip(names, create_kv_cache_views(buffer, spec, BLOCKS, kind, placed, kernel_tokens), strict=True))
    staged = []
    for caches in (ours, theirs):
        layout = CacheLayout(caches, BLOCKS, for_gpu=True)
        assert layout.kernels == 1
        staged.append(staging(layout, 2))
        layout.gather([5, 2], staged[-1])
    assert bytes(staged[0]) == bytes(staged[1])

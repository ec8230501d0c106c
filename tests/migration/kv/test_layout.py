"""Copies between a KV cache and a staging slot, on CPU tensors of every layout that vLLM may use."""

from collections.abc import Sequence

import pytest
import torch

from migration.kv.layout import CacheLayout
from migration.protocol.errors import TransferFailed
from migration.protocol.layouts import Extent, Resharding, ShardLayout, ShardPart, heads_of, reshard
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


# --- parts of shards of other workers -----------------------------------------------------------------


def shard_layouts(caches: Sequence[CacheLayout], heads: int) -> list[ShardLayout]:
    """The layouts of the workers of an engine, as it describes them, of a model with that many heads."""
    return [
        ShardLayout(
            Extent(0, cache.shape.layers),
            heads_of(rank, len(caches), heads),
            BLOCKS,
            cache.shape.dtype,
            cache.shape.order,
            cache.shape.head_axis,
            cache.block_bytes,
        )
        for rank, cache in enumerate(caches)
    ]


class Engine:
    """The caches of `workers` workers, of a model with that many heads; at random, or zero."""

    def __init__(self, layout: str, workers: int, heads: int, for_gpu: bool, model: dict[str, torch.Tensor] | None):
        self.heads, self.workers = heads, workers
        self.own = [heads_of(rank, workers, heads) for rank in range(workers)]
        self.caches = [paged(layout, BLOCKS, layers=3, heads=own.size) for own in self.own]
        for own, cache in zip(self.own, self.caches, strict=True):
            for name, values in (model or {}).items():
                cache[name].copy_(values[:, own.first : own.last])
        self.layouts = [CacheLayout(cache, BLOCKS, for_gpu) for cache in self.caches]
        self.shards = shard_layouts(self.layouts, heads)

    def holds(self, model: dict[str, torch.Tensor], old: Sequence[int], new: Sequence[int]) -> bool:
        """True if the blocks `new` of all workers are the model's blocks `old`, and the others are zero."""
        others = [block for block in range(BLOCKS) if block not in new]
        return all(
            torch.equal(_bits(layer[list(new)]), _bits(model[name][list(old)][:, own.first : own.last]))
            and not _bits(layer[others]).any()
            for own, cache in zip(self.own, self.caches, strict=True)
            for name, layer in cache.items()
        )


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16)


for_either = pytest.mark.parametrize("for_gpu", [False, True], ids=["cpu copies", "gpu copies"])
engine_pairs = pytest.mark.parametrize(
    ("workers", "others", "heads"),
    [
        (1, 2, 2),
        (2, 1, 2),
        (1, 2, 4),
        (2, 4, 4),
        (4, 2, 8),
        (2, 3, 6),
        (1, 4, 2),
        (4, 1, 2),
        (8, 4, 2),
        (4, 8, 4),
        (6, 2, 3),
    ],
)


def cuts_between(source: Engine, target: Engine) -> Resharding:
    cuts = reshard(source.shards, target.shards)
    assert cuts is not None
    return cuts


@for_either
@gpu_layouts
@engine_pairs
def test_blocks_arrive_unchanged_at_unlike_numbers_of_workers(
    name: str, for_gpu: bool, workers: int, others: int, heads: int
) -> None:
    """Also where heads have copies, and with the first blocks skipped."""
    model = paged(name, BLOCKS, layers=3, heads=heads, seed=1)
    source, target = Engine(name, workers, heads, for_gpu, model), Engine(name, others, heads, for_gpu, None)
    old, new = [5, 0, 2], [1, 7]
    staged = [staging(layout, 3) for layout in source.layouts]
    for layout, memory in zip(source.layouts, staged, strict=True):
        layout.gather(old, memory)
    cuts = cuts_between(source, target)
    for cut in cuts.cuts:
        here, memory = target.layouts[cut.worker], staged[cuts.senders[cut.shard]]
        if cut.part is None:
            here.scatter(new, 3, 1, memory)
        else:
            assert here.staged_bytes(cut.part) == source.layouts[cuts.senders[cut.shard]].block_bytes
            here.scatter_part(new, 3, 1, memory, cut.part)
    assert target.holds(model, old[1:], new)


@for_either
@gpu_layouts
@pytest.mark.parametrize(("workers", "others"), [(1, 2), (4, 2)])
def test_parts_of_a_tail_make_one_that_can_be_placed(name: str, for_gpu: bool, workers: int, others: int) -> None:
    model = paged(name, BLOCKS, layers=3, heads=4, seed=1)
    source, target = Engine(name, workers, 4, for_gpu, model), Engine(name, others, 4, for_gpu, None)
    staged = [staging(layout, 2) for layout in source.layouts]
    for layout, memory in zip(source.layouts, staged, strict=True):
        layout.gather([3, 6], memory)
    taken = [layout.new_taken(2) for layout in target.layouts]
    cuts = cuts_between(source, target)
    for cut in cuts.cuts:
        assert cut.part is not None
        target.layouts[cut.worker].take_part(2, staged[cuts.senders[cut.shard]], cut.part, taken[cut.worker])
    for layout, tail in zip(target.layouts, taken, strict=True):
        layout.place([4, 0], 2, 0, tail)
    assert target.holds(model, [3, 6], [4, 0])


def test_a_part_is_copied_in_one_operation_where_whole_blocks_are() -> None:
    target = Engine("LBHNC", 2, 4, False, None)
    cuts = cuts_between(Engine("LBHNC", 1, 4, False, None), target)
    assert cuts.cuts[0].part is not None
    assert target.layouts[0].kernels == len(target.layouts[0]._part_stacks(cuts.cuts[0].part)) == 1


def test_parts_that_do_not_fit_are_refused() -> None:
    target = Engine("LBHNC", 2, 4, False, None).layouts[0]
    part = ShardPart(3, 2, 0, 3, 4, 0, 0, 0, 0)
    memory = memoryview(bytearray(2 * target.staged_bytes(part)))
    with pytest.raises(TransferFailed, match="are not 1 blocks"):
        target.scatter_part([1], 1, 0, memory, part)
    with pytest.raises(TransferFailed, match="than the 2 staged"):
        target.scatter_part([1], 2, 2, memory, part)
    for outside in (part._replace(to_head=1), part._replace(to_layer=1)):
        with pytest.raises(TransferFailed, match="no such part"):
            target.scatter_part([1], 2, 0, memory, outside)
    with pytest.raises(TransferFailed, match="no such part"):
        CacheLayout(cache(KV_FIRST, torch.float32), BLOCKS).staged_bytes(part)


@shapes
def test_blocks_move_within_a_cache(shape: Sequence[int]) -> None:
    dtypes = torch.float32, torch.bfloat16, torch.uint8
    moved, before = cache(shape, *dtypes), cache(shape, *dtypes)
    CacheLayout(moved, BLOCKS).move([(5, 1), (7, 2)])
    dim = shape.index(BLOCKS)
    for name, tensor in moved.items():
        for new, old in [(0, 0), (1, 5), (2, 7), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7)]:
            assert torch.equal(block(tensor, dim, new), block(before[name], dim, old))


def test_block_that_does_not_exist_is_not_moved() -> None:
    layout = CacheLayout(cache(BLOCK_FIRST, torch.float32), BLOCKS)
    with pytest.raises(TransferFailed, match="no such KV blocks"):
        layout.move([(BLOCKS, 1)])

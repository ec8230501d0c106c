"""How the shards of an engine's workers become those of another engine's workers."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migration.protocol.errors import TransferFailed
from migration.protocol.layouts import Extent, Resharding, ShardLayout, heads_of, reshard
from policies.causes import Cause
from tests.migration.shards import shards

Cell = tuple[int, int]


def cells(shard: ShardLayout) -> set[Cell]:
    """The layers and heads of a shard, by their numbers in the model."""
    return {(layer, head) for layer in range(*shard.layers) for head in range(*shard.heads)}


def copied(cuts: Resharding, source: tuple[ShardLayout, ...], target: tuple[ShardLayout, ...]) -> list[Counter[Cell]]:
    """How often each cell comes to each worker of the target; asserts that its sender has it, at that place."""
    taken: list[Counter[Cell]] = [Counter() for _ in target]
    for cut in cuts.cuts:
        here, there, part = source[cuts.senders[cut.shard]], target[cut.worker], cut.part
        if part is None:
            assert cells(here) == cells(there)
            taken[cut.worker].update(cells(here))
            continue
        assert (part.staged_layers, part.staged_heads) == (here.layers.size, here.heads.size)
        for layer in range(part.layers):
            for head in range(part.heads):
                sent = here.layers.first + part.from_layer + layer, here.heads.first + part.from_head + head
                assert sent == (there.layers.first + part.to_layer + layer, there.heads.first + part.to_head + head)
                assert sent in cells(here)
                taken[cut.worker][sent] += 1
    return taken


workers_of = {heads: [n for n in range(1, 17) if heads % n == 0 or n % heads == 0] for heads in range(1, 17)}
"""The numbers of workers for which vLLM divides that many heads."""


@st.composite
def engines(draw: st.DrawFn) -> tuple[tuple[ShardLayout, ...], tuple[ShardLayout, ...]]:
    heads = draw(st.integers(1, 16))
    one, other = (draw(st.sampled_from(workers_of[heads])) for _ in range(2))
    return shards(one, heads, layers=3), shards(other, heads, layers=3)


@given(engines())
def test_every_head_of_every_layer_comes_once_from_a_worker_that_has_it(
    pair: tuple[tuple[ShardLayout, ...], tuple[ShardLayout, ...]],
) -> None:
    source, target = pair
    cuts = reshard(source, target)
    if cuts is None:
        assert source == target
    else:
        assert copied(cuts, source, target) == [Counter(cells(shard)) for shard in target]
        assert {cut.shard for cut in cuts.cuts} == set(range(len(cuts.senders)))


grids = st.tuples(st.sets(st.integers(1, 5)), st.sets(st.integers(1, 5))).map(
    lambda ends: [
        (Extent(low, high), Extent(left, right))
        for low, high in zip([0, *sorted(ends[0])], [*sorted(ends[0]), 6], strict=True)
        for left, right in zip([0, *sorted(ends[1])], [*sorted(ends[1]), 6], strict=True)
    ]
)


def of_grid(grid: list[tuple[Extent, Extent]]) -> tuple[ShardLayout, ...]:
    return tuple(ShardLayout(ls, hs, 4, "int32", "packed", 0, 4 * ls.size * hs.size) for ls, hs in grid)


@given(grids, grids, st.lists(st.integers(0, 100), max_size=3))
def test_shards_may_be_cut_by_layers_and_have_copies(
    one: list[tuple[Extent, Extent]], other: list[tuple[Extent, Extent]], copies: list[int]
) -> None:
    source, target = of_grid(one + [one[i % len(one)] for i in copies]), of_grid(other)
    if (cuts := reshard(source, target)) is not None:
        assert copied(cuts, source, target) == [Counter(cells(shard)) for shard in target]


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_equal_layouts_need_no_cuts(workers: int) -> None:
    assert reshard(shards(workers, heads=4), shards(workers, heads=4)) is None


def test_one_of_several_copies_of_a_head_is_sent_to_all_that_hold_it() -> None:
    cuts = reshard(shards(4, heads=2), shards(8, heads=2))
    assert cuts is not None and cuts.senders == (0, 2)
    assert [(cut.shard, cut.worker, cut.part) for cut in cuts.cuts] == [(w // 4, w, None) for w in range(8)]
    assert [cut.worker for cut in cuts.taken(1)] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("rank", "workers", "heads", "own"),
    [(0, 1, 8, (0, 8)), (3, 4, 8, (6, 8)), (5, 8, 2, (1, 2)), (0, 2, 0, (0, 1))],
    ids=["one worker", "a share", "a copy", "no heads"],
)
def test_heads_are_divided_as_vllm_does(rank: int, workers: int, heads: int, own: tuple[int, int]) -> None:
    assert heads_of(rank, workers, heads) == own


WIDE, NARROW = shards(1, heads=2), shards(2, heads=2)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ((), "cannot be moved"),
        (tuple(replace(shard, block_size=8) for shard in NARROW), "unlike block sizes"),
        (tuple(replace(shard, dtype="float16") for shard in NARROW), "unlike types"),
        (tuple(replace(shard, order="other") for shard in NARROW), "unlike orders in memory"),
        (tuple(replace(shard, head_axis=1) for shard in NARROW), "unlike orders in memory"),
        (tuple(replace(shard, block_bytes=16) for shard in NARROW), "unlike sizes of a head"),
        (shards(2, heads=4), "lack layers or heads"),
        (shards(2, heads=2, whole="it has scales"), "cannot be cut: it has scales"),
    ],
    ids=["none", "block size", "type", "order", "axis of heads", "size of a head", "more heads", "whole shards only"],
)
def test_shards_that_cannot_be_cut_are_refused_with_the_reason(target: tuple[ShardLayout, ...], reason: str) -> None:
    with pytest.raises(TransferFailed, match=reason) as refused:
        reshard(WIDE, target)
    assert refused.value.cause is Cause.FINGERPRINT


def test_one_head_may_be_on_any_axis() -> None:
    source = tuple(replace(shard, head_axis=1) for shard in WIDE)
    target = tuple(replace(shard, head_axis=None) for shard in NARROW)
    there, back = reshard(source, target), reshard(target, source)
    assert there is not None and back is not None
    assert {cut.part.head_axis for cut in (*there.cuts, *back.cuts) if cut.part is not None} == {1}

"""Sizes of plans in bytes."""

from dataclasses import replace

import pytest

from policies.memory.plan import ASLEEP, MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes

MODEL = ModelMemory(Bytes(1000), Bytes(100), Bytes(50), Bytes(10), Blocks(4))


def test_an_awake_replica_holds_its_parameters_and_a_sleeping_one_does_not() -> None:
    assert [MODEL.need(plan) for plan in (MemoryPlan(Blocks(0)), MemoryPlan(Blocks(7)), ASLEEP)] == [1100, 1170, 50]
    assert MODEL.least == 1140


def test_blocks_in_a_size_are_whole_and_below_zero_where_parameters_do_not_fit() -> None:
    assert [MODEL.blocks_in(size) for size in (1179, 1100, 1099)] == [7, 0, -1]


@pytest.mark.parametrize(("layers", "remote", "layer"), [(4, 2, 95), (5, 3, 7), (32, 16, 40)])
def test_the_least_plan_with_remote_layers_has_room_for_them_all_and_no_smaller_one_has(
    layers: int, remote: int, layer: int
) -> None:
    model = replace(MODEL, layers=layers, layer=Bytes(layer))
    least = model.least_with(remote)
    left = [model.blocks_exchanging(model.need(MemoryPlan(Blocks(blocks), remote))) for blocks in (least, least - 2)]
    assert left[0] >= model.floor > left[1]
    assert model.least_with(0) == model.floor

"""Which blocks the copier may touch, whatever the order of events."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from migration.kv.copier.tables import BlockLoad, BlockLoads, BlockTables, Fence, TableChange
from migration.protocol.errors import BlocksGone, TransferFailed

BLOCK = 4


class Point:
    """A fence."""

    def __init__(self, passed: bool = False) -> None:
        self.passed = passed

    def wait(self) -> None:
        """No-op."""

    def query(self) -> bool:
        """See `Fence.query`."""
        return self.passed


def make_tables(computed: int = 10) -> BlockTables:
    """Request r.0 in blocks 5, 9 and 2."""
    tables = BlockTables(BLOCK)
    tables.apply([TableChange("r.0", computed, [5, 9, 2], replace=True, caught_up=True)], None)
    return tables


def read(tables: BlockTables, first: int, last: int, partial: bool = False) -> list[int]:
    with tables.reading("r.0", first, last, partial) as (blocks, _):
        return list(blocks)


def test_full_blocks_are_read_in_context_order() -> None:
    tables = make_tables()
    assert read(tables, 0, 2) == [5, 9] and read(tables, 1, 2) == [9]
    tables.apply([TableChange("r.0", 17, [7, 3], replace=False, caught_up=True)], None)
    assert read(tables, 0, 4) == [5, 9, 2, 7]


def test_block_that_is_not_full_is_not_read() -> None:
    with pytest.raises(TransferFailed, match="only 10 tokens are computed, block 3 is not full"):
        read(make_tables(), 0, 3)


def test_block_that_is_not_full_is_read_as_part_of_a_tail() -> None:
    assert read(make_tables(), 1, 3, partial=True) == [9, 2]


def test_tail_of_a_request_whose_known_tokens_are_computed_anew_is_not_read() -> None:
    """A preempted request that resumes: its last block may hold less than the replica knows."""
    tables = make_tables()
    tables.apply([TableChange("r.0", 10, [5, 9, 2], replace=True, caught_up=False)], None)
    with pytest.raises(TransferFailed, match="only 10 of the known tokens"):
        read(tables, 1, 3, partial=True)
    tables.apply([TableChange("r.0", 12, [], replace=False, caught_up=True)], None)
    assert read(tables, 1, 3, partial=True) == [9, 2]


def test_tail_does_not_reach_beyond_the_blocks() -> None:
    with pytest.raises(TransferFailed):
        read(make_tables(), 1, 4, partial=True)


def test_unknown_request_holds_no_blocks() -> None:
    with pytest.raises(BlocksGone, match="holds no blocks"):
        read(BlockTables(BLOCK), 0, 1)


def test_computed_tokens_are_those_of_the_newest_step() -> None:
    tables = make_tables()
    assert (tables.computed("r.0"), tables.computed("r.1")) == (10, None)
    tables.apply([TableChange("r.0", 17, [7, 3], replace=False, caught_up=False)], None)
    assert tables.computed("r.0") == 17
    tables.void(["r.0"])
    assert tables.computed("r.0") is None


@pytest.mark.parametrize("change", ["grown", "preempted"])
def test_change_that_somebody_waits_for_is_reported_once(change: str) -> None:
    def changed(key: str, computed: int) -> bool:
        if change == "preempted":
            return tables.void([key])
        return tables.apply([TableChange(key, computed, [7], replace=True, caught_up=False)], None)

    tables = make_tables()
    assert tables.computed_beyond("r.0", 9) == 10
    assert not changed("r.0", 10), "what was answered is not waited for"
    assert tables.computed_beyond("r.0", 10) is None and tables.computed_beyond("r.2", 0) is None
    assert not changed("r.1", 4)
    assert changed("r.0", 11) and not changed("r.0", 12) and changed("r.2", 1)


def test_a_wait_that_was_given_up_is_forgotten() -> None:
    tables = make_tables()
    assert tables.computed_beyond("gone", 0) is None
    tables.unwatch("gone")
    assert not tables.apply([TableChange("gone", 1, [7], replace=True, caught_up=False)], None)


@pytest.mark.parametrize("replaced", [False, True], ids=["preempted", "preempted and resumed"])
def test_copy_of_blocks_that_are_lost_meanwhile_is_void(replaced: bool) -> None:
    """Another request may have written to them before the copy was complete."""
    tables = make_tables()
    copy = tables.reading("r.0", 0, 2)
    copy.__enter__()
    tables.void(["r.0"])
    if replaced:
        tables.apply([TableChange("r.0", 10, [5, 9, 2], replace=True, caught_up=True)], None)
    with pytest.raises(BlocksGone, match="lost its blocks"):
        copy.__exit__(None, None, None)


def test_growth_does_not_disturb_a_copy() -> None:
    tables = make_tables()
    with tables.reading("r.0", 0, 2):
        tables.apply([TableChange("r.0", 17, [7], replace=False, caught_up=True)], None)


# --- fences -------------------------------------------------------------------------------------------


def step(tables: BlockTables, computed: int, fence: Point, blocks: Sequence[int] = ()) -> None:
    """A step of r.0 after which that many tokens are computed, with further blocks."""
    tables.apply([TableChange("r.0", computed, list(blocks), replace=False, caught_up=True)], fence)


def fence_of(tables: BlockTables, first: int, last: int, partial: bool = False) -> Fence | None:
    with tables.reading("r.0", first, last, partial) as (_, fence):
        return fence


def test_a_block_is_read_behind_the_step_that_filled_it_and_not_behind_later_ones() -> None:
    tables, points = make_tables(3), [Point() for _ in range(4)]
    for computed, point in zip((8, 11, 12, 13), points, strict=True):
        step(tables, computed, point)
    assert fence_of(tables, 0, 1) is fence_of(tables, 0, 2) is points[0]
    assert fence_of(tables, 0, 3) is fence_of(tables, 2, 3) is points[2]


def test_a_block_of_a_complete_step_has_no_fence() -> None:
    tables, first, second = make_tables(3), Point(passed=True), Point()
    step(tables, 8, first)
    step(tables, 12, second)
    assert fence_of(tables, 0, 2) is None and fence_of(tables, 0, 3) is second
    second.passed = True
    step(tables, 13, Point())
    assert fence_of(tables, 0, 3) is None


def test_a_step_that_fills_no_block_leaves_no_fence() -> None:
    tables = make_tables(3)
    step(tables, 8, Point(passed=True))
    step(tables, 9, Point())
    assert fence_of(tables, 0, 2) is None


def test_a_tail_has_no_fence() -> None:
    """The replica knows its tokens from the steps that computed them."""
    tables = make_tables(3)
    step(tables, 10, Point())
    assert fence_of(tables, 1, 3, partial=True) is None


def test_the_blocks_of_a_resumed_request_are_read_behind_their_new_steps() -> None:
    tables, resumed = make_tables(3), Point()
    step(tables, 12, Point(passed=True))
    tables.apply([TableChange("r.0", 12, [7, 8, 1], replace=True, caught_up=False)], resumed)
    assert fence_of(tables, 0, 1) is resumed


# --- loads --------------------------------------------------------------------------------------------


def make_loads(start: int = 1) -> BlockLoads:
    """A load of blocks [1, 4) of a context, whose first `start` the cache holds already."""
    loads = BlockLoads()
    loads.begin(BlockLoad("m.1", "v1", start, [6, 7, 8][start - 1 :]), None)
    return loads


def write(loads: BlockLoads, first: int, last: int) -> tuple[list[int], int]:
    with loads.writing("m.1", first, last) as ((blocks, _), skip):
        return list(blocks), skip


@pytest.mark.parametrize(
    ("start", "first", "last", "blocks", "skip"),
    [(1, 1, 4, [6, 7, 8], 0), (1, 2, 3, [7], 0), (3, 1, 4, [8], 2), (3, 1, 2, [], 2), (4, 1, 4, [], 3)],
    ids=["all", "a chunk", "what the cache lacks", "a chunk that the cache holds", "nothing, if the cache holds all"],
)
def test_chunk_is_written_to(start: int, first: int, last: int, blocks: list[int], skip: int) -> None:
    assert write(make_loads(start), first, last) == (blocks, skip)


def test_load_has_arrived_with_its_last_chunk_and_is_reported_once() -> None:
    loads = make_loads()
    write(loads, 3, 4)
    assert loads.arrived() == []
    write(loads, 1, 3)
    assert loads.arrived() == ["m.1"]
    assert loads.arrived() == []


def test_load_of_blocks_that_the_cache_holds_is_not_reported() -> None:
    """vLLM runs its request."""
    loads = make_loads(4)
    assert loads.arrived() == []
    loads.close("m.1")
    assert loads.finished() == set()


@pytest.mark.parametrize("chunks", [0, 1, 3], ids=["empty", "half filled", "filled"])
def test_blocks_of_a_load_are_given_back_once_when_its_request_has_ended(chunks: int) -> None:
    loads = make_loads()
    for block in range(1, 1 + chunks):
        write(loads, block, block + 1)
    assert loads.finished() == set()
    loads.close("m.1")
    assert loads.arrived() == [], "vLLM names no block of an ended request"
    assert loads.finished() == {"v1"}
    assert loads.finished() == set()


@pytest.mark.parametrize("end", [BlockLoads.close, BlockLoads.forget], ids=["aborted", "given up"])
def test_load_that_ended_takes_no_chunks(end: Callable[[BlockLoads, str], None]) -> None:
    loads = make_loads()
    end(loads, "m.1")
    with pytest.raises(TransferFailed, match="ended"):
        write(loads, 1, 4)
    assert loads.arrived() == []


def test_blocks_are_not_given_back_while_they_are_written() -> None:
    """vLLM would give them to another request."""
    loads = make_loads()
    with loads.writing("m.1", 1, 2):
        loads.close("m.1")
        assert loads.finished() == set()
    assert loads.finished() == {"v1"}


def test_chunk_that_fails_stays_missing() -> None:
    loads = make_loads()
    with pytest.raises(MemoryError), loads.writing("m.1", 1, 4):
        raise MemoryError
    assert loads.arrived() == []
    write(loads, 1, 4)
    assert loads.arrived() == ["m.1"]


@pytest.mark.parametrize(("first", "last"), [(0, 5), (2, 2), (3, 2), (-1, 2)])
def test_chunk_outside_the_load_is_refused(first: int, last: int) -> None:
    with pytest.raises(TransferFailed, match="does not wait for blocks"):
        write(make_loads(), first, last)


def test_blocks_that_have_arrived_are_not_written_again() -> None:
    """They may be in the prefix cache by now, and read by a step."""
    loads = make_loads()
    write(loads, 1, 3)
    with pytest.raises(TransferFailed, match="does not wait for blocks"):
        write(loads, 2, 4)


def test_load_is_filled_from_its_last_chunk_until_its_request_ends() -> None:
    loads = make_loads()
    assert BlockLoads().filled("m.1") is None and BlockLoads().missing("m.1") is None
    write(loads, 3, 4)
    assert loads.filled("m.1") is None and loads.missing("m.1") == 2
    write(loads, 1, 3)
    assert loads.filled("m.1") == 3 and loads.missing("m.1") == 0
    loads.arrived()
    assert loads.filled("m.1") == 3
    loads.close("m.1")
    assert loads.filled("m.1") is None and loads.missing("m.1") is None


def test_load_of_blocks_that_the_cache_holds_is_never_filled() -> None:
    """Its request runs: the load ends with that."""
    assert make_loads(4).filled("m.1") is None


def test_load_is_complete_when_its_blocks_are_in_the_cache() -> None:
    loads = make_loads()
    assert not BlockLoads().loaded("m.1") and not loads.loaded("m.1")
    write(loads, 1, 4)
    assert not loads.loaded("m.1")
    loads.cache("m.1")
    assert loads.loaded("m.1")
    loads.close("m.1")
    assert loads.loaded("m.1")


def test_chunks_wait_until_the_load_is_admitted_or_over() -> None:
    loads = BlockLoads()
    assert not loads.decided("m.1")
    loads.begin(BlockLoad("m.1", "v1", 0, [6]), None)
    loads.close("m.2")
    loads.forget("m.3")
    assert loads.decided("m.1") and loads.decided("m.2") and loads.decided("m.3")
    with pytest.raises(TransferFailed, match="ended"), loads.writing("m.2", 0, 1):
        pass


@pytest.mark.parametrize("order", ["admitted, ended, given up", "ended, given up", "given up, admitted, ended"])
def test_nothing_remains_of_a_load(order: str) -> None:
    loads = BlockLoads()
    for event in order.split(", "):
        match event:
            case "admitted":
                loads.begin(BlockLoad("m.1", "v1", 0, [6]), None)
            case "ended":
                loads.close("m.1")
            case _:
                loads.forget("m.1")
        loads.finished()
    assert len(loads) == 0


def test_blocks_are_written_behind_the_fence_of_their_allocation() -> None:
    loads, allocated = BlockLoads(), Point()
    loads.begin(BlockLoad("m.1", "v1", 0, [6]), allocated)
    with loads.writing("m.1", 0, 1) as ((_, fence), _):
        assert fence is allocated


# --- other ids ----------------------------------------------------------------------------------------


def swapped(*pairs: tuple[int, int]) -> "np.ndarray[Any, Any]":
    """The ids of 16 blocks, of which some have changed."""
    ids = np.arange(16)
    for before, after in pairs:
        ids[before] = after
    return ids


def test_blocks_are_read_and_written_under_their_new_ids() -> None:
    tables, loads = make_tables(), make_loads()
    ids = swapped((9, 1), (7, 3))
    tables.renumber(ids)
    loads.renumber(ids)
    assert read(tables, 0, 2) == [5, 1]
    assert write(loads, 1, 4) == ([6, 3, 8], 0)


def test_table_of_a_request_that_ended_is_void_once_a_block_of_it_is_another_ones() -> None:
    """The step that voids it comes later: meanwhile a free block of it has got the contents of a used one."""
    tables = make_tables()
    tables.apply([TableChange("other", 8, [12, 13], replace=True, caught_up=True)], None)
    tables.renumber(swapped((13, 9)))
    with pytest.raises(BlocksGone):
        read(tables, 0, 1)
    with tables.reading("other", 0, 2) as (blocks, _):
        assert blocks == [12, 9]
    tables.lose(range(12, 16))
    with pytest.raises(BlocksGone), tables.reading("other", 0, 2):
        pass


@pytest.mark.parametrize("kind", ["read", "write"])
def test_ids_do_not_change_during_a_copy(kind: str) -> None:
    tables, loads = make_tables(), make_loads()
    held, copy = (
        (tables.copying, tables.reading("r.0", 0, 2)) if kind == "read" else (loads.copying, loads.writing("m.1", 1, 2))
    )
    with copy:
        assert not held.acquire(blocking=False)
    assert held.acquire(blocking=False)

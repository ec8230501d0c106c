"""The account of KV blocks, on random histories."""

from random import Random

import pytest

from policies.engine.blocks import Block, BlockPool


@pytest.mark.parametrize("seed", range(20))
def test_no_block_is_lost_and_the_changes_are_those_of_the_names(seed: int) -> None:
    draw, pool, mirror = Random(seed), BlockPool(8, Block), set[int]()
    requests: list[list[Block]] = []
    for _ in range(300):
        names = [draw.randrange(3) * 10 + index for index in range(draw.randrange(1, 4))]
        match draw.randrange(5):
            case 0 | 1:
                blocks = pool.match(names)
                if pool.room_beside(blocks) >= 1:
                    pool.claim(blocks)
                    block = pool.allocate()
                    assert block is not None
                    requests.append([*blocks, block])
                    if len(blocks) < len(names):
                        pool.enter(block, names[len(blocks)])
            case 2 if requests:
                pool.release(requests.pop(draw.randrange(len(requests))))
            case 3:
                pool.resize(draw.randrange(4, 12))
            case 4:
                pool.delete({draw.randrange(30)})
        used = {id(block): block for blocks in requests for block in blocks}
        assert pool.free == pool.size - len(used)
        assert len(pool.idle) <= max(0, pool.free)
        assert all(block.users == sum(block in blocks for blocks in requests) for block in used.values())
        assert pool.shared == sum(map(len, requests)) - len(used)
        assert {name for name, block in pool.named.items() if not block.users} == set(pool.idle)
        came, left = pool.take_changes()
        mirror = (mirror | set(came)) - set(left)
        assert mirror == set(pool.named)


def test_the_last_block_of_the_least_recent_context_is_dropped_first() -> None:
    pool = BlockPool(4, Block)
    for names in (1, 2), (3, 4):
        blocks = [block for _ in names if (block := pool.allocate()) is not None]
        for block, name in zip(blocks, names, strict=True):
            pool.enter(block, name)
        pool.release(blocks)
    assert list(pool.idle) == [2, 1, 4, 3]
    pool.allocate()
    assert set(pool.named) == {1, 3, 4}

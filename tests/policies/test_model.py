"""The values that policies see."""

import pytest

from policies.model import (
    Blocks,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)


def replica(id: str, free: int = 2, capacity: int = 64) -> ReplicaLoad:
    request = RequestLoad(RequestId(f"on-{id}"), "", Tokens(1), Phase.DECODE, 0.0, 0)
    return ReplicaLoad(ReplicaId(id), ReplicaState.RUNNING, "node", Tokens(capacity), 16, Blocks(free), 4, (request,))


@pytest.mark.parametrize(
    ("free", "used"), [(0, 64), (1, 48), (4, 0), (9, 0)], ids=["full", "in between", "empty", "more free than there is"]
)
def test_used_tokens_are_those_in_blocks_that_are_not_free(free: int, used: int) -> None:
    assert replica("a", free).used_tokens == used

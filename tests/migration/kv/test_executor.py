"""Calls about the pool, within the executor of an engine core."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow
"""Importing vLLM takes seconds; this file imports it only inside tests."""


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An executor without workers; `called` has the calls to them."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from migration.kv.executor import ElasticExecutor

    made: Any = ElasticExecutor.__new__(ElasticExecutor)
    made.called = []

    def call(self: Any, method: str, timeout: object = None, args: tuple[Any, ...] = (), **kwargs: Any) -> Any:
        made.called.append((method, *args))
        return Future() if kwargs.get("non_block") else [None]

    monkeypatch.setattr(MultiprocExecutor, "collective_rpc", call)
    made._post_init_executor()
    return made


def make_pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool of 9 blocks, of which a request uses 8 and 9. The next free one is 7."""
    from vllm.v1.core.block_pool import BlockPool

    from migration.kv import pool as pools

    monkeypatch.setattr(pools, "_bound", [])
    blocks = BlockPool(10, enable_caching=True, hash_block_size=16)
    pools.bind(blocks, 1.0)
    taken = blocks.get_new_blocks(9)
    blocks.free_blocks(reversed(taken[:7]))
    return blocks


def step(executor: Any, *invalid: int) -> Future[Any]:
    """A step in flight, whose output names blocks that could not be filled."""
    future: Future[Any] = executor.collective_rpc("sample_tokens", args=(None,), non_block=True)
    future.set_result(SimpleNamespace(kv_connector_output=SimpleNamespace(invalid_block_ids=set(invalid))))
    return future


def test_workers_renumber_within_the_call(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pool(monkeypatch)
    assert executor.collective_rpc("mell_fit", args=(7, 0)) == [(7, 0, 2)]
    assert executor.called == [("mell_renumber", ((8, 7), (9, 6)))]
    assert executor.collective_rpc("mell_grow", args=(9,)) == [(9, 0, 0)]
    assert executor.collective_rpc("other", args=(1,)) == [None] and executor.called[-1] == ("other", 1)


def test_blocks_that_a_step_in_flight_could_not_fill_are_named_by_their_new_ids(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pool(monkeypatch)
    # Block 7 was of a request that has ended: its id is now another request's, which has lost nothing.
    failed, sound, empty = step(executor, 7, 9, 5), step(executor), executor.collective_rpc("x", non_block=True)
    empty.set_result(None)
    broken = executor.collective_rpc("x", non_block=True)
    broken.set_exception(RuntimeError("it failed"))
    executor.collective_rpc("mell_fit", args=(7, 0))
    assert failed.result().kv_connector_output.invalid_block_ids == {6, 5}
    assert sound.result().kv_connector_output.invalid_block_ids == set()

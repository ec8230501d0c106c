"""The worker extension: the description of the cache and its processes."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from migration.protocol.errors import TransferFailed
from tests.migration.kv.test_connector import BLOCK, BLOCKS, make_connector, make_worker

pytestmark = pytest.mark.slow


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The holder of vLLM's connector in this process."""
    from migration.kv import worker

    held: dict[str, Any] = {"connector": None}
    monkeypatch.setattr(worker, "has_kv_transfer_group", lambda: held["connector"] is not None)
    monkeypatch.setattr(worker, "get_kv_transfer_group", lambda: held["connector"])
    yield held
    if held["connector"] is not None:
        held["connector"].shutdown()


def make_extension(group: dict[str, Any], connector: Any) -> Any:
    """The extension of a worker with this connector."""
    from migration.kv.worker import MellWorker

    group["connector"] = connector
    worker = MellWorker()
    worker.model_runner = object()
    return worker


def test_cache_and_processes_are_described(group: dict[str, Any]) -> None:
    connector, _ = make_worker()
    extension = make_extension(group, connector)
    assert extension.mell_describe() == {
        "layout": [1, 2, 0, "torch.float32", f"({BLOCK}, 3)@(2, 3)"],
        "quantized": False,
        "block_bytes": 2 * BLOCK * 3 * 4,
        "num_blocks": BLOCKS,
        "plain": True,
        "unsupported": None,
        "unmirrored": None,
        "host_blocks": 0,
        "copier": connector.copier.address,
        "worker_pid": os.getpid(),
        "starter_pid": None,
    }
    assert connector.runner is extension.model_runner


def test_unsupported_cache_is_described_with_the_reason(group: dict[str, Any]) -> None:
    connector = make_connector(groups=2)
    connector.register_kv_caches({})
    described = make_extension(group, connector).mell_describe()
    assert (described["layout"], described["block_bytes"], described["copier"]) == (None, 0, None)
    assert "2 KV cache groups" in described["unsupported"] and not described["plain"]


def test_engine_without_a_connector_has_processes_and_no_cache_to_move(group: dict[str, Any]) -> None:
    described = make_extension(group, None).mell_describe()
    assert (described["layout"], described["block_bytes"], described["copier"]) == (None, 0, None)
    assert described["unsupported"] == "the engine has no connector"
    assert (described["worker_pid"], described["starter_pid"]) == (os.getpid(), None)


def test_engine_with_another_connector_is_an_error(group: dict[str, Any]) -> None:
    other = SimpleNamespace(shutdown=lambda: None)
    with pytest.raises(TransferFailed, match="without Mell's KV connector"):
        make_extension(group, other).mell_describe()

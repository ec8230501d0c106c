"""The worker extension: the description of the cache and its processes."""

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from migration.kv.copier.tables import BlockLoad, TableChange
from migration.protocol.errors import BlocksGone, TransferFailed
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
    """The extension of a worker with this connector, and with a model that vLLM has loaded."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from migration.kv.worker import MellWorker

    group["connector"] = connector
    model = torch.nn.Linear(4, 3)
    record_metadata_for_reloading(model)
    worker = MellWorker()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.vllm_config = SimpleNamespace(lora_config=None, load_config=LoadConfig())
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
        "parameter_bytes": 0,
        "kept_parameters": "memory.budget_mib is not set",
        "copier": connector.copier.address,
        "worker_pid": os.getpid(),
        "starter_pid": None,
    }
    assert connector.runner is extension.model_runner


def test_parameters_of_an_engine_with_an_elastic_pool_are_described(group: dict[str, Any]) -> None:
    connector, _ = make_worker()
    connector._declared_times = 3.0
    described = make_extension(group, connector).mell_describe()
    assert (described["parameter_bytes"], described["kept_parameters"]) == (4 * 3 * 4, None)


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


def make_renumbered(group: dict[str, Any]) -> tuple[Any, Any, torch.Tensor]:
    """A connector and its extension, with a request in blocks 5 and 6, and a load of blocks 7 and 4; their cache."""
    connector, cache = make_worker()
    extension = make_extension(group, connector)
    rows = np.array([[5, 6, 0], [1, 5, 0]], dtype=np.int32)
    table = SimpleNamespace(block_table=SimpleNamespace(np=rows))
    extension.model_runner.input_batch = SimpleNamespace(block_table=SimpleNamespace(block_tables=[table]))
    extension.model_runner.requests = {"r": SimpleNamespace(block_ids=([5, 6],))}
    extension.mell_describe()
    connector.tables.apply([TableChange("r.0", 2 * BLOCK, [5, 6], replace=True, caught_up=True)], None)
    connector.loads.begin(BlockLoad("m.1", "v1", 0, [7, 4]), None)
    return connector, extension, cache


def test_blocks_that_change_their_ids_are_copied_and_found_in_all_tables(group: dict[str, Any]) -> None:
    connector, extension, cache = make_renumbered(group)
    cache[5], cache[6] = 0.5, 0.6
    extension.mell_renumber([(5, 2), (6, 3), (7, 1)])
    runner = extension.model_runner
    assert runner.input_batch.block_table.block_tables[0].block_table.np.tolist() == [[2, 3, 0], [1, 2, 0]]
    assert runner.requests["r"].block_ids == ([2, 3],)
    with connector.tables.reading("r.0", 0, 2) as (blocks, _):
        assert blocks == [2, 3]
    with connector.loads.writing("m.1", 0, 2) as ((blocks, _), _):
        assert blocks == [1, 4]
    assert (cache[2] == 0.5).all() and (cache[3] == 0.6).all()


@pytest.mark.parametrize("kind", ["read", "write"])
def test_ids_change_behind_the_copy_under_way(group: dict[str, Any], kind: str) -> None:
    connector, extension, cache = make_renumbered(group)
    renumbering = threading.Thread(target=extension.mell_renumber, args=([(5, 2), (7, 1)],))
    copy = connector.tables.reading("r.0", 0, 2) if kind == "read" else connector.loads.writing("m.1", 0, 2)
    with copy as _:
        renumbering.start()
        renumbering.join(0.2)
        assert renumbering.is_alive()
        cache[7] = 0.7
    renumbering.join()
    assert (cache[1] == 0.7).all(), "what was written meanwhile is not lost"


def test_blocks_whose_memory_is_given_back_are_read_no_more(group: dict[str, Any]) -> None:
    """The request has ended: its free blocks are withheld before the next step voids its table."""
    connector, extension, _ = make_renumbered(group)
    assert extension.mell_release(6) is None
    with pytest.raises(BlocksGone), connector.tables.reading("r.0", 0, 2):
        pass


def test_memory_that_the_machine_does_not_take_is_a_reason(
    group: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(layers: object, first: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    extension = make_extension(group, make_worker()[0])
    assert extension.mell_release(BLOCKS) is None
    monkeypatch.setattr("migration.kv.layout.give_back", refuse)
    assert extension.mell_release(4) == "[Errno 12] Cannot allocate memory"

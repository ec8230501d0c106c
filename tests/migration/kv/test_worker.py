"""The worker extension: every error is a value, since an exception would end vLLM's worker."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, HostSegment, Segments
from migration.protocol.errors import TransferFailed
from migration.protocol.messages import SlotRef
from tests.migration.kv.test_connector import BLOCK, BLOCKS, change, make_connector, make_worker, step

pytestmark = pytest.mark.slow


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    with HostSegment.create(1 << 16) as made:
        yield made


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The holder of vLLM's connector in this process."""
    from migration.kv import worker

    held: dict[str, Any] = {"connector": None}
    monkeypatch.setattr(worker, "has_kv_transfer_group", lambda: held["connector"] is not None)
    monkeypatch.setattr(worker, "get_kv_transfer_group", lambda: held["connector"])
    return held


def make_extension(group: dict[str, Any], computed: int = 10) -> tuple[Any, torch.Tensor]:
    """The extension of a worker that runs r.0 in blocks 5, 9 and 2, and its cache."""
    from migration.kv.worker import MellWorker

    connector, cache = make_worker()
    cache[:] = torch.arange(cache.numel()).reshape(cache.shape)
    step(connector, changes=[change(computed, 5, 9, 2, replace=True)])
    group["connector"] = connector
    worker = MellWorker()
    worker.model_runner = object()
    return worker, cache


def test_full_blocks_are_gathered_in_context_order(group: dict[str, Any], segment: HostSegment) -> None:
    extension, cache = make_extension(group)
    answer = extension.mell_gather("r.0", 0, 2, segment.path, 128)
    payload = Segments().payload(SlotRef(segment.path, 128, answer["ticket"]), answer["bytes"] - HEADER)
    target = torch.zeros_like(cache)
    CacheLayout({"layer": target}, BLOCKS).scatter([0, 1], 2, 0, payload)
    assert torch.equal(target[0], cache[5]) and torch.equal(target[1], cache[9])


def test_every_gather_has_a_new_ticket(group: dict[str, Any], segment: HostSegment) -> None:
    extension, _ = make_extension(group)
    tickets = {extension.mell_gather("r.0", 0, 1, segment.path, 0)["ticket"] for _ in range(8)}
    assert len(tickets) == 8 and 0 not in tickets


@pytest.mark.parametrize(
    ("key", "first", "last", "offset", "error"),
    [
        ("r.0", 0, 3, 0, "only 10 tokens are computed, block 3 is not full"),
        ("r.0", 1, 1, 0, "no such KV blocks"),
        ("r.0", 2, 1, 0, "lie outside"),
        ("r.0", 0, 2, 1 << 16, "lie outside"),
    ],
    ids=["a block that is not full", "no block", "a range that runs backwards", "a slot outside the segment"],
)
def test_gather_returns_an_error_for(
    group: dict[str, Any], segment: HostSegment, key: str, first: int, last: int, offset: int, error: str
) -> None:
    extension, _ = make_extension(group)
    answer = extension.mell_gather(key, first, last, segment.path, offset)
    assert error in answer["error"] and "gone" not in answer


def test_gather_of_a_request_without_blocks_is_gone(group: dict[str, Any], segment: HostSegment) -> None:
    extension, _ = make_extension(group)
    answer = extension.mell_gather("r.1", 0, 1, segment.path, 0)
    assert answer["gone"] is True and "holds no blocks" in answer["error"]


def test_table_shorter_than_its_tokens_is_an_error(group: dict[str, Any], segment: HostSegment) -> None:
    extension, _ = make_extension(group, computed=4 * BLOCK)
    assert "are not 1 blocks" in extension.mell_gather("r.0", 2, 4, segment.path, 0)["error"]


def test_segment_of_a_dead_process_is_an_error(group: dict[str, Any]) -> None:
    extension, _ = make_extension(group)
    assert "staging segment" in extension.mell_gather("r.0", 0, 1, "/proc/1/fd/999999", 0)["error"]


def test_failed_gather_leaves_no_valid_ticket(group: dict[str, Any], segment: HostSegment) -> None:
    extension, _ = make_extension(group)
    extension.mell_gather("r.0", 0, 1, segment.path, 0)
    group["connector"].tables["r.0"].blocks[0] = BLOCKS
    assert "error" in extension.mell_gather("r.0", 0, 1, segment.path, 0)
    assert segment.ticket(0) == 0


def test_any_other_exception_is_an_error(
    group: dict[str, Any], segment: HostSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a copy on a GPU that runs out of memory."""
    extension, _ = make_extension(group)
    monkeypatch.setattr(torch, "index_select", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room")))
    answer = extension.mell_gather("r.0", 0, 1, segment.path, 0)
    assert "no room" in answer["error"] and segment.ticket(0) == 0


def test_engine_without_the_connector_is_an_error(group: dict[str, Any], segment: HostSegment) -> None:
    extension, _ = make_extension(group)
    group["connector"] = None
    assert "without Mell's KV connector" in extension.mell_gather("r.0", 0, 1, segment.path, 0)["error"]
    with pytest.raises(TransferFailed, match="without Mell's KV connector"):
        extension.mell_describe()


def test_cache_is_described(group: dict[str, Any]) -> None:
    extension, _ = make_extension(group)
    told = extension.mell_describe()
    assert told["layout"] == f"torch.float32(2, {BLOCK}, 3)@(1, 2, 3)" and told["block_bytes"] == 2 * BLOCK * 3 * 4
    assert (told["num_blocks"], told["unsupported"]) == (BLOCKS, None)


def test_unsupported_cache_is_described_with_the_reason(group: dict[str, Any], segment: HostSegment) -> None:
    extension, _ = make_extension(group)
    group["connector"] = make_connector(groups=2)
    group["connector"].register_kv_caches({})
    group["connector"].tables["r.0"] = None
    told = extension.mell_describe()
    assert (told["layout"], told["block_bytes"]) == ("", 0) and "2 KV cache groups" in told["unsupported"]
    assert "2 KV cache groups" in extension.mell_gather("r.0", 0, 1, segment.path, 0)["error"]


def test_counters_count_tables(group: dict[str, Any]) -> None:
    extension, _ = make_extension(group)
    assert extension.mell_counters() == {"blocks_loaded": 0, "tables": 1}

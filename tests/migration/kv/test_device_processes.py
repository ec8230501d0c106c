"""Staging in GPU memory between processes: a replica that owns the slots, and workers that map them.

GPU memory is faked over host memory; tests/gpu runs the same tests with a GPU.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from migration.kv.device import DeviceSegment
from migration.kv.staging import HEADER
from tests.migration import fake_cupy
from tests.migration.kv.kv_process import BLOCK_BYTES, BLOCKS, ROOT, Worker


@pytest.fixture(scope="module")
def device() -> str:
    """The device of caches and staging."""
    return "cpu"


@pytest.fixture(scope="module")
def workers(device: str) -> Iterator[tuple[Worker, Worker]]:
    """The source's worker, with a cache of random bytes, and the target's, with an empty one."""
    with Worker(device, "LBNHC", seed=1) as source, Worker(device, "LBNHC") as target:
        yield source, target


@pytest.fixture(scope="module")
def staging(device: str) -> Iterator[DeviceSegment]:
    """Memory for two slots of eight blocks, in this process, which is the replica's."""
    with fake_cupy.installed() if device == "cpu" else contextlib.nullcontext():
        made = DeviceSegment.create(2 * (HEADER + 8 * BLOCK_BYTES))
        yield made
        made.close()


@pytest.mark.slow
def test_blocks_go_from_one_worker_to_another(workers: tuple[Worker, Worker], staging: DeviceSegment) -> None:
    source, target = workers
    offset = HEADER + 8 * BLOCK_BYTES
    staged = source.do("gather", blocks=[3, 30, 7], segment=staging.path, offset=offset)
    assert staged["bytes"] == HEADER + 3 * BLOCK_BYTES and staging.ticket(offset) == staged["ticket"]
    where = {"segment": staging.path, "offset": offset, "ticket": staged["ticket"]}
    assert target.do("scatter", blocks=[5, 6], staged=3, skip=1, **where) == {}
    assert target.do("digest", blocks=[5, 6]) == source.do("digest", blocks=[30, 7])


def test_block_changed_in_staging_arrives_changed(
    workers: tuple[Worker, Worker], staging: DeviceSegment, device: str
) -> None:
    source, target = workers
    staged = source.do("gather", blocks=[1], segment=staging.path, offset=0)
    torch.as_tensor(staging.view(HEADER + 100, 1), device=device).bitwise_not_().cpu()
    target.do("scatter", blocks=[9], staged=1, segment=staging.path, offset=0, ticket=staged["ticket"])
    assert target.do("digest", blocks=[9]) != source.do("digest", blocks=[1])


def test_slot_is_not_read_after_its_lease(workers: tuple[Worker, Worker], staging: DeviceSegment) -> None:
    source, target = workers
    staged = source.do("gather", blocks=[1], segment=staging.path, offset=0)
    staging.stamp(0, 0)
    answer = target.do("scatter", blocks=[9], staged=1, segment=staging.path, offset=0, ticket=staged["ticket"])
    assert "reused" in answer["error"]


def test_failed_gather_leaves_no_valid_ticket(workers: tuple[Worker, Worker], staging: DeviceSegment) -> None:
    source, _ = workers
    source.do("gather", blocks=[1], segment=staging.path, offset=0)
    assert "no such KV blocks" in source.do("gather", blocks=[BLOCKS], segment=staging.path, offset=0)["error"]
    assert staging.ticket(0) == 0


def test_payload_under_another_ticket_is_not_read(workers: tuple[Worker, Worker], staging: DeviceSegment) -> None:
    source, target = workers
    staged = source.do("gather", blocks=[1], segment=staging.path, offset=0)
    answer = target.do("scatter", blocks=[9], staged=1, segment=staging.path, offset=0, ticket=staged["ticket"] ^ 2)
    assert "reused" in answer["error"]


def test_segment_of_a_dead_process_is_not_opened(workers: tuple[Worker, Worker], device: str) -> None:
    code = f"from tests.migration.kv.kv_process import segment_path; print(segment_path({device!r}))"
    path = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    answer = workers[1].do("gather", blocks=[1], segment=path.strip(), offset=0)
    assert "No such file or directory" in answer["error"]

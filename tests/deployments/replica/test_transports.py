"""Which transport a name stands for."""

import sys
from dataclasses import replace

import pytest

from deployments.config import ON_GPU, ON_HOST, MigrationSettings
from deployments.replica import transports
from deployments.replica.transports import make_slots, make_transport, size_slots
from migration.kv.device import DeviceSlot
from migration.protocol.errors import TransferFailed
from migration.protocol.messages import Fingerprint, SlotRef
from migration.protocol.sizing import MIB, StagingSizes
from migration.transport.collective import CollectiveGroups
from migration.transport.shared import SharedSlots
from policies.model import Bytes, Tokens
from tests.migration import fake_cupy
from tests.migration.shards import shards

NAMES = (*ON_HOST, *ON_GPU)
SIZES = StagingSizes(workers=1, count=3, slot_bytes=MIB)
CACHE = Fingerprint("model", "cache", 16, shards(block_size=16, cell_bytes=2 * MIB))
"""That of an 8B model on one GPU."""
CONTEXT = Tokens(8192)


def factory(config: MigrationSettings) -> SharedSlots:
    """A transport of one's own."""
    assert config.slots == 7
    return SharedSlots()


def test_shared_is_the_default() -> None:
    assert isinstance(make_transport(MigrationSettings(), SIZES), SharedSlots)


def test_collective_is_made_without_a_group() -> None:
    transport = make_transport(MigrationSettings(transport="collective"), SIZES)
    assert isinstance(transport, CollectiveGroups) and not transport.shares_slots


@pytest.mark.parametrize(("name", "shares"), [("cuda_ipc", True), ("nccl", False)])
def test_transports_between_gpus_are_made_without_one(name: str, shares: bool) -> None:
    transport = make_transport(MigrationSettings(transport=name), SIZES)
    assert transport.shares_slots is transport.direct is shares


@pytest.mark.parametrize("name", [*NAMES, f"{__name__}:factory"])
async def test_slots_are_where_the_transport_wants_them(name: str) -> None:
    with fake_cupy.installed():
        slots = make_slots(MigrationSettings(transport=name), SIZES)
        with await slots.lease(1) as (slot,):
            assert isinstance(slot, DeviceSlot) is (name in ON_GPU)
        slots.close()


@pytest.mark.parametrize("name", ON_GPU)
async def test_slots_of_each_worker_are_on_its_own_gpu(name: str) -> None:
    with fake_cupy.installed():
        slots = make_slots(MigrationSettings(transport=name), replace(SIZES, workers=4))
        with await slots.lease(1) as leased:
            assert [slot.payload.device.id for slot in leased if isinstance(slot, DeviceSlot)] == [0, 1, 2, 3]
        slots.close()


@pytest.mark.parametrize("name", ON_GPU)
def test_slots_on_a_gpu_need_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        with pytest.raises(RuntimeError, match="make setup DEVICE=cuda"):
            make_slots(MigrationSettings(transport=name), SIZES)


@pytest.mark.parametrize(("on_gpu", "mib"), [(False, 8), (True, 64)])
@pytest.mark.parametrize(
    ("name", "count"), [("shared", 4), ("collective", 6), ("cuda_ipc", 4), ("nccl", 6), (f"{__name__}:factory", 6)]
)
def test_slots_fit_the_transport_and_the_device(name: str, count: int, on_gpu: bool, mib: int) -> None:
    sizes = size_slots(MigrationSettings(transport=name), CACHE, CONTEXT, on_gpu)
    assert sizes == StagingSizes(1, count, mib * MIB)


def test_sizes_of_slots_can_be_set() -> None:
    cache = replace(CACHE, layouts=4 * CACHE.layouts)
    assert size_slots(MigrationSettings(slots=7, slot_mib=3), cache, CONTEXT, True) == StagingSizes(4, 7, 3 * MIB)


def test_slot_that_holds_no_block_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"slot_mib is 1, and a KV block has 2097152 bytes: write at least 2, or auto"
    ):
        size_slots(MigrationSettings(slot_mib=1), CACHE, CONTEXT, False)


@pytest.mark.parametrize("name", ON_HOST)
def test_slots_that_do_not_fit_into_memory_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "free_host_memory", lambda: Bytes(12 * MIB - 1))
    sizes = StagingSizes(workers=2, count=3, slot_bytes=2 * MIB)
    with pytest.raises(RuntimeError, match=r"need 12 MiB of memory, and 11 MiB are free: lower migration\.slots"):
        make_slots(MigrationSettings(transport=name), sizes)
    monkeypatch.setattr(transports, "free_host_memory", lambda: sizes.memory)
    make_slots(MigrationSettings(transport=name), sizes).close()


def test_every_name_makes_a_transport() -> None:
    assert all(make_transport(MigrationSettings(transport=name), SIZES) for name in NAMES)


def test_a_factory_of_ones_own_is_given_the_configuration() -> None:
    config = MigrationSettings(transport=f"{__name__}:factory", slots=7)
    assert isinstance(make_transport(config, SIZES), SharedSlots)


@pytest.mark.parametrize("name", ["", "mpi", "Shared", "tests.deployments"])
def test_an_unknown_name_is_an_error_that_lists_the_transports(name: str) -> None:
    with pytest.raises(ValueError, match=r"shared.*collective.*module:factory"):
        make_transport(MigrationSettings(transport=name), SIZES)


@pytest.mark.parametrize(
    ("name", "error"),
    [("no.such.module:factory", ModuleNotFoundError), (f"{__name__}:nothing", AttributeError)],
    ids=["no module", "no attribute"],
)
def test_a_factory_that_is_not_there_is_an_error(name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        make_transport(MigrationSettings(transport=name), SIZES)


@pytest.mark.parametrize(("name", "instead"), [("shared", "collective"), ("cuda_ipc", "nccl")])
async def test_slots_of_another_node_are_not_read(name: str, instead: str) -> None:
    transport = make_transport(MigrationSettings(transport=name), SIZES)
    with pytest.raises(TransferFailed, match=rf"set migration\.transport to {instead}"):
        await transport.receive("another node", SlotRef("/proc/1/fd/3", 0, 1), Bytes(64), None)

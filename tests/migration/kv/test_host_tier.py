"""The tier's two halves with the calls that vLLM's offloading makes, and its spec as vLLM makes it."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from migration.kv.cache_events import HostRemoved, HostStored, decode_names

pytestmark = pytest.mark.slow
"""Importing vLLM takes seconds; this file imports it only inside tests."""

SLOTS = 4


def key(number: int) -> Any:
    """The key of a block: a hash of 32 bytes that ends with its name, and 4 bytes of its group."""
    return bytes(24) + number.to_bytes(8, "big") + bytes(4)


def name(number: int) -> bytes:
    return number.to_bytes(8, "big")


def make_manager(has_events: bool = True) -> Any:
    from migration.kv.host.host_tier import HostTierManager

    return HostTierManager(SLOTS, has_events)


class Tier:
    """A manager and the requests that use it."""

    def __init__(self, manager: Any = None) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        self.manager = manager or make_manager()
        self.context = ReqContext("r")
        self.manager.on_new_request(self.context)

    def begin_store(self, *numbers: int) -> Any:
        return self.manager.prepare_store([key(number) for number in numbers], self.context)

    def end_store(self, *numbers: int) -> None:
        self.manager.complete_store({key(number) for number in numbers}, self.context)

    def store(self, *numbers: int) -> list[int]:
        """Store blocks; their slots."""
        begun = self.begin_store(*numbers)
        self.end_store(*numbers)
        slots: list[int] = begun.store_spec.block_ids.tolist()
        return slots

    def begin_load(self, *numbers: int) -> Any:
        return self.manager.prepare_load([key(number) for number in numbers], self.context)

    def end_load(self, *numbers: int) -> None:
        self.manager.complete_load({key(number) for number in numbers}, self.context)

    def has(self, number: int) -> bool:
        from vllm.v1.kv_offload.base import LookupResult

        return bool(self.manager.lookup(key(number), self.context) is LookupResult.HIT)

    @property
    def names(self) -> list[int]:
        return sorted(decode_names(b"".join(self.manager.names())))

    def changes(self) -> list[tuple[str, list[int]]]:
        return [(type(event).__name__, sorted(decode_names(event.names))) for event in self.manager.changes()]


def test_slots_go_to_the_worker_with_the_names_of_their_blocks() -> None:
    tier = Tier()
    begun = tier.begin_store(7, 8)
    assert begun.store_spec.names == [(7).to_bytes(8, "big"), (8).to_bytes(8, "big")]
    tier.end_store(7, 8)
    loaded = tier.begin_load(8)
    assert (loaded.block_ids.tolist(), loaded.names) == (
        begun.store_spec.block_ids.tolist()[1:],
        [(8).to_bytes(8, "big")],
    )


def test_contents_and_changes_are_the_blocks_that_can_be_loaded() -> None:
    tier = Tier()
    tier.begin_store(1, 2)
    assert (tier.names, tier.changes()) == ([], []), "not before they are stored"
    tier.end_store(1, 2)
    tier.store(3, 4)
    assert (tier.names, tier.changes()) == ([1, 2, 3, 4], [("HostStored", [1, 2]), ("HostStored", [3, 4])])
    tier.store(5)
    (gone, came) = tier.changes()
    assert gone[0] == "HostRemoved" and came == ("HostStored", [5]) and gone[1][0] not in tier.names


class RandomUse:
    """What engines and operators do with a tier, in any order. `loading` are the blocks of loads under way."""

    def __init__(self) -> None:
        self.tier = Tier()
        self.loading: list[int] = []
        self._draw = random.Random(3)

    def turn(self) -> None:
        """Do some of it."""
        for part, chance in ((self._load, 0.3), (self._end, 0.3), (self._delete, 0.1), (self._pin, 0.1)):
            if self._draw.random() < chance:
                part()
        self._store()
        if self._draw.random() < 0.05:
            self.tier.manager.reset_cache()
            self.tier, self.loading = Tier(self.tier.manager), []

    def end(self) -> None:
        """End all loads and pins."""
        for number in self.loading:
            self.tier.end_load(number)
        for pin in "pq":
            self.tier.manager.unpin(pin)

    def _store(self) -> None:
        begun = self.tier.begin_store(*self._draw.sample(range(9), self._draw.randrange(1, 3)))
        if begun is not None:
            if begun.keys_to_store and self._draw.random() < 0.3:
                self.tier.manager.spoil(begun.store_spec.block_ids.tolist()[:1])
            self.tier.manager.complete_store(set(begun.keys_to_store), self.tier.context)

    def _load(self) -> None:
        present = [number for number in range(9) if self.tier.has(number)]
        if present and len(self.loading) < 2:
            self.loading.append(self._draw.choice(present))
            slots = self.tier.begin_load(self.loading[-1]).block_ids.tolist()
            if self._draw.random() < 0.5:
                self.tier.manager.spoil(slots)

    def _end(self) -> None:
        if self.loading:
            self.tier.end_load(self.loading.pop(0))

    def _delete(self) -> None:
        self.tier.manager.delete([name(self._draw.randrange(9))])

    def _pin(self) -> None:
        if self._draw.random() < 0.5:
            self.tier.manager.pin(self._draw.choice("pq"), [name(each) for each in self._draw.sample(range(9), 2)])
        else:
            self.tier.manager.unpin(self._draw.choice("pq"))


def test_changes_add_up_to_the_contents_whatever_happens() -> None:
    use, known = RandomUse(), set[int]()
    for _ in range(1000):
        use.turn()
        tier = use.tier
        for event in tier.manager.changes():
            if isinstance(event, HostStored):
                assert known.isdisjoint(decode_names(event.names))
                known.update(decode_names(event.names))
            else:
                assert isinstance(event, HostRemoved) and known.issuperset(decode_names(event.names))
                known.difference_update(decode_names(event.names))
        assert sorted(known) == tier.names == [number for number in range(9) if tier.has(number)]
        assert tier.names == [number for number in range(9) if name(number) in tier.manager]
    use.end()
    assert tier.manager._get_num_free_chunks() + len(known) == SLOTS, "no slot was lost"


def test_without_events_there_are_no_changes() -> None:
    tier = Tier(make_manager(has_events=False))
    tier.store(1)
    tier.manager.reset_cache()
    assert tier.changes() == []


def test_a_store_that_failed_leaves_no_block_and_a_free_slot() -> None:
    tier = Tier()
    begun = tier.begin_store(1, 2)
    tier.manager.spoil(begun.store_spec.block_ids.tolist()[1:])
    tier.end_store(1, 2)
    assert (tier.names, tier.changes(), tier.has(2)) == ([1], [("HostStored", [1])], False)
    assert len(tier.store(2, 3, 4)) == 3 and tier.names == [1, 2, 3, 4], "nothing had to be evicted"


def test_a_spoiled_block_is_found_by_nobody_and_goes_with_its_last_load() -> None:
    tier = Tier()
    tier.store(1, 2)
    tier.changes()
    slots = tier.begin_load(1, 2).block_ids.tolist()
    tier.begin_load(2)
    tier.manager.spoil(slots[1:])
    assert tier.has(1) and not tier.has(2)
    assert (tier.changes(), tier.names) == ([("HostRemoved", [2])], [1]), "nobody is promised what leaves"
    tier.end_load(1, 2)
    assert tier.manager._get_num_free_chunks() == SLOTS - 2, "somebody reads it still"
    tier.end_load(2)
    assert (tier.changes(), tier.names) == ([], [1])
    assert len(tier.store(3, 4, 5)) == 3 and tier.names == [1, 3, 4, 5], "nothing had to be evicted"


def test_deleted_blocks_are_found_by_nobody_and_loads_of_them_are_completed() -> None:
    tier = Tier()
    tier.store(1, 2, 3)
    tier.begin_store(4)
    tier.changes()
    tier.begin_load(2)
    assert tier.manager.delete([name(1), name(2), name(4), name(9)]) == 2, (
        "a block that is being stored has no name yet"
    )
    assert tier.manager.delete([name(2)]) == 0
    assert (tier.changes(), tier.has(2), tier.manager.spoiled) == ([("HostRemoved", [1, 2])], False, set())
    assert tier.names == [3]
    tier.end_load(2)
    assert tier.changes() == []
    tier.end_store(4)
    assert tier.manager.delete(None) == 2 and tier.names == []
    assert len(tier.store(5, 6, 7, 8)) == 4


def test_pinned_blocks_are_not_evicted_until_their_pin_ends() -> None:
    tier = Tier()
    tier.store(1, 2, 3, 4)
    assert tier.manager.pin("p", [name(1), name(2), name(9), name(3)]) == 2, "the prefix ends where a block is missing"
    assert tier.manager.pin("q", [name(2)]) == 1 and tier.manager.pin("none", [name(9)]) == 0
    for number in range(5, 15):
        tier.store(number)
    assert {1, 2} <= set(tier.names) and len(tier.names) == SLOTS
    assert tier.begin_store(20, 21, 22) is None, "pinned blocks leave no room"
    assert (tier.manager.unpin("p"), tier.manager.unpin("p"), tier.manager.unpin("none")) == (2, 0, 0)
    for number in range(25, 35):
        tier.store(number)
    assert 2 in tier.names and 1 not in tier.names
    tier.manager.reset_cache()
    assert tier.manager.unpin("q") == 0


def test_a_later_pin_replaces_the_one_of_its_name_and_a_deleted_block_goes_with_its_pin() -> None:
    tier = Tier()
    tier.store(1, 2)
    assert (tier.manager.pin("p", [name(1)]), tier.manager.pin("p", [name(1), name(2)])) == (1, 2)
    assert tier.manager.delete([name(1)]) == 1 and not tier.has(1)
    assert tier.manager.pin("q", [name(1)]) == 0
    assert tier.manager.unpin("p") == 2 and tier.names == [2]


def test_blocks_are_found_by_their_names_and_slots_without_a_look_at_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = Tier()
    (first, second, *_) = tier.store(1, 2, 3)
    monkeypatch.setattr(tier.manager._slots, "chunks", Unlisted(tier.manager._slots.chunks))
    assert tier.manager.pin("p", [name(1), name(2)]) == 2
    tier.manager.spoil([first])
    assert tier.manager.delete([name(3)]) == 1
    assert tier.manager.unpin("p") == 2 and not tier.has(1) and tier.has(2) and not tier.has(3)
    tier.manager.spoil([second])
    assert not tier.has(2), "also a block that nobody uses"


class Unlisted(dict[Any, Any]):
    """A mapping of which only single entries may be looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("all slots are listed")

    items = keys = values = __iter__


def test_a_full_tier_of_blocks_in_use_stores_nothing() -> None:
    tier = Tier()
    tier.store(1, 2, 3, 4)
    tier.begin_load(1, 2, 3, 4)
    assert tier.begin_store(5) is None and tier.names == [1, 2, 3, 4]


# --- worker half --------------------------------------------------------------------------------------


def make_worker() -> tuple[Any, torch.Tensor]:
    from migration.kv.host.host_memory import HostBlocks
    from migration.kv.host.host_tier import HostTierWorker

    memory = torch.randint(-128, 128, (2, 8, 64), dtype=torch.int8)
    return HostTierWorker(HostBlocks(list(memory), SLOTS)), memory


def slots(*numbers: int) -> Any:
    from migration.kv.host.host_tier import NamedSlots

    return NamedSlots(list(numbers), [bytes([number]) * 8 for number in numbers])


def blocks(*ids: int) -> Any:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    return GPULoadStoreSpec(list(ids), group_sizes=[len(ids)], block_indices=[0])


def test_transfers_are_complete_at_once_and_reported_once() -> None:
    worker, memory = make_worker()
    assert worker.submit_store(1, blocks(3, 4), slots(0, 2)) and worker.submit_load(2, slots(2), blocks(6))
    assert torch.equal(memory[:, 6], memory[:, 4])
    worker.wait({1, 2})
    reports = [(each.job_id, each.success, each.transfer_size) for each in worker.get_finished()]
    assert reports == [(1, True, 256), (2, True, 128)] and worker.get_finished() == [] and worker.spoiled == set()


def test_a_slot_that_cannot_be_loaded_is_reported_as_spoiled() -> None:
    worker, memory = make_worker()
    worker.submit_store(1, blocks(3, 4, 5), slots(0, 1, 2))
    worker._memory._sums[1] += 1
    before = memory.clone()
    assert worker.submit_load(2, slots(0, 1, 2), blocks(6, 7, 0))
    assert (worker.spoiled, torch.equal(memory[:, 7], before[:, 7])) == ({1}, True)
    assert [each.success for each in worker.get_finished()] == [True, True], "vLLM knows no other"


def test_a_store_that_fails_ends_no_engine() -> None:
    worker, _ = make_worker()
    assert worker.submit_store(1, blocks(3, 99), slots(0, 1))
    assert worker.spoiled == {0, 1} and len(worker.get_finished()) == 1


def test_a_load_that_fails_ends_no_engine() -> None:
    worker, _ = make_worker()
    worker.submit_store(1, blocks(3), slots(0))
    assert worker.submit_load(2, slots(0), blocks(99))
    assert worker.spoiled == {0} and len(worker.get_finished()) == 2


@pytest.mark.parametrize("on_cpu", [True, False], ids=["on the CPU build", "on a GPU"])
def test_the_worker_is_vllms_own_but_on_the_cpu_build(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    from migration.kv.host import host_tier

    config: Any = SimpleNamespace(
        extra_config={"cpu_bytes_to_use": 1 << 16},
        enable_kv_cache_events=True,
        groups=(SimpleNamespace(tokens_per_block=4),),
        cache=SimpleNamespace(tokens_per_hash=4, blocks_per_chunk=1),
        parallel=SimpleNamespace(world_size=1),
        worker_kv_bytes_per_block=128,
        replicated_layout=False,
    )
    spec = host_tier.HostTierSpec(config)
    assert spec.get_manager() is spec.get_manager()
    assert isinstance(spec.get_manager(), host_tier.HostTierManager)
    monkeypatch.setattr(host_tier, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    monkeypatch.setattr(CPUOffloadingSpec, "get_worker", lambda self, caches: "vLLM's")
    _, memory = make_worker()
    caches: Any = SimpleNamespace(tensors=[SimpleNamespace(tensor=layer) for layer in memory])
    assert isinstance(spec.get_worker(caches), host_tier.HostTierWorker) == on_cpu

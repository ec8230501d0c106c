"""Orders to load and unload adapters, over fake replicas, ingress processes and a store."""

import asyncio
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from app.adapters import adapter_number
from app.ingress.adapters import AdapterOrders
from app.ingress.errors import ApiError
from app.ingress.http.orders import LoadAdapter
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import PeerLost, Refused
from policies.causes import Cause
from policies.model import ReplicaId
from tests.deployments.scheduler.fakes import FakeMembership

FIXED = Adapter("fixed", adapter_number("fixed", "/f"), "/f")
SQL = LoadAdapter(lora_name="sql", lora_path="/sql")


class Store:
    """In the place of Ray's store; `meanwhile` is another process's adapter, written before ours."""

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.meanwhile: Adapter | None = None

    def read(self) -> dict[str, Adapter]:
        return dict(self.adapters)

    def put(self, adapter: Adapter, replace: bool) -> bool:
        if self.meanwhile is not None:
            self.adapters[self.meanwhile.lora_name] = self.meanwhile
        existed = adapter.lora_name in self.adapters
        if replace or not existed:
            self.adapters[adapter.lora_name] = adapter
        return not existed

    def remove(self, name: str) -> bool:
        return self.adapters.pop(name, None) is not None


class Fleet:
    """Replicas of both deployments: records what they load, and how often they refresh; some fail."""

    def __init__(self, *replicas: str) -> None:
        self.members = FakeMembership()
        self.members.running = tuple(map(ReplicaId, replicas))
        self.loaded: list[tuple[str, Adapter]] = []
        self.refreshed: list[str] = []
        self.errors: dict[str, Exception] = {}

    def at(self, replica: ReplicaId, routed: bool = True) -> "One":
        return One(self, replica)

    def forget(self, replica: ReplicaId) -> None:
        raise AssertionError


class One:
    def __init__(self, fleet: Fleet, replica: ReplicaId) -> None:
        self.fleet = fleet
        self.replica = replica

    async def metrics(self) -> Any:
        raise AssertionError

    async def load_adapter(self, adapter: Adapter) -> None:
        await asyncio.sleep(0)
        if error := self.fleet.errors.get(self.replica):
            raise error
        self.fleet.loaded.append((self.replica, adapter))

    async def refresh_adapters(self) -> None:
        if error := self.fleet.errors.get(self.replica):
            raise error
        self.fleet.refreshed.append(self.replica)


class Process:
    """One ingress process, and all around it."""

    def __init__(self, store: Store | None = None, elsewhere: Collection[str] = (), *others: Store) -> None:
        self.store = store or Store()
        self.engines, self.ingresses = Fleet("a", "b"), Fleet("i", "j")
        self.served: list[str] = []
        self.orders = AdapterOrders(
            self.store,
            {"model"},
            [FIXED],
            (self.engines, self.engines.members),
            (self.ingresses, self.ingresses.members),
            self.serve,
            elsewhere,
            others,
        )

    def serve(self, adapters: Iterable[Adapter]) -> None:
        self.served = [adapter.lora_name for adapter in adapters]

    async def refused(self, order: LoadAdapter) -> ApiError:
        before = self.store.read()
        with pytest.raises(ApiError) as refused:
            await self.orders.load(order)
        assert self.store.read() == before
        return refused.value


async def test_a_loaded_adapter_is_in_every_engine_and_process() -> None:
    process = Process()
    assert await process.orders.load(SQL) == "Success: LoRA adapter 'sql' added successfully."
    (adapter,) = process.store.adapters.values()
    assert process.engines.loaded == [("a", adapter), ("b", adapter)]
    assert (process.served, process.ingresses.refreshed) == (["fixed", "sql"], ["i", "j"])
    other = Process(process.store)
    await other.orders.refresh()
    assert other.served == ["fixed", "sql"], "a process that starts later"


async def test_an_unloaded_adapter_is_served_nowhere() -> None:
    process, other = Process(store := Store()), Process(store)
    await process.orders.load(SQL)
    await other.orders.refresh()
    assert await process.orders.unload("sql") == "Success: LoRA adapter 'sql' removed successfully."
    await other.orders.refresh()
    assert process.served == other.served == ["fixed"]
    assert process.ingresses.refreshed == ["i", "j"] * 2


async def test_a_refresh_without_news_changes_nothing() -> None:
    process = Process()
    await process.orders.load(SQL)
    process.served = []
    await process.orders.refresh()
    assert process.served == []


async def test_a_name_can_be_loaded_anew_only_on_request() -> None:
    process = Process()
    await process.orders.load(SQL)
    before = process.store.adapters["sql"]
    assert "has already been loaded" in (await process.refused(SQL)).message
    await process.orders.load(SQL.model_copy(update={"load_inplace": True}))
    after = process.store.adapters["sql"]
    assert after.lora_int_id != before.lora_int_id, "engines may still have the earlier one, even of the same path"
    assert not after.load_inplace, "vLLM would load it again in every step"
    await process.orders.unload("sql")
    await process.orders.load(SQL)
    assert process.store.adapters["sql"].lora_int_id not in (before.lora_int_id, after.lora_int_id)


async def test_of_two_loads_of_a_name_one_is_refused() -> None:
    process = Process()
    process.store.meanwhile = Adapter("sql", 5, "/other")
    with pytest.raises(ApiError, match="400"):
        await process.orders.load(SQL)
    assert process.store.adapters["sql"].lora_path == "/other"


@pytest.mark.parametrize(("name", "named"), [("model", "served base model"), ("fixed", "lora_modules")])
async def test_the_configurations_names_are_fixed(name: str, named: str) -> None:
    process = Process()
    for inplace in (False, True):
        error = await process.refused(LoadAdapter(lora_name=name, lora_path="/x", load_inplace=inplace))
        assert error.status == 400 and named in error.message
    with pytest.raises(ApiError, match=named):
        await process.orders.unload(name)
    assert process.engines.loaded == []


async def test_an_unknown_adapter_cannot_be_unloaded() -> None:
    with pytest.raises(ApiError) as refused:
        await Process().orders.unload("sql")
    assert refused.value.status == 404


async def test_nothing_is_listed_that_a_replica_cannot_load() -> None:
    process = Process()
    process.engines.errors["b"] = Refused("adapter 'sql': no files", Cause.ADAPTER)
    error = await process.refused(SQL)
    assert (error.status, error.message) == (400, "replica b: adapter 'sql': no files")
    assert process.served == []


@pytest.mark.parametrize("replicas", [(), ("a",)])
async def test_without_a_replica_nothing_can_be_loaded(replicas: tuple[str, ...]) -> None:
    process = Process()
    process.engines.members.running = tuple(map(ReplicaId, replicas))
    process.engines.errors["a"] = PeerLost("replica a died")
    error = await process.refused(SQL)
    assert error.status == 503 and "could load the adapter" in error.message


async def test_a_process_or_replica_that_is_gone_delays_no_order() -> None:
    process = Process()
    process.engines.errors["b"] = process.ingresses.errors["j"] = PeerLost("gone")
    await process.orders.load(SQL)
    assert process.served == ["fixed", "sql"]


async def test_the_configuration_takes_precedence() -> None:
    """An adapter that was loaded at run time, and is now in the configuration with another path."""
    process = Process()
    process.store.adapters["sql"], process.store.adapters["fixed"] = (
        Adapter("sql", 2, "/sql"),
        Adapter("fixed", 3, "/f"),
    )
    taken: list[Adapter] = []
    process.orders._serve = taken.extend
    await process.orders.refresh()
    assert taken == [FIXED, Adapter("sql", 2, "/sql")]


async def test_names_of_other_models_in_the_configuration_take_precedence() -> None:
    """An adapter that was loaded at run time, whose name the configuration now gives to another model."""
    process = Process(elsewhere={"code"})
    process.store.adapters = {name: Adapter(name, 2, "/x") for name in ("code", "sql")}
    await process.orders.refresh()
    assert process.served == ["fixed", "sql"]
    error = await process.refused(LoadAdapter(lora_name="code", lora_path="/x"))
    assert error.status == 400 and "name of another model" in error.message
    assert process.engines.loaded == []


async def test_of_two_loads_of_a_name_for_two_models_one_at_most_is_kept() -> None:
    chat, code = Store(), Store()
    processes = [Process(chat, (), code), Process(code, (), chat)]
    loads = await asyncio.gather(*(each.orders.load(SQL) for each in processes), return_exceptions=True)
    kept = [store for store in (chat, code) if "sql" in store.adapters]
    assert len(kept) == sum(isinstance(load, str) for load in loads) <= 1
    assert await Process(code, (), Store()).orders.load(SQL.model_copy(update={"load_inplace": True}))

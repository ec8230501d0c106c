"""Adapters are loaded once, by a call of their own, and never without their files."""

import asyncio
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from deployments.engine.adapters import LoadedAdapters
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import Refused
from policies.causes import Cause


class Core:
    """In the engine's place: records the adapters that it loads, or fails."""

    def __init__(self) -> None:
        self.loaded: list[LoRARequest] = []
        self.error: str | None = None
        self.going = asyncio.Event()
        self.going.set()

    async def add(self, request: LoRARequest) -> bool:
        await self.going.wait()
        self.loaded.append(request)
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_text("{}")
    return Adapter("sql", 7, str(tmp_path), is_3d_lora_weight=True)


async def test_an_adapter_is_loaded_once(adapter: Adapter) -> None:
    core = Core()
    adapters = LoadedAdapters(core.add)
    assert adapters.get(adapter) is None
    core.going.clear()
    loads = [asyncio.create_task(adapters.load(adapter)) for _ in range(3)]
    await asyncio.sleep(0.05)
    core.going.set()
    await asyncio.gather(*loads)
    await adapters.load(adapter)
    (request,) = core.loaded
    assert (request.lora_int_id, request.lora_path, request.is_3d_lora_weight) == (7, adapter.lora_path, True)


async def test_adapters_of_one_name_are_two_for_the_engine(adapter: Adapter) -> None:
    core = Core()
    adapters = LoadedAdapters(core.add)
    again = Adapter(adapter.lora_name, 8, adapter.lora_path)
    await adapters.load(adapter)
    await adapters.load(again)
    assert len(set(core.loaded)) == 2, "vLLM compares adapters by their names alone"
    names = [found.lora_name for found in map(adapters.get, (adapter, again)) if found is not None]
    assert names == [request.lora_name for request in core.loaded]


async def test_an_adapter_that_the_engine_refuses_can_be_loaded_later(adapter: Adapter) -> None:
    core = Core()
    why = "LoRA rank 64 is greater than max_lora_rank 16."
    core.error = f"Call to add_lora method failed: Worker failed with error '{why}', please check the stack trace above"
    adapters = LoadedAdapters(core.add)
    with pytest.raises(Refused, match=f"'sql' cannot be loaded: {why}$") as refused:
        await adapters.load(adapter)
    assert refused.value.cause is Cause.ADAPTER and adapters.get(adapter) is None
    core.error = None
    await adapters.load(adapter)
    assert adapters.get(adapter) is not None


async def test_a_hub_that_cannot_be_reached_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(path: str) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("deployments.engine.adapters.get_adapter_absolute_path", offline)
    with pytest.raises(Refused, match="org/a is neither a folder here nor on the hub: Name or service not known"):
        await LoadedAdapters(Core().add).load(Adapter("a", 7, "org/a"))


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
async def test_an_adapter_without_its_files_never_reaches_the_engine(adapter: Adapter, file: str) -> None:
    core = Core()
    (Path(adapter.lora_path) / file).unlink()
    with pytest.raises(Refused, match="with weights in"):
        await LoadedAdapters(core.add).load(adapter)
    assert core.loaded == []


async def test_files_that_go_away_end_the_use_of_an_adapter(adapter: Adapter) -> None:
    adapters = LoadedAdapters(Core().add)
    await adapters.load(adapter)
    (Path(adapter.lora_path) / "adapter_config.json").unlink()
    with pytest.raises(Refused, match="'sql'"):
        await adapters.load(adapter)


async def test_a_load_goes_on_without_its_caller(adapter: Adapter) -> None:
    core = Core()
    core.going.clear()
    adapters = LoadedAdapters(core.add)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await adapters.load(adapter)
    core.going.set()
    await adapters.load(adapter)
    assert len(core.loaded) == 1

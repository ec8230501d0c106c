"""The LoRA adapters of one engine, loaded before a request names them.

vLLM's worker loads an adapter in the first step that needs it, and an error in a step ends the engine. The call that
loads an adapter in advance validates it, and its error is an answer. vLLM's worker keeps `max_cpu_loras` adapters and
loads the others again when they are needed: so their files must still be there whenever a request comes.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from os.path import isfile
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from deployments.engine.vllm_messages import EngineDeadError
from migration.concurrency import take_failure
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import Refused, Stopping
from policies.causes import Cause

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


class LoadedAdapters:
    """The adapters that vLLM has loaded at least once; `add` is the engine's call that loads one."""

    def __init__(self, add: Callable[[LoRARequest], Awaitable[bool]]) -> None:
        self._add = add
        self._loaded: dict[int, Adapter] = {}
        self._loading: dict[int, asyncio.Task[None]] = {}

    def get(self, adapter: Adapter) -> Adapter | None:
        """The adapter as requests of this engine name it; None if it has not been loaded.

        vLLM takes two adapters of one name for the same one, whatever their files: here its number is its name.
        """
        return self._loaded.get(adapter.lora_int_id)

    async def load(self, adapter: Adapter) -> None:
        """Load an adapter, unless it has been. A load goes on when its caller is cancelled.

        Raises:
            Refused: it cannot be loaded, or its files are gone.
            Stopping: the engine has died.
        """
        number = adapter.lora_int_id
        if (loaded := self._loaded.get(number)) is not None:
            await asyncio.to_thread(_check_files, adapter.lora_name, Path(loaded.lora_path))
            return
        if (loading := self._loading.get(number)) is None:
            loading = self._loading[number] = asyncio.create_task(self._load(adapter))
            loading.add_done_callback(lambda _: self._loading.pop(number))
            loading.add_done_callback(take_failure)
        await asyncio.shield(loading)

    async def _load(self, adapter: Adapter) -> None:
        name, number = adapter.lora_name, adapter.lora_int_id
        try:
            # A repository on a hub is fetched here: the engine computes nothing while it loads files.
            folder = await asyncio.to_thread(get_adapter_absolute_path, adapter.lora_path)
        except Exception as error:
            reason = f"adapter {name!r}: {adapter.lora_path} is neither a folder here nor on the hub: {error}"
            raise Refused(reason, Cause.ADAPTER) from error
        await asyncio.to_thread(_check_files, name, Path(folder))
        own = Adapter(str(number), number, folder, is_3d_lora_weight=adapter.is_3d_lora_weight)
        try:
            await self._add(LoRARequest(own.lora_name, number, folder, is_3d_lora_weight=adapter.is_3d_lora_weight))
        except EngineDeadError as error:
            raise Stopping("the engine died while it loaded an adapter", Cause.ADAPTER) from error
        except Exception as error:
            raise Refused(f"adapter {name!r} cannot be loaded: {_reason(error)}", Cause.ADAPTER) from error
        self._loaded[number] = own


def _reason(error: Exception) -> str:
    """The worker's own words in an error of vLLM's engine core, which wraps them twice."""
    text = str(error)
    inner = re.search(r"Worker failed with error '(.*)', please check the stack trace", text, re.DOTALL)
    return inner[1] if inner else text


def _check_files(name: str, folder: Path) -> None:
    """Raise Refused unless the folder has the files of an adapter."""
    if not isfile(folder / _CONFIG) or not any(isfile(folder / weights) for weights in _WEIGHTS):
        raise Refused(f"adapter {name!r}: there is no {_CONFIG} with weights in {folder}", Cause.ADAPTER)

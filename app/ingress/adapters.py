"""Orders of operators to load and unload LoRA adapters at run time, and the list that every ingress process follows.

A load asks all running replicas first, so that nothing is listed that no engine can load. The list is in a store that
all ingress processes read: those that are called after a change, the others within a second. Requests carry their
adapter, so a replica that starts later loads it with the first request that names it.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from app.adapters import adapter_number
from app.ingress.errors import ApiError
from app.ingress.http.orders import LoadAdapter
from deployments.api.protocols import AdapterApi, AdapterListApi, RemoteReplicas
from deployments.serve.membership import Membership
from migration.concurrency import settle
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import Refused

log = logging.getLogger("ray.serve")

_LOAD_S = 300.0
"""The longest time in which all replicas load an adapter, which may be on a hub."""
_TELL_S = 2.0
"""The longest wait for the other ingress processes to read the list."""


class AdapterList(Protocol):
    """The list's store (`deployments.serve.adapters.AdapterStore`); its calls block."""

    def read(self) -> dict[str, Adapter]:
        """All adapters, by name."""
        ...

    def put(self, adapter: Adapter, replace: bool) -> bool:
        """Add an adapter. Returns False if there is one of that name; then nothing changes unless `replace`."""
        ...

    def remove(self, name: str) -> bool:
        """Remove an adapter. Returns False if there is none of that name."""
        ...


class AdapterOrders:
    """The orders. `serve` takes the adapters that this process serves from then on.

    `models` are the names of the model, and `fixed` the adapters of the configuration, which no order changes. Of
    other models, `elsewhere` are the names in the configuration, those of adapters included, and `others` the stores.
    """

    def __init__(
        self,
        store: AdapterList,
        models: Collection[str],
        fixed: Sequence[Adapter],
        engines: tuple[RemoteReplicas[AdapterApi], Membership],
        ingresses: tuple[RemoteReplicas[AdapterListApi], Membership],
        serve: Callable[[Iterable[Adapter]], None],
        elsewhere: Collection[str] = (),
        others: Sequence[AdapterList] = (),
    ) -> None:
        self._store = store
        self._models = models
        self._fixed = {adapter.lora_name: adapter for adapter in fixed}
        self._engines, self._engine_members = engines
        self._ingresses, self._ingress_members = ingresses
        self._serve = serve
        self._elsewhere = elsewhere
        self._others = others
        self._served: dict[str, Adapter] = {}
        self._refreshing = asyncio.Lock()

    async def refresh(self) -> None:
        """Serve the adapters that the store has now. Names of the configuration, of all models, take precedence."""
        async with self._refreshing:  # An older list must not come behind a newer one.
            listed = await asyncio.to_thread(self._store.read)
            if listed != self._served:
                self._served = listed
                loaded = {name: each for name, each in listed.items() if name not in self._elsewhere}
                self._serve((self._fixed | loaded | self._fixed).values())

    async def load(self, order: LoadAdapter) -> str:
        """Load an adapter into all running engines, and serve it in all ingress processes. Returns the answer's text.

        Raises:
            ApiError: 400 if the name is taken or an engine cannot load the adapter, 503 if no replica runs.
        """
        name = order.lora_name
        listed = await asyncio.to_thread(self._store.read)
        self._check_name(name)
        if name in self._elsewhere:
            raise taken_elsewhere(name)
        if name in listed and not order.load_inplace:
            raise _refused(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
        adapter = _numbered(order, {each.lora_int_id for each in (*listed.values(), *self._fixed.values())})
        await self._load_everywhere(adapter)
        if not await asyncio.to_thread(self._store.put, adapter, order.load_inplace) and not order.load_inplace:
            raise _refused(f"The lora adapter '{name}' has been loaded by another call meanwhile.")
        if any([name in await asyncio.to_thread(other.read) for other in self._others]):
            # Another call has loaded it for another model meanwhile. Of two such calls, one at least sees the other's.
            await asyncio.to_thread(self._store.remove, name)
            raise taken_elsewhere(name)
        await self._refresh_everywhere()
        log.info("loaded adapter %r from %s", name, adapter.lora_path)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, name: str) -> str:
        """Serve an adapter no more; requests that run with it continue. Returns the answer's text.

        Raises:
            ApiError: 400 for an adapter of the configuration, 404 if there is none of that name.
        """
        self._check_name(name)
        if not await asyncio.to_thread(self._store.remove, name):
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", param="lora_name")
        await self._refresh_everywhere()
        log.info("unloaded adapter %r", name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _check_name(self, name: str) -> None:
        if name in self._models:
            raise _refused(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self._fixed:
            raise _refused(f"The lora adapter '{name}' is in the configuration's lora_modules: change it there.")

    async def _load_everywhere(self, adapter: Adapter) -> None:
        replicas = self._engine_members.running
        outcomes = await settle([self._engines.at(replica).load_adapter(adapter) for replica in replicas], _LOAD_S)
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, Refused):
                raise _refused(f"replica {replica}: {outcome}")
        if None not in outcomes:
            why = f": {outcomes[0]!r}" if outcomes else ""
            raise ApiError(503, f"no replica could load the adapter{why}", code="unavailable")

    async def _refresh_everywhere(self) -> None:
        """Refresh here, and call the other processes; one that does not answer reads the list by itself."""
        others = [
            self._ingresses.at(ingress, routed=False).refresh_adapters() for ingress in self._ingress_members.running
        ]
        await asyncio.gather(self.refresh(), settle(others, _TELL_S))


def _numbered(order: LoadAdapter, taken: Collection[int]) -> Adapter:
    """The adapter of an order, with a number of its own: engines and requests may still have an earlier one."""
    while (number := adapter_number(order.lora_name, order.lora_path, uuid.uuid4().hex)) in taken:
        pass
    return Adapter(order.lora_name, number, order.lora_path, is_3d_lora_weight=order.is_3d_lora_weight)


def taken_elsewhere(name: str) -> ApiError:
    """400: the adapter's name is that of another model, or of an adapter of one."""
    return _refused(f"The lora adapter '{name}' has the name of another model, or of an adapter of one.")


def _refused(message: str) -> ApiError:
    return ApiError(400, message, param="lora_name")

"""The LoRA adapters that operators have loaded at run time, in Ray's internal key-value store.

The store is the only owner of the list. It outlives the scheduler, every replica and every ingress, and a repeated
deployment of the configuration; it ends with the Ray cluster.
"""

import msgspec

from migration import ray_store
from migration.protocol.core_messages import Adapter
from policies.model import PoolId

_encoder = msgspec.msgpack.Encoder()
_adapters = msgspec.msgpack.Decoder(Adapter)


class AdapterStore:
    """The adapters of a pool's model. Calls block for a round trip to Ray's control service."""

    def __init__(self, app: str, pool: PoolId) -> None:
        self._prefix = f"adapters/{app}/{pool}/"

    def read(self) -> dict[str, Adapter]:
        """All adapters, by name."""
        values = map(ray_store.read, ray_store.keys(self._prefix))
        adapters = (_adapters.decode(value) for value in values if value is not None)
        return {adapter.lora_name: adapter for adapter in adapters}

    def put(self, adapter: Adapter, replace: bool) -> bool:
        """Add an adapter. Returns False if there is one of that name; then nothing changes unless `replace`."""
        value = _encoder.encode(adapter)
        return not ray_store.write(self._key(adapter.lora_name), value, replace)

    def remove(self, name: str) -> bool:
        """Remove an adapter. Returns False if there is none of that name."""
        return ray_store.remove(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

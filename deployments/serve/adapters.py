"""The LoRA adapters that operators have loaded at run time, in Ray's internal key-value store.

The store is the only owner of the list. It outlives the scheduler, every replica and every ingress, and a repeated
deployment of the configuration; it ends with the Ray cluster.
"""

import msgspec
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from migration.protocol.core_messages import Adapter

_NAMESPACE = b"mell"

_encoder = msgspec.msgpack.Encoder()
_adapters = msgspec.msgpack.Decoder(Adapter)


class AdapterStore:
    """The adapters of an application. Calls block for a round trip to Ray's control service."""

    def __init__(self, app: str) -> None:
        self._prefix = f"adapters/{app}/"

    def read(self) -> dict[str, Adapter]:
        """All adapters, by name."""
        keys = _internal_kv_list(self._prefix.encode(), namespace=_NAMESPACE)
        values = (_internal_kv_get(key, namespace=_NAMESPACE) for key in sorted(keys))
        adapters = (_adapters.decode(value) for value in values if value is not None)
        return {adapter.lora_name: adapter for adapter in adapters}

    def put(self, adapter: Adapter, replace: bool) -> bool:
        """Add an adapter. Returns False if there is one of that name; then nothing changes unless `replace`."""
        value = _encoder.encode(adapter)
        existed: bool = _internal_kv_put(self._key(adapter.lora_name), value, overwrite=replace, namespace=_NAMESPACE)
        return not existed

    def remove(self, name: str) -> bool:
        """Remove an adapter. Returns False if there is none of that name."""
        removed: int = _internal_kv_del(self._key(name), namespace=_NAMESPACE)
        return removed > 0

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}{name}".encode()

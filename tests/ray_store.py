"""A dictionary in the place of Ray's key-value store."""

import pytest

from migration import ray_store


def replace_store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Have Mell keep its values in the returned dictionary."""
    kept: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> bool:
        existed = key in kept
        if overwrite or not existed:
            kept[key] = value
        return existed

    monkeypatch.setattr(ray_store, "_internal_kv_put", put)
    monkeypatch.setattr(ray_store, "_internal_kv_get", lambda key, namespace: kept.get(key))
    monkeypatch.setattr(ray_store, "_internal_kv_del", lambda key, namespace: int(kept.pop(key, None) is not None))
    monkeypatch.setattr(
        ray_store, "_internal_kv_list", lambda prefix, namespace: [k for k in kept if k.startswith(prefix)]
    )
    return kept

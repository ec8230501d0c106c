"""The store of adapters, over a dictionary in the place of Ray's."""

import pytest

from deployments.serve import adapters
from deployments.serve.adapters import AdapterStore
from migration.protocol.core_messages import Adapter


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    kept: dict[bytes, bytes] = {}

    def put(key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> bool:
        existed = key in kept
        if overwrite or not existed:
            kept[key] = value
        return existed

    monkeypatch.setattr(adapters, "_internal_kv_put", put)
    monkeypatch.setattr(adapters, "_internal_kv_get", lambda key, namespace: kept.get(key))
    monkeypatch.setattr(adapters, "_internal_kv_del", lambda key, namespace: int(kept.pop(key, None) is not None))
    monkeypatch.setattr(
        adapters, "_internal_kv_list", lambda prefix, namespace: [k for k in kept if k.startswith(prefix)]
    )
    return kept


A, B = Adapter("a/b \u00e9", 1, "/a", is_3d_lora_weight=True), Adapter("b", 2, "/b")


def test_adapters_are_kept_by_application_and_name(kept: dict[bytes, bytes]) -> None:
    store, other = AdapterStore("mell"), AdapterStore("other")
    assert store.put(A, replace=False) and store.put(B, replace=False)
    assert AdapterStore("mell").read() == {A.lora_name: A, "b": B} and other.read() == {}
    assert store.remove(A.lora_name) and not store.remove(A.lora_name)
    assert store.read() == {"b": B}


def test_an_adapter_is_replaced_only_on_request() -> None:
    store, again = AdapterStore("mell"), Adapter("b", 3, "/c")
    assert store.put(B, replace=False)
    assert not store.put(again, replace=False) and store.read() == {"b": B}
    assert not store.put(again, replace=True) and store.read() == {"b": again}

"""The store of adapters, over a dictionary in the place of Ray's."""

import pytest

from deployments.serve.adapters import AdapterStore
from migration.protocol.core_messages import Adapter
from policies.model import SOLE_POOL, PoolId
from tests.ray_store import replace_store


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    return replace_store(monkeypatch)


A, B = Adapter("a/b \u00e9", 1, "/a", is_3d_lora_weight=True), Adapter("b", 2, "/b")


def test_adapters_are_kept_by_pool_and_name(kept: dict[bytes, bytes]) -> None:
    store, other = AdapterStore("mell", SOLE_POOL), AdapterStore("mell", PoolId(f"{SOLE_POOL}-other"))
    assert store.put(A, replace=False) and store.put(B, replace=False)
    assert AdapterStore("mell", SOLE_POOL).read() == {A.lora_name: A, "b": B} and other.read() == {}
    assert store.remove(A.lora_name) and not store.remove(A.lora_name)
    assert store.read() == {"b": B}


def test_an_adapter_is_replaced_only_on_request() -> None:
    store, again = AdapterStore("mell", SOLE_POOL), Adapter("b", 3, "/c")
    assert store.put(B, replace=False)
    assert not store.put(again, replace=False) and store.read() == {"b": B}
    assert not store.put(again, replace=True) and store.read() == {"b": again}

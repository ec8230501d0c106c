"""An operator's levels count for the pool, the application and the start of Serve for which they were set."""

import pytest

from deployments.serve.levels import ServeLevelStore
from policies.cost.service import ServiceLevel
from policies.model import SOLE_POOL, PoolId
from tests.ray_store import replace_store

CONFIGURED = {"default": ServiceLevel(2.0, None), "chat": ServiceLevel(None, 0.05)}
ORDERED = CONFIGURED | {"default": ServiceLevel(1.5, 0.04)}


def test_levels_count_until_others_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_store(monkeypatch)
    store = ServeLevelStore("mell", SOLE_POOL, "g")
    assert store.read(CONFIGURED) == CONFIGURED
    store.write(CONFIGURED, ORDERED)
    assert store.read(CONFIGURED) == ORDERED
    other = {"default": ServiceLevel(3.0)}
    assert store.read(other) == other, "another configuration"
    for elsewhere in (("mell", SOLE_POOL, "h"), ("mell", PoolId("Other"), "g"), ("other", SOLE_POOL, "g")):
        assert ServeLevelStore(*elsewhere).read(CONFIGURED) == CONFIGURED

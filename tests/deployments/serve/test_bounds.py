"""An operator's bounds count for the pool, the application and the start of Serve for which they were set."""

import pytest

from deployments.serve import bounds
from policies.model import SOLE_POOL, PoolId
from tests.ray_store import replace_store


def test_bounds_count_until_others_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_store(monkeypatch)
    assert bounds.read_bounds("mell", SOLE_POOL, "g", (1, 2)) == (1, 2)
    bounds.write_bounds("mell", SOLE_POOL, "g", (1, 2), (3, 4))
    assert bounds.read_bounds("mell", SOLE_POOL, "g", (1, 2)) == (3, 4)
    assert bounds.read_bounds("mell", SOLE_POOL, "g", (1, 5)) == (1, 5), "another configuration"
    assert bounds.read_bounds("mell", SOLE_POOL, "h", (1, 2)) == (1, 2), "another start of Serve"
    assert bounds.read_bounds("mell", PoolId("Other"), "g", (1, 2)) == (1, 2)
    assert bounds.read_bounds("other", SOLE_POOL, "g", (1, 2)) == (1, 2)

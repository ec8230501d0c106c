"""The store of operators' roles, over a dictionary in the place of Ray's."""

import pytest

from deployments.serve.roles import ServeRoleStore
from policies.model import SOLE_POOL, PoolId, ReplicaId, Role
from tests.ray_store import replace_store


def test_roles_are_kept_by_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_store(monkeypatch)
    given = {ReplicaId("a"): Role.PREFILL, ReplicaId("b"): Role.BOTH}
    ServeRoleStore("mell", SOLE_POOL).write(given)
    assert ServeRoleStore("mell", SOLE_POOL).read() == given
    assert ServeRoleStore("other", SOLE_POOL).read() == ServeRoleStore("mell", PoolId("Other")).read() == {}
    ServeRoleStore("mell", SOLE_POOL).write({})
    assert ServeRoleStore("mell", SOLE_POOL).read() == {}

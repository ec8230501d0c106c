"""The store of operators' roles, over a dictionary in the place of Ray's."""

import pytest

from deployments.serve import roles
from deployments.serve.roles import ServeRoleStore
from policies.model import SOLE_POOL, PoolId, ReplicaId, Role


def test_roles_are_kept_by_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bytes, bytes] = {}
    monkeypatch.setattr(roles, "_internal_kv_get", lambda key, namespace: kept.get(key))
    monkeypatch.setattr(roles, "_internal_kv_put", lambda key, value, **_: kept.update({key: value}))
    given = {ReplicaId("a"): Role.PREFILL, ReplicaId("b"): Role.BOTH}
    ServeRoleStore("mell", SOLE_POOL).write(given)
    assert ServeRoleStore("mell", SOLE_POOL).read() == given
    assert ServeRoleStore("other", SOLE_POOL).read() == ServeRoleStore("mell", PoolId("Other")).read() == {}
    ServeRoleStore("mell", SOLE_POOL).write({})
    assert ServeRoleStore("mell", SOLE_POOL).read() == {}

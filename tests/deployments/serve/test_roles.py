"""The store of operators' roles, over a dictionary in the place of Ray's."""

import pytest

from deployments.serve import roles
from deployments.serve.roles import ServeRoleStore
from policies.model import ReplicaId, Role


def test_roles_are_kept_by_application(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bytes, bytes] = {}
    monkeypatch.setattr(roles, "_internal_kv_get", lambda key, namespace: kept.get(key))
    monkeypatch.setattr(roles, "_internal_kv_put", lambda key, value, **_: kept.update({key: value}))
    given = {ReplicaId("a"): Role.PREFILL, ReplicaId("b"): Role.BOTH}
    ServeRoleStore("mell").write(given)
    assert ServeRoleStore("mell").read() == given and ServeRoleStore("other").read() == {}
    ServeRoleStore("mell").write({})
    assert ServeRoleStore("mell").read() == {}

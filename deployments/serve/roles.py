"""The roles that operators have set, in Ray's internal key-value store, so that they outlive the scheduler."""

import json
from collections.abc import Mapping
from typing import Protocol

from migration import ray_store
from policies.model import PoolId, ReplicaId, Role


class RoleStore(Protocol):
    """Keeps the roles, by replica."""

    def read(self) -> dict[ReplicaId, Role]:
        """All roles."""
        ...

    def write(self, roles: Mapping[ReplicaId, Role]) -> None:
        """Replace all roles."""
        ...


class ServeRoleStore:
    """Implements `RoleStore` for a pool of an application. Calls block for a round trip to Ray's control service."""

    def __init__(self, app: str, pool: PoolId) -> None:
        self._key = f"roles/{app}/{pool}"

    def read(self) -> dict[ReplicaId, Role]:
        """See `RoleStore.read`."""
        found = json.loads(ray_store.read(self._key) or b"{}")
        return {ReplicaId(replica): Role(role) for replica, role in found.items()}

    def write(self, roles: Mapping[ReplicaId, Role]) -> None:
        """See `RoleStore.write`."""
        ray_store.write(self._key, json.dumps(roles).encode())

"""The memory that starting replicas have been given, in Ray's internal key-value store: no report has it yet.

A scheduler finds here what the one before has given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import TypeAdapter

from migration import ray_store
from policies.model import Bytes, PoolId, ReplicaId


@dataclass(frozen=True, slots=True)
class SeatClaim:
    """The memory of a node, in bytes, that a starting replica of a pool counts with."""

    pool: PoolId
    node: str
    size: Bytes


Claims = Mapping[ReplicaId, SeatClaim]

_CLAIMS: TypeAdapter[Claims] = TypeAdapter(Claims)


class ClaimStore(Protocol):
    """Keeps the claims of all replicas that start."""

    def read(self) -> Claims:
        """All claims."""
        ...

    def write(self, claims: Claims) -> None:
        """Replace all claims."""
        ...


class ServeClaimStore:
    """Implements `ClaimStore` for an application. Calls block for a round trip to Ray's control service."""

    def __init__(self, app: str) -> None:
        self._key = f"claims/{app}"

    def read(self) -> Claims:
        """See `ClaimStore.read`."""
        return _CLAIMS.validate_json(ray_store.read(self._key) or b"{}")

    def write(self, claims: Claims) -> None:
        """See `ClaimStore.write`."""
        ray_store.write(self._key, _CLAIMS.dump_json(claims))

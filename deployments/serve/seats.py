"""The memory that starting replicas have been given, in Ray's internal key-value store: no report has it yet.

A scheduler finds here what the one before has given.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from deployments.serve.fences import check_newest
from migration import ray_store
from policies.model import Bytes, PoolId, ReplicaId

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class SeatClaim:
    """The memory of a node, in bytes, that a starting replica of a pool counts with."""

    pool: PoolId
    node: str
    size: Bytes


Claims = Mapping[ReplicaId, SeatClaim]

_CLAIM: TypeAdapter[SeatClaim] = TypeAdapter(SeatClaim)
_CLAIMS: TypeAdapter[Claims] = TypeAdapter(Claims)
_STORED: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


class ClaimStore(Protocol):
    """Keeps the claims of all replicas that start, for one scheduler."""

    def check_current(self) -> None:
        """Raise `Refused` if a newer scheduler has begun: the claims are its own from then on."""
        ...

    def read(self) -> Claims:
        """All claims. One that cannot be read is dropped with a warning: its replica asks again, or reports."""
        ...

    def write(self, claims: Claims) -> None:
        """Replace all claims. Raises `Refused` as `check_current` does."""
        ...


class ServeClaimStore:
    """Implements `ClaimStore` for an application's scheduler with this `fence`.

    Calls block for a round trip to Ray's control service, writes for three.
    """

    def __init__(self, app: str, fence: int) -> None:
        self._app = app
        self._fence = fence
        self._key = f"claims/{app}"

    def check_current(self) -> None:
        """See `ClaimStore.check_current`."""
        check_newest(self._app, self._fence)

    def read(self) -> Claims:
        """See `ClaimStore.read`."""
        stored = ray_store.read(self._key) or b"{}"
        try:
            found = _STORED.validate_json(stored)
        except ValidationError as error:
            log.warning("the claims of all replicas that start are dropped: %r: %s", stored, error)
            return {}
        claims = {}
        for replica, claim in found.items():
            try:
                claims[ReplicaId(replica)] = _CLAIM.validate_python(claim)
            except ValidationError as error:
                log.warning("the claim of replica %s is dropped: %r: %s", replica, claim, error)
        return claims

    def write(self, claims: Claims) -> None:
        """See `ClaimStore.write`."""
        self.check_current()
        ray_store.write(self._key, _CLAIMS.dump_json(claims))
        # A newer one may have read the claims before that.
        self.check_current()

"""The memory that starting replicas have been given, in Ray's internal key-value store: no report has it yet.

Each scheduler has a key of its own, which contains its fence, and begins with the claims under the highest fence. So a
write that arrives late changes nothing that a newer scheduler reads or writes. A scheduler gives a claim only if it
finds no newer one behind the write. A newer one takes its fence before it reads the claims: it reads all given ones.
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

    def take_over(self) -> Claims:
        """Keep the claims of the scheduler before from now on, and return them.

        One that cannot be read is dropped with a warning: its replica asks again, or reports.
        """
        ...

    def write(self, claims: Claims) -> None:
        """Replace all claims. Raises `Refused` as `check_current` does: the new ones are not given then."""
        ...


class ServeClaimStore:
    """Implements `ClaimStore` for an application's scheduler with this `fence`.

    Calls block for a round trip to Ray's control service, writes for two, `take_over` for a few.
    """

    def __init__(self, app: str, fence: int) -> None:
        self._app = app
        self._fence = fence
        self._prefix = f"claims/{app}/"

    def check_current(self) -> None:
        """See `ClaimStore.check_current`."""
        check_newest(self._app, self._fence)

    def take_over(self) -> Claims:
        """See `ClaimStore.take_over`. Older keys are removed."""
        claims = _claims_in(self._newest())
        self._put(claims)
        for fence in self._fences():
            if fence < self._fence:
                ray_store.remove(self._key(fence))
        return claims

    def write(self, claims: Claims) -> None:
        """See `ClaimStore.write`."""
        self._put(claims)
        self.check_current()

    def _newest(self) -> bytes:
        """The claims under the highest fence."""
        while fences := self._fences():
            # Another scheduler may remove a key meanwhile, once it has written its own.
            if (stored := ray_store.read(self._key(max(fences)))) is not None:
                return stored
        return b"{}"

    def _fences(self) -> list[int]:
        """The fences of all schedulers with a key."""
        names = (key.removeprefix(self._prefix) for key in ray_store.keys(self._prefix))
        return [int(name) for name in names if name.isdigit()]  # An application's name may begin with another one's.

    def _key(self, fence: int) -> str:
        return f"{self._prefix}{fence}"

    def _put(self, claims: Claims) -> None:
        ray_store.write(self._key(self._fence), _CLAIMS.dump_json(claims))


def _claims_in(stored: bytes) -> Claims:
    """The claims that can be read."""
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

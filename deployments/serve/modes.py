"""The mode that an operator has ordered, in Ray's internal key-value store, so that it outlives the scheduler."""

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from policies.decision.limits import Mode

_NAMESPACE = b"mell"


@dataclass(frozen=True, slots=True)
class ModeOrder:
    """A mode, ordered for the application as it was deployed at `deployed_at` (None: the time is not known)."""

    mode: Mode
    deployed_at: float | None


class ModeStore(Protocol):
    """Keeps the newest order."""

    def read(self) -> ModeOrder | None:
        """The newest order; None if there is none."""
        ...

    def write(self, order: ModeOrder) -> None:
        """Replace the order."""
        ...


class ServeModeStore:
    """Implements `ModeStore` for an application. Calls block for a round trip to Ray's control service."""

    def __init__(self, app: str) -> None:
        self._key = f"mode/{app}".encode()

    def read(self) -> ModeOrder | None:
        """See `ModeStore.read`."""
        found = _internal_kv_get(self._key, namespace=_NAMESPACE)
        if found is None:
            return None
        order = json.loads(found)
        return ModeOrder(Mode(order["mode"]), order["deployed_at"])

    def write(self, order: ModeOrder) -> None:
        """See `ModeStore.write`."""
        _internal_kv_put(self._key, json.dumps(asdict(order)).encode(), overwrite=True, namespace=_NAMESPACE)

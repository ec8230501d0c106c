"""The mode that an operator has ordered, in Ray's internal key-value store, so that it outlives the scheduler."""

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from migration import ray_store
from policies.decision.limits import Mode


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
        self._key = f"mode/{app}"

    def read(self) -> ModeOrder | None:
        """See `ModeStore.read`."""
        found = ray_store.read(self._key)
        if found is None:
            return None
        order = json.loads(found)
        return ModeOrder(Mode(order["mode"]), order["deployed_at"])

    def write(self, order: ModeOrder) -> None:
        """See `ModeStore.write`."""
        ray_store.write(self._key, json.dumps(asdict(order)).encode())

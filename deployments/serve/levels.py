"""The service levels that an operator has set for a pool, in Ray's internal key-value store.

They outlive the scheduler, and count until Serve ends, or a configuration with other levels is applied.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import TypeAdapter

from migration import ray_store
from policies.cost.service import ServiceLevel
from policies.model import PoolId

Levels = Mapping[str, ServiceLevel]
"""The levels by service class."""


class LevelStore(Protocol):
    """Keeps the newest order for a pool."""

    def read(self, configured: Levels) -> Levels:
        """The levels that count with these configured ones."""
        ...

    def write(self, configured: Levels, ordered: Levels) -> None:
        """Replace the order."""
        ...


@dataclass(frozen=True, slots=True)
class _Order:
    configured: Levels
    ordered: Levels


_ORDER = TypeAdapter(_Order)


class ServeLevelStore:
    """Implements `LevelStore` for a pool of an application, and a start of Serve (`generation`).

    Calls block for a round trip to Ray's control service.
    """

    def __init__(self, app: str, pool: PoolId, generation: str) -> None:
        self._key = f"levels/{app}/{pool}/{generation}"

    def read(self, configured: Levels) -> Levels:
        """See `LevelStore.read`."""
        found = ray_store.read(self._key)
        order = None if found is None else _ORDER.validate_json(found)
        return order.ordered if order is not None and order.configured == configured else configured

    def write(self, configured: Levels, ordered: Levels) -> None:
        """See `LevelStore.write`."""
        ray_store.write(self._key, _ORDER.dump_json(_Order(configured, ordered)))

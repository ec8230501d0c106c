"""The service levels that an operator has set for a pool, in Ray's internal key-value store.

They outlive the scheduler, and count until Serve ends, or a configuration with other levels is applied.
"""

from collections.abc import Mapping
from typing import Protocol

from pydantic import TypeAdapter

from deployments.serve.ordered import read_ordered, write_ordered
from policies.cost.service import ServiceLevel
from policies.model import PoolId

Levels = Mapping[str, ServiceLevel]
"""The levels by service class."""

_LEVELS: TypeAdapter[Levels] = TypeAdapter(Levels)


class LevelStore(Protocol):
    """Keeps the newest order for a pool."""

    def read(self, configured: Levels) -> Levels:
        """The levels that count with these configured ones."""
        ...

    def write(self, configured: Levels, ordered: Levels) -> None:
        """Replace the order."""
        ...


class ServeLevelStore:
    """Implements `LevelStore` for a pool of an application, and a start of Serve (`generation`).

    Calls block for a round trip to Ray's control service.
    """

    def __init__(self, app: str, pool: PoolId, generation: str) -> None:
        self._key = f"levels/{app}/{pool}/{generation}"

    def read(self, configured: Levels) -> Levels:
        """See `LevelStore.read`."""
        return read_ordered(self._key, configured, _LEVELS)

    def write(self, configured: Levels, ordered: Levels) -> None:
        """See `LevelStore.write`."""
        write_ordered(self._key, configured, ordered, _LEVELS)

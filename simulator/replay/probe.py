"""The Mell side of a replay: polls of the state, migrations, and orders to move.

A replay also runs against other servers: `begin` finds the missing paths, which are not called again.
"""

import random
from typing import Any

from app.client.api import MIGRATIONS, STATE, ApiClient
from app.client.documents import StateDocument, parse_state
from app.client.errors import ClientError
from simulator.replay.measurements import movable_in
from simulator.replay.stream import StreamFault

TIMEOUT_S = 5.0
"""Time-out of polls; a later answer would be out of date."""


class MellProbe:
    """Polls a Mell endpoint and orders moves."""

    def __init__(self, mell: ApiClient, seed: int) -> None:
        self.missing: dict[str, str] = {}
        """The paths that the endpoint does not offer, each with the reason."""
        self.missed: list[StreamFault] = []
        """Failed polls of offered paths."""
        self.asked = 0
        self.accepted = 0
        self.rejected: list[StreamFault] = []
        self._mell = mell
        self._chance = random.Random(f"moves-{seed}")
        self._earlier: frozenset[str] = frozenset()

    async def begin(self) -> None:
        """Find the missing paths, and the migrations older than the replay."""
        try:
            await self._fetch_state()
        except (ClientError, ValueError) as error:
            self.missing[STATE] = str(error)
        try:
            self._earlier = frozenset(str(item.get("id")) for item in await self._mell.migrations())
        except ClientError as error:
            self.missing[MIGRATIONS] = str(error)

    async def state(self) -> StateDocument | None:
        """The current state of the cluster, None without one."""
        if STATE in self.missing:
            return None
        try:
            return await self._fetch_state()
        except (ClientError, ValueError) as error:
            self.missed.append(StreamFault(STATE, str(error)))
            return None

    async def order_move(self) -> None:
        """Order a move of a random movable request, and count the answer."""
        state = await self.state()
        movable = movable_in(state) if state else ()
        if not movable:
            return
        self.asked += 1
        try:
            await self._mell.move(self._chance.choice(movable))
        except ClientError as error:
            self.rejected.append(StreamFault(error.kind, error.message))
        else:
            self.accepted += 1

    async def migrations(self) -> tuple[dict[str, Any], ...]:
        """The migrations since `begin`, newest first."""
        if MIGRATIONS in self.missing:
            return ()
        try:
            found = await self._mell.migrations()
        except ClientError as error:
            self.missed.append(StreamFault(MIGRATIONS, str(error)))
            return ()
        return tuple(item for item in found if str(item.get("id")) not in self._earlier)

    async def _fetch_state(self) -> StateDocument:
        try:
            return parse_state(await self._mell.state())
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a state: {error!r}") from None

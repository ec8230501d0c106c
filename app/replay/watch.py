"""The Mell side of a replay: the state of the replicas, migrations asked for and migrations done.

An endpoint that is not Mell is replayed too: `begin` finds out what it lacks, which is not asked for again.
"""

import random
from typing import Any

from app.client.api import MIGRATIONS, STATE, ApiClient
from app.client.documents import StateDocument, parse_state
from app.client.errors import ClientError
from app.replay.state import movable_in
from app.replay.stream import Fault

TIMEOUT_S = 5.0
"""For a client that a watch is to use: a look that takes longer is worth nothing."""


class Watch:
    """Looks at a Mell endpoint, and asks it for moves."""

    def __init__(self, mell: ApiClient, seed: int) -> None:
        self.missing: dict[str, str] = {}
        """Which of the two paths the endpoint does not offer, and why this is believed."""
        self.missed: list[Fault] = []
        """What could not be had though it was offered."""
        self.asked = 0
        self.accepted = 0
        self.rejected: list[Fault] = []
        self._mell = mell
        self._chance = random.Random(f"moves-{seed}")
        self._before: frozenset[str] = frozenset()

    async def begin(self) -> None:
        """Find out what there is to see, and which migrations are older than the replay."""
        try:
            await self._state()
        except (ClientError, ValueError) as error:
            self.missing[STATE] = str(error)
        try:
            self._before = frozenset(str(item.get("id")) for item in await self._mell.migrations())
        except ClientError as error:
            self.missing[MIGRATIONS] = str(error)

    async def look(self) -> StateDocument | None:
        """The state of the cluster now, None if it cannot be had."""
        if STATE in self.missing:
            return None
        try:
            return await self._state()
        except (ClientError, ValueError) as error:
            self.missed.append(Fault(STATE, str(error)))
            return None

    async def ask_for_move(self) -> None:
        """Ask for a move of some request that may be moved, and count the answer."""
        state = await self.look()
        movable = movable_in(state) if state else ()
        if not movable:
            return
        self.asked += 1
        try:
            await self._mell.move(self._chance.choice(movable))
        except ClientError as error:
            self.rejected.append(Fault(error.kind, error.message))
        else:
            self.accepted += 1

    async def migrations(self) -> tuple[dict[str, Any], ...]:
        """The migrations since `begin`, newest first."""
        if MIGRATIONS in self.missing:
            return ()
        try:
            found = await self._mell.migrations()
        except ClientError as error:
            self.missed.append(Fault(MIGRATIONS, str(error)))
            return ()
        return tuple(item for item in found if str(item.get("id")) not in self._before)

    async def _state(self) -> StateDocument:
        try:
            return parse_state(await self._mell.state())
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a state: {error!r}") from None

"""The Mell side of a replay: the state of the replicas, migrations asked for and migrations done.

An endpoint that is not Mell is replayed too: `begin` finds out what it lacks, which is not asked for again.
"""

import random
from typing import Any

import httpx

from app.replay.state import MIGRATIONS, STATE, Cluster, parse_cluster
from app.replay.stream import Fault, message_of

TIMEOUT_S = 5.0


class Watch:
    """Looks at a Mell endpoint, and asks it for moves."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self.missing: dict[str, str] = {}
        """Which of the two paths the endpoint does not offer, and why this is believed."""
        self.missed: list[Fault] = []
        """What could not be had though it was offered."""
        self.asked = 0
        self.accepted = 0
        self.rejected: list[Fault] = []
        self._http = http
        self._chance = random.Random(f"moves-{seed}")
        self._before: frozenset[str] = frozenset()

    async def begin(self) -> None:
        """Find out what there is to see, and which migrations are older than the replay."""
        try:
            parse_cluster(await self._get(STATE))
        except (httpx.HTTPError, ValueError) as error:
            self.missing[STATE] = _reason(error)
        try:
            self._before = frozenset(str(item.get("id")) for item in await self._list_migrations())
        except (httpx.HTTPError, ValueError) as error:
            self.missing[MIGRATIONS] = _reason(error)

    async def look(self) -> Cluster | None:
        """The state of the cluster now, None if it cannot be had."""
        if STATE in self.missing:
            return None
        try:
            return parse_cluster(await self._get(STATE))
        except (httpx.HTTPError, ValueError) as error:
            self.missed.append(Fault(STATE, _reason(error)))
            return None

    async def ask_for_move(self) -> None:
        """Ask for a move of some request that may be moved, and count the answer."""
        cluster = await self.look()
        if cluster is None or not cluster.movable:
            return
        body = {"request_id": self._chance.choice(cluster.movable), "path": "auto"}
        self.asked += 1
        try:
            response = await self._http.post(MIGRATIONS, json=body, timeout=TIMEOUT_S)
        except httpx.HTTPError as error:
            self.rejected.append(Fault(type(error).__name__, str(error)))
            return
        if response.is_success:
            self.accepted += 1
        else:
            self.rejected.append(Fault(f"HTTP {response.status_code}", message_of(response.content)))

    async def migrations(self) -> tuple[dict[str, Any], ...]:
        """The migrations since `begin`, newest first."""
        if MIGRATIONS in self.missing:
            return ()
        try:
            found = await self._list_migrations()
        except (httpx.HTTPError, ValueError) as error:
            self.missed.append(Fault(MIGRATIONS, _reason(error)))
            return ()
        return tuple(item for item in found if str(item.get("id")) not in self._before)

    async def _list_migrations(self) -> list[dict[str, Any]]:
        payload = await self._get(MIGRATIONS)
        items = payload.get("migrations") if isinstance(payload, dict) else None
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ValueError("no list of migrations in the answer")
        return items

    async def _get(self, path: str) -> Any:
        response = await self._http.get(path, timeout=TIMEOUT_S)
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"GET {path} answered {response.status_code}")
        return response.json()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__

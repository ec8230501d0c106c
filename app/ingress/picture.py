"""What a page at `/mell/` shows, and what has changed in it since the last look: `/mell/state` in fewer bytes.

A page gets a snapshot, then a delta per look. Both sides keep requests and replicas in the order in which they first
came, so that what changes all the time, a request's tokens and a replica's use, is a bare list of numbers:

    requests    [number, id, label, replica, phase, why it must stay or null, hop, born, tokens]; new or changed ones
    gone        numbers of requests that are not there any more
    grown       by how many tokens each request has grown, those that are new or changed in this delta by 0
    replicas    [id, state, node, capacity in tokens, preemptions]; new or changed ones, then `left`, those that are not
                there any more, and `used`, the tokens in blocks that are not free, of every replica
    migrations  new or changed ones, newest first
    points      what the charts gained, see `app.ingress.points`

A request that is being handed over is on two replicas, and has a number on each.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from app.ingress.points import Point

MIGRATIONS = 100
POINTS = 400
"""Five minutes."""
_HEAD = ("as_of", "mode", "policy", "wanted_replicas")
_TOLD = (
    *("id", "request_id", "label", "source", "target", "path", "reason", "state", "outcome", "error"),
    *("tokens", "bytes", "started_at", "duration_s", "pause_s", "resume_s", "predicted_kv_s", "predicted_tokens_s"),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at the cluster: `/mell/state`, the records of `/mell/migrations`, and what the charts gain."""

    state: Mapping[str, Any]
    migrations: Sequence[Mapping[str, Any]]
    point: Point
    now: float


class Picture:
    """All that pages show. `update` takes a look and tells the delta; nothing is kept that a look did not tell."""

    def __init__(self) -> None:
        self._numbers = count()
        self._head: dict[str, Any] = {}
        self._replicas: dict[str, list[Any]] = {}
        self._used: dict[str, int] = {}
        self._requests: dict[tuple[str, str], list[Any]] = {}
        self._migrations: dict[str, dict[str, Any]] = {}
        self._points: deque[Point] = deque(maxlen=POINTS)

    def snapshot(self) -> dict[str, Any]:
        """Everything, for a page that knows nothing."""
        return self._head | {
            "requests": list(self._requests.values()),
            "replicas": list(self._replicas.values()),
            "used": list(self._used.values()),
            "migrations": list(self._migrations.values()),
            "points": list(self._points),
        }

    def update(self, seen: Seen) -> dict[str, Any]:
        """What has changed since the last look."""
        replicas = seen.state["replicas"]
        dry_run = seen.state.get("dry_run", {}).get("said")
        self._head = {name: seen.state.get(name) for name in _HEAD} | {"now": seen.now, "dry_run": dry_run}
        self._points.append(seen.point)
        return self._head | {
            **self._update_replicas(replicas),
            **self._update_requests(replicas, seen.state.get("as_of", seen.now)),
            "migrations": self._update_migrations(seen.migrations[:MIGRATIONS]),
            "points": [seen.point],
        }

    def _update_replicas(self, replicas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        rows = {r["id"]: [r["id"], r["state"], r["node"], r["capacity_tokens"], r["preemptions"]] for r in replicas}
        left = [id for id in self._replicas if id not in rows]
        for id in left:
            del self._replicas[id], self._used[id]
        changed = [row for id, row in rows.items() if self._replicas.get(id) != row]
        self._replicas.update(rows)
        self._used.update({r["id"]: r["used_tokens"] for r in replicas})
        return {"replicas": changed, "left": left, "used": list(self._used.values())}

    def _update_requests(self, replicas: Iterable[Mapping[str, Any]], as_of: float) -> dict[str, Any]:
        now = {(replica["id"], r["id"]): r for replica in replicas for r in replica["requests"]}
        gone = [self._requests.pop(key)[0] for key in [key for key in self._requests if key not in now]]
        changed, growth = [], dict.fromkeys(self._requests, 0)
        for key, request in now.items():
            known = self._requests.get(key)
            row = _row(key[0], request, as_of, known, self._numbers)
            if known is None or known[1:7] != row[1:7]:
                changed.append(row)
                growth[key] = 0
            else:
                growth[key] = row[8] - known[8]
            self._requests[key] = row
        return {"gone": gone, "requests": changed, "grown": list(growth.values())}

    def _update_migrations(self, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        told = {record["id"]: {name: _short(record.get(name)) for name in _TOLD} for record in records}
        changed = [record for id, record in told.items() if self._migrations.get(id) != record]
        self._migrations = told
        return changed


def _row(
    replica: str, request: Mapping[str, Any], as_of: float, known: list[Any] | None, numbers: "count[int]"
) -> list[Any]:
    number = next(numbers) if known is None else known[0]
    born = round(as_of - request["age_s"], 1) if known is None else known[7]
    why = None if request["movable"] else (request["immovable_reason"] or "it must stay")
    about = [request["id"], request["label"], replica, request["phase"], why, request["hop"]]
    return [number, *about, born, request["tokens"]]


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value

"""The state of a live page, as snapshots and deltas: `/mell/state` in fewer bytes.

A page gets a snapshot, then one delta per poll. Both sides keep requests and replicas in the order of their first
appearance, so that the values that change all the time, a request's tokens and a replica's use, are bare lists of
numbers:

    requests    [number, id, label, replica, phase, null or why it is immovable, hop, born, tokens], new or changed
    gone        numbers of requests that have disappeared
    grown       the growth of each request in tokens; 0 for requests that are new or changed in this delta
    replicas    [id, state, node, capacity in tokens, preemptions, role, role by hand], new and changed
    left        ids of replicas that have disappeared
    used        the tokens in blocks that are not free, of every replica
    caches      [active, historical and blank blocks, prompt tokens, cached ones, blocks in host memory] of every
                replica, null if unknown
    migrations  new and changed ones, newest first
    points      new points of the charts, see `app.ingress.page.charts`
    savings     the sentence of `app.ingress.page.savings`; null unless Mell acts
    names       a name in calls for each of several models, by its id
    devices     [id, budget, ordered, held, seats] of each node with a budget, in MiB, with seats [replica, model, by,
                held, ordered, why]; in a delta only if they have changed

A request in hand-over is on two replicas and has a number on each.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from app.ingress.page.charts import WORST_FIT, Point
from app.ingress.page.savings import savings

MIGRATIONS = 100
POINTS = 400
"""Five minutes."""
_HEAD = ("as_of", "mode", "policy", "wanted_replicas", "service", "scaling", "disaggregation")
_OF_REPLICA = ("id", "state", "node", "capacity_tokens", "preemptions", "role", "role_by_hand", "model")
_OF_SEAT = ("replica", "model", "by", "held_mib", "ordered_mib", "why")
_MEMBERS = (
    *("id", "request_id", "label", "source", "target", "path", "reason", "state", "outcome", "error"),
    *("tokens", "bytes", "started_at", "duration_s", "pause_s", "resume_s", "predicted_kv_s", "predicted_tokens_s"),
)


@dataclass(frozen=True, slots=True)
class PageSample:
    """One poll: `/mell/state`, the records of `/mell/migrations`, and the new point of the charts."""

    state: Mapping[str, Any]
    migrations: Sequence[Mapping[str, Any]]
    point: Point
    now: float


class PageState:
    """The data of all pages. `update` replaces it by a sample and returns the delta."""

    def __init__(self) -> None:
        self._numbers = count()
        self._head: dict[str, Any] = {}
        self._replicas: dict[str, list[Any]] = {}
        self._used: dict[str, int] = {}
        self._caches: dict[str, list[int] | None] = {}
        self._requests: dict[tuple[str, str], list[Any]] = {}
        self._migrations: dict[str, dict[str, Any]] = {}
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._devices: list[list[Any]] = []

    def snapshot(self) -> dict[str, Any]:
        """The whole state, for a page without one."""
        return self._head | {
            "requests": list(self._requests.values()),
            "replicas": list(self._replicas.values()),
            "used": list(self._used.values()),
            "caches": list(self._caches.values()),
            "migrations": list(self._migrations.values()),
            "points": list(self._points),
            "devices": self._devices,
        }

    def update(self, sample: PageSample) -> dict[str, Any]:
        """Apply a sample; the changes since the last one."""
        replicas = sample.state["replicas"]
        dry_run = sample.state.get("dry_run", {}).get("said")
        saved = savings(sample.state, sample.migrations, int(sample.point[WORST_FIT] or 0), sample.now)
        head = {name: sample.state.get(name) for name in _HEAD}
        names = {each["model"]: each["names"][0] for each in sample.state.get("models", ()) if each.get("names")}
        self._head = head | {"now": sample.now, "dry_run": dry_run, "savings": saved, "names": names}
        self._points.append(sample.point)
        return self._head | {
            **self._update_replicas(replicas),
            **self._update_requests(replicas, sample.state.get("as_of", sample.now)),
            "migrations": self._update_migrations(sample.migrations[:MIGRATIONS]),
            "points": [sample.point],
            **self._update_devices(sample.state.get("devices", ())),
        }

    def _update_devices(self, devices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        before, self._devices = self._devices, [_device(device) for device in devices]
        return {} if self._devices == before else {"devices": self._devices}

    def _update_replicas(self, replicas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        rows = {r["id"]: [*map(r.get, _OF_REPLICA), (r.get("memory") or {}).get("asleep_at")] for r in replicas}
        left = [id for id in self._replicas if id not in rows]
        for id in left:
            del self._replicas[id], self._used[id], self._caches[id]
        changed = [row for id, row in rows.items() if self._replicas.get(id) != row]
        self._replicas.update(rows)
        self._used.update({r["id"]: r["used_tokens"] for r in replicas})
        self._caches.update({r["id"]: _cache(r["cache"]) for r in replicas})
        used, caches = list(self._used.values()), list(self._caches.values())
        return {"replicas": changed, "left": left, "used": used, "caches": caches}

    def _update_requests(self, replicas: Iterable[Mapping[str, Any]], as_of: float) -> dict[str, Any]:
        now = {(replica["id"], r["id"]): r for replica in replicas for r in replica["requests"]}
        gone = [self._requests.pop(key)[0] for key in [key for key in self._requests if key not in now]]
        changed, growth = [], dict.fromkeys(self._requests, 0)
        for key, request in now.items():
            previous = self._requests.get(key)
            row = _row(key[0], request, as_of, previous, self._numbers)
            if previous is None or previous[1:7] != row[1:7]:
                changed.append(row)
                growth[key] = 0
            else:
                growth[key] = row[8] - previous[8]
            self._requests[key] = row
        return {"gone": gone, "requests": changed, "grown": list(growth.values())}

    def _update_migrations(self, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        rows = {record["id"]: {name: _short(record.get(name)) for name in _MEMBERS} for record in records}
        changed = [record for id, record in rows.items() if self._migrations.get(id) != record]
        self._migrations = rows
        return changed


def _row(
    replica: str, request: Mapping[str, Any], as_of: float, previous: list[Any] | None, numbers: "count[int]"
) -> list[Any]:
    number = next(numbers) if previous is None else previous[0]
    born = round(as_of - request["age_s"], 1) if previous is None else previous[7]
    reason = None if request["movable"] else (request["immovable_reason"] or "it cannot move")
    about = [request["id"], request["label"], replica, request["phase"], reason, request["hop"]]
    return [number, *about, born, request["tokens"]]


def _cache(cache: Mapping[str, Any] | None) -> list[int] | None:
    if cache is None or cache["hbm"] is None:
        return None
    blocks, host, prompts = cache["hbm"], cache["dram"], cache["prompt_tokens"]
    used = [blocks["active"], blocks["historical"], blocks["blank"]]
    return [*used, prompts["all"], prompts["hbm"] + prompts["dram"], host["historical"] if host else 0]


def _device(device: Mapping[str, Any]) -> list[Any]:
    seats = [[seat.get(name) for name in _OF_SEAT] for seat in device["seats"]]
    return [*(device[name] for name in ("id", "budget_mib", "ordered_mib", "held_mib")), seats]


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value

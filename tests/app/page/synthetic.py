"""A synthetic cluster behind the real routes: requests arrive, grow, move and end.

`SyntheticCluster` is stepped, not timed, so that tests control it; `SyntheticBackend` serves it to the routes, and
`SyntheticModel` answers calls, each with a request in the cluster.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected
from deployments.api.report import Gauges, replica_json
from deployments.cache.occupancy import CacheReport, Occupancy
from migration.protocol.core_messages import Prefilled
from migration.protocol.messages import PathRequest
from migration.protocol.record import MigrationRecord, Outcome
from policies.model import (
    Blocks,
    Bytes,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Role,
    Tokens,
)
from policies.plan import Path, Reason
from policies.precedence import DEFAULT_CLASS
from policies.prefix.change import Tier
from tests.app.ingress.fakes import Backend, make_service

CAPACITY = 16_384
BLOCK = 16
_SIZES = (500, 1100, 2400, 4000, 6300, 9200)
_WEIGHTS = (26, 24, 22, 14, 9, 5)
_STAYS = "its parameters cannot be continued elsewhere: n > 1 with one seed"


@dataclass
class SyntheticRequest:
    """One running request."""

    id: RequestId
    label: str
    tokens: int
    born: float
    last: int
    hop: int = 0
    phase: Phase = Phase.DECODE
    immovable: str | None = None


@dataclass
class SyntheticCluster:
    """Replicas by name. `now` is in seconds since 1970. `models` have the names in calls by id; replicas take turns.

    With `budget_mib`, all replicas are on one node, and each holds an equal part of what is not `free_mib`.
    """

    replicas: int
    requests: int
    seed: int = 1
    now: float = field(default_factory=time.time)
    dry_run: dict[str, Any] | None = None
    capacity: int = CAPACITY
    models: dict[str, list[str]] = field(default_factory=dict)
    budget_mib: int | None = None
    free_mib: int = 500

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.states: dict[str, ReplicaState] = {}
        self.held: dict[str, list[SyntheticRequest]] = {}
        self.records: list[MigrationRecord] = []
        self._count = 0
        self._opened = 0
        for _ in range(self.replicas):
            self.open(ReplicaState.RUNNING)
        used = {name: 0 for name in self.running()}
        for _ in range(self.requests):
            self._arrive(used, aged=True)

    def open(self, state: ReplicaState = ReplicaState.STARTING) -> str:
        """Open a replica."""
        self._opened += 1
        name = f"engine-{self._opened:03d}"
        self.states[name], self.held[name] = state, []
        return name

    def used(self, name: str) -> int:
        """The tokens on a replica."""
        return sum(live.tokens for live in self.held[name] if live.phase is not Phase.WAITING)

    def running(self) -> list[str]:
        """The running replicas."""
        return [name for name, state in self.states.items() if state is ReplicaState.RUNNING]

    def arrive(self) -> SyntheticRequest:
        """Add a request by best fit; without room it waits on the emptiest replica."""
        return self._arrive({name: self.used(name) for name in self.running()})

    def _arrive(self, used: dict[str, int], aged: bool = False) -> SyntheticRequest:
        """Add a request, new or `aged`, and its tokens to those `used` on its replica."""
        rng, self._count = self.rng, self._count + 1
        share = self.replicas * self.capacity * 0.72 / max(1, self.requests) / 2400
        tokens = max(20, int(rng.choices(_SIZES, _WEIGHTS)[0] * rng.uniform(0.6, 1.3) * min(1.0, share)))
        live = SyntheticRequest(
            RequestId(f"cmpl-{rng.getrandbits(64):016x}"),
            f"{rng.choice(('chat', 'batch', 'agent', 'search'))}-{self._count}",
            tokens if aged else max(16, tokens // 6),
            self.now - (rng.uniform(1, 90) if aged else 0.0),
            int(tokens * rng.uniform(1.1, 2.2)) + 200,
            immovable=_STAYS if rng.random() < 0.03 else None,
        )
        names = sorted(used, key=lambda name: used[name])
        fitting = [name for name in names if used[name] + live.tokens < self.capacity * 0.93]
        if fitting:
            used[fitting[-1]] += live.tokens
        else:
            live.phase = Phase.WAITING
        self.held[fitting[-1] if fitting else names[0]].append(live)
        return live

    def step(self, seconds: float = 1.0, rate: float = 25.0) -> None:
        """Advance the time: requests grow, end and arrive, and a full replica loses one by a move."""
        self.now += seconds
        ended = 0
        for lives in self.held.values():
            for live in list(lives):
                if live.phase is Phase.DECODE:
                    live.tokens += int(rate * seconds * self.rng.uniform(0.8, 1.2))
                if live.tokens >= live.last:
                    lives.remove(live)
                    ended += 1
        for _ in range(ended):
            self.arrive()
        for name in list(self.held):
            self._settle(name)

    def _settle(self, name: str) -> None:
        leaving = self.states[name] is ReplicaState.DRAINING
        if leaving and not self.held[name]:
            del self.states[name], self.held[name]
            return
        movable = [live for live in self.held[name] if live.immovable is None and live.phase is not Phase.WAITING]
        if movable and (leaving or self.used(name) > self.capacity * 0.97):
            live = min(movable, key=lambda live: live.tokens)
            room = [n for n in self.running() if n != name and self.used(n) + live.tokens < self.capacity * 0.93]
            if room:
                self.move(live, name, max(room, key=self.used), Reason.DRAIN if leaving else Reason.OVERLOAD)
        for live in self.held.get(name, []):
            if live.phase is Phase.WAITING and self.used(name) + live.tokens < self.capacity * 0.95:
                live.phase = Phase.DECODE

    def move(
        self, live: SyntheticRequest, source: str, target: str, reason: Reason, path: Path | None = None
    ) -> MigrationRecord:
        """Move a request at once; some moves fail, according to their records."""
        ended = reason is Reason.OVERLOAD and self.rng.random() < 0.06
        if not ended:
            self.held[source].remove(live)
            live.hop += 1
            self.held[target].append(live)
        path = path or (Path.TOKENS if live.tokens < 700 else Path.KV)
        took = 0.02 + live.tokens / (90_000 if path is Path.KV else 16_000)
        pause = self.rng.uniform(0.006, 0.02)
        record = MigrationRecord(
            f"m{len(self.records) + 1:05d}",
            live.id,
            live.label,
            ReplicaId(source),
            ReplicaId(target),
            path,
            reason,
            "DONE",
            reason,
            Outcome.COMMITTED,
            bytes=Bytes(live.tokens * 131_072 if path is Path.KV else 0),
            blocks=Blocks(live.tokens // BLOCK),
            rounds=2,
            pause_s=pause,
            duration_s=took,
            started_at=self.now,
            tokens=Tokens(live.tokens),
            copy_s=took / 2,
            resume_s=pause + 0.012,
            predicted_kv_s=0.02 + live.tokens / 90_000 * self.rng.uniform(0.8, 1.25),
            predicted_tokens_s=0.02 + live.tokens / 16_000 * self.rng.uniform(0.8, 1.25),
        )
        if ended:
            record = replace(record, outcome=Outcome.ABORTED, error="the target refused: no room", resume_s=None)
        self.records.append(record)
        return record

    def find(self, reference: str) -> tuple[str, SyntheticRequest] | None:
        """The replica and the request with that id or label."""
        found = ((name, live) for name, lives in self.held.items() for live in lives)
        return next(((name, live) for name, live in found if reference in (live.id, live.label)), None)

    def state(self) -> dict[str, Any]:
        """The document at `/mell/state`."""
        return {
            "as_of": self.now,
            "mode": "act",
            "policy": "pack",
            "fence": 1,
            "wanted_replicas": len(self.running()),
            "replicas": [self._replica(name) | self._model(name) for name in sorted(self.states)],
            "models": [{"model": model, "names": names} for model, names in self.models.items()],
            "devices": [] if self.budget_mib is None else [self._device(self.budget_mib)],
        } | ({"dry_run": self.dry_run} if self.dry_run else {})

    def _model(self, name: str) -> dict[str, str]:
        models = list(self.models)
        return {"model": models[int(name[-3:]) % len(models)]} if models else {}

    def _device(self, budget: int) -> dict[str, Any]:
        held = (budget - self.free_mib) // len(self.states)
        whys = {ReplicaState.ASLEEP: ("asleep", "it sleeps"), ReplicaState.STARTING: ("starts", "it starts")}
        demand = "demand", "its requests want more than there is for it"
        seats = [
            {"replica": name, "held_mib": held, "ordered_mib": held, "by": by, "why": why} | self._model(name)
            for name, state in sorted(self.states.items())
            for by, why in [whys.get(state, demand)]
        ]
        sums = {"held_mib": held * len(seats), "ordered_mib": held * len(seats)}
        return {"id": "10.0.0.4", "budget_mib": budget, **sums, "seats": seats}

    def _replica(self, name: str) -> dict[str, Any]:
        free = max(0, self.capacity - self.used(name))
        requests = tuple(
            RequestLoad(r.id, r.label, Tokens(r.tokens), r.phase, self.now - r.born, r.hop, r.immovable)
            for r in self.held[name]
        )
        load = ReplicaLoad(
            ReplicaId(name),
            self.states[name],
            "10.0.0.4",
            Tokens(self.capacity),
            BLOCK,
            Blocks(free // BLOCK),
            256,
            requests,
        )
        active = Blocks((self.capacity - free) // BLOCK)
        used = Occupancy(active, Blocks(free // BLOCK // 3), Blocks(free // BLOCK // 2))
        host = Occupancy(Blocks(0), Blocks(40), Blocks(60))
        tiers = {Tier.HBM: used, Tier.DRAM: host}
        cache = CacheReport(None, tiers, 7, True, {}, Prefilled(int(100 * self.now), int(30 * self.now)))
        # The replicas that run change, and so does the first of them.
        role = Role.PREFILL if name == min(self.running(), default=None) else Role.DECODE
        by_hand = role if role is Role.PREFILL else None
        return replica_json(load, Gauges((1, 2, 3), cache=cache), role, by_hand)


class SyntheticBackend(Backend):
    """Implements the routes' backend over a cluster, and counts the calls for its snapshot."""

    def __init__(self, cluster: SyntheticCluster, admin_key: str | None = None, live: bool = False) -> None:
        super().__init__(make_service(), admin_key=admin_key)
        self.cluster = cluster
        self.live = live
        self.looks = 0

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.looks += 1
        # The scheduler is there, also if nothing happens in its cluster.
        state = await self.state() | {"as_of": time.time()}
        return state, await self.migrations()

    async def state(self) -> dict[str, Any]:
        if self.live:
            behind = max(0.0, time.time() - self.cluster.now)
            self.cluster.now += max(0.0, behind - 2.0)
            self.cluster.step(min(2.0, behind))
            self._breathe()
        return self.cluster.state()

    def _breathe(self) -> None:
        """Observe random latencies."""
        rng = self.cluster.rng
        for _ in range(40):
            self.telemetry.itl.labels(DEFAULT_CLASS, "tiny").observe(rng.lognormvariate(-3.4, 0.35))
        for _ in range(4):
            self.telemetry.ttft.labels(DEFAULT_CLASS, "tiny").observe(rng.lognormvariate(-1.6, 0.5))

    async def migrations(self) -> dict[str, Any]:
        return {"migrations": [record.to_json() for record in reversed(self.cluster.records[-1000:])]}

    async def migrate(self, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        found = self.cluster.find(reference)
        if found is None:
            return MoveRejected(404, f"no running request has the id or label {reference!r}")
        source, live = found
        if live.immovable:
            return MoveRejected(422, live.immovable)
        to = target or next(name for name in self.cluster.running() if name != source)
        asked = None if path is PathRequest.AUTO else Path(path.value)
        return MoveAccepted(self.cluster.move(live, source, to, Reason.MANUAL, asked).id)

    async def drain(self, replica: str) -> MoveAnswer:
        if replica not in self.cluster.states:
            return MoveRejected(404, f"no replica {replica!r} is running")
        self.cluster.states[replica] = ReplicaState.DRAINING
        return MoveAccepted(replica)


class SyntheticModel:
    """Answers chats and completions with a word per 20 ms, while a request on the first replica grows.

    `refusal` are the message and status of the next calls to chats; `key` is the API key. Answers end with `finish`.
    """

    def __init__(self, cluster: SyntheticCluster) -> None:
        self.cluster = cluster
        self.key: str | None = None
        self.refusal: tuple[str, int] | None = None
        self.finish = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/completions", self.answer, methods=["POST"]),
            ]
        )

    async def answer(self, http: Request) -> Response:
        """POST of a chat or a completion."""
        chats = http.url.path.endswith("/chat/completions")
        if self.key is not None and http.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "this call requires a key"}}, 401)
        if chats and self.refusal is not None:
            return JSONResponse({"error": {"message": self.refusal[0]}}, self.refusal[1])
        self.bodies.append(await http.json())
        return StreamingResponse(self._events(http.headers["x-request-id"], chats), media_type="text/event-stream")

    async def _events(self, label: str, chats: bool) -> AsyncIterator[str]:
        cluster = self.cluster
        live = SyntheticRequest(RequestId(f"id-{label}"), label, 24, cluster.now, 1 << 30)
        cluster.held[cluster.running()[0]].append(live)
        try:
            for word in itertools.count():
                said = f"word{word} "
                choice = {"delta": {"content": said}} if chats else {"text": said}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
                live.tokens += 1
                if self.finish.is_set():
                    break
                await asyncio.sleep(0.02)
            yield "data: [DONE]\n\n"
        finally:
            for held in cluster.held.values():
                if live in held:
                    held.remove(live)

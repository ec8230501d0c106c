"""Carries out one run: starts a system, sends the sessions of every workload to it, and stops it."""

import asyncio
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

from benchmarks.load import stream
from benchmarks.routing.case import (
    POLICY,
    REPLICAS,
    ROUTERS,
    RoutedRequest,
    RoutingCase,
    System,
    with_answers,
)
from benchmarks.servers import MODEL, mell

PORT = 8100
SETTLE_S = 1.0
"""The time after the last answer until all counters are up to date."""


@dataclass(frozen=True, slots=True)
class RoutedAnswer:
    """A measured request: seconds from its sending to its first and last token, its prompt in tokens, and how many of
    them the engine had.
    """

    first_s: float
    whole_s: float
    prompt: int
    cached: int


@dataclass(frozen=True, slots=True)
class RoutingRun:
    """One workload on one system. `predicted` and `delivered` are prompt tokens by Mell's own counters, None of others.

    `began_s` is the Unix time of the run's begin.
    """

    system: System
    workload: str
    seed: int
    began_s: float
    answers: tuple[RoutedAnswer, ...]
    predicted: float | None = None
    delivered: float | None = None


T = TypeVar("T")


def perform(system: System, cases: Sequence[RoutingCase]) -> list[RoutingRun]:
    """Start a system, and carry out its runs, all on the same engines.

    Raises RuntimeError if it does not start or an answer is incomplete.
    """
    pace = cases[0].pace.model_dump()
    routing = system.routing
    if routing is None:
        return asyncio.run(_on_serve(system, cases, pace))
    settings: dict[str, Any] = {
        "engine": "paced",
        "engine_kwargs": pace,
        "scheduler": {"policy": POLICY, "mode": "act", "epoch_s": 1.0, "routing": str(routing)},
        "deployment_config": {"num_cpus": 0.05},
        "ingress": {"frontend_kwargs": {"enable_prompt_tokens_details": True}},
    }
    with mell(PORT, REPLICAS, **settings):
        return asyncio.run(_on_mell(system, cases))


async def send(requests: Sequence[RoutedRequest], ask: Callable[[RoutedRequest], Awaitable[T]]) -> list[T]:
    """Send the sessions at their times, and each request after the answer before it."""
    began = time.perf_counter()

    async def session(turns: Sequence[RoutedRequest]) -> list[T]:
        await asyncio.sleep(max(0.0, turns[0].at_s - (time.perf_counter() - began)))
        answers = []
        for turn in turns:
            await asyncio.sleep(turn.think_s)
            answers.append(await ask(turn))
        return answers

    each = [list(turns) for _, turns in groupby(requests, key=attrgetter("session"))]
    return [answer for answers in await asyncio.gather(*map(session, each)) for answer in answers]


# --- Mell ---------------------------------------------------------------------------------------------


async def _on_mell(system: System, cases: Sequence[RoutingCase]) -> list[RoutingRun]:
    runs = []
    for case in cases:
        requests = with_answers(case.requests, case.workload, case.seed)
        before, began_s = await asyncio.to_thread(_counted), time.time()
        answers = await send(requests, ask_mell)
        await asyncio.sleep(SETTLE_S)
        after = await asyncio.to_thread(_counted)
        grown = {stage: after.get(stage, 0.0) - before.get(stage, 0.0) for stage in ("predicted", "delivered")}
        runs.append(RoutingRun(system, case.workload, case.seed, began_s, tuple(answers), **grown))
    return runs


async def ask_mell(request: RoutedRequest) -> RoutedAnswer:
    """Send a request to Mell at `PORT`."""
    more = {"stream_options": {"include_usage": True}}
    taken = await stream(
        PORT, MODEL, list(request.prompt), request.output, more=more, headers={"X-Session-Id": request.session}
    )
    return RoutedAnswer(taken.ttft, taken.arrivals[-1] - taken.sent, len(request.prompt), taken.cached_tokens)


def _counted() -> dict[str, float]:
    """Mell's counters of prompt tokens, by stage."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for labels, value in re.findall(r"^mell_cache_tokens_total\{(.*)\} (\S+)$", text, re.MULTILINE):
        (stage,) = re.findall(r'stage="(\w+)"', labels)
        found[stage] = found.get(stage, 0.0) + float(value)
    return found


# --- Ray Serve ----------------------------------------------------------------------------------------


async def _on_serve(system: System, cases: Sequence[RoutingCase], pace: Mapping[str, Any]) -> list[RoutingRun]:
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    class PlainEngine:
        """One engine behind Serve's own handles: a typical deployment without Mell."""

        async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
            from deployments.engine.paced import PacedEngine

            self._engine = await PacedEngine.start("plain", pace)
            self._count = 0

        async def generate(self, request: Any) -> Any:
            """The cached tokens with the first token, and an item at the end.

            An item for every token would cost Serve more than the router under test.
            """
            from migration.protocol.continuing import plain_spec
            from migration.run.outputs import running

            self._count += 1
            key = f"r{self._count}"
            spec = plain_spec(key, tuple(map(ord, request.prompt)), request.tokens, ignore_eos=True)
            async with running(self._engine, key, spec) as steps:
                async for step in steps:
                    if step.prefilled is not None:
                        yield step.prefilled.cached
            yield None

    class PlainRequest:
        """A prompt as Ray's router reads it, one character per token."""

        def __init__(self, prompt: str, tokens: int) -> None:
            self.prompt = prompt
            self.tokens = tokens

    ray.init(logging_level="ERROR", namespace="serve", num_cpus=4)
    try:
        bound = serve.deployment(
            PlainEngine,
            num_replicas=REPLICAS,
            max_ongoing_requests=1000,
            ray_actor_options={"num_cpus": 0.05},
            request_router_config=RequestRouterConfig(**ROUTERS[system]),
        ).bind()
        handle = await asyncio.to_thread(lambda: serve.run(bound, name="plain"))
        streaming = handle.options(stream=True)

        async def ask(request: RoutedRequest) -> RoutedAnswer:
            sent, times, cached = time.perf_counter(), [], 0
            async for item in streaming.generate.remote(
                PlainRequest("".join(map(chr, request.prompt)), request.output)
            ):
                times.append(time.perf_counter() - sent)
                cached = cached if item is None else item
            return RoutedAnswer(times[0], times[-1], len(request.prompt), cached)

        runs = []
        for case in cases:
            requests = with_answers(case.requests, case.workload, case.seed)
            began_s, answers = time.time(), await send(requests, ask)
            runs.append(RoutingRun(system, case.workload, case.seed, began_s, tuple(answers)))
        return runs
    finally:
        await asyncio.to_thread(serve.shutdown)
        ray.shutdown()

"""The closed loop on paced engines: pack, move, empty, stop just the emptied one; and no stream notices."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from benchmarks.chaos.offers import undisturbed
from policies.cost.limit import MOST_ERROR
from simulator.command.replay import replay
from tests.counts import LONG_ONLY
from tests.integration.application import (
    MODEL,
    Answer,
    Application,
    Client,
    eventually,
    process,
    processes,
    prompt,
    total,
)
from tests.integration.serving import deploy, stop_replica

LONG = 3000
"""Output tokens that take a paced engine a minute."""


class Streams:
    """Streams that are read to their ends, or until a test has seen enough."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._read: list[tuple[list[int], int, Answer, asyncio.Task[None]]] = []

    async def start(self, count: int, tokens: int, length: int = 100, name: str = "s") -> None:
        """Begin `count` streams, and wait until each has a token."""
        for _ in range(count):
            label = f"{name}-{len(self._read)}"
            answer, tokens_in = Answer(), prompt(length, label)
            task = asyncio.create_task(self._client.stream(answer, tokens_in, tokens, label))
            self._read.append((tokens_in, tokens, answer, task))
        for _, _, answer, _ in self._read[-count:]:
            await answer.until(1)

    async def go_on(self, tokens: int) -> None:
        """Wait until each stream has `tokens` more tokens."""
        for _, _, answer, _ in self._read:
            await answer.until(answer.tokens + tokens)

    async def end(self) -> None:
        """Read all to their ends: each gives just what an undisturbed run gives."""
        for tokens_in, count, answer, task in self._read:
            await task
            assert (answer.error, answer.finish) == (None, "length")
            assert answer.text == undisturbed(tuple(tokens_in), count)
        self._read.clear()

    async def check(self) -> None:
        """Assert that all tokens so far are those of an undisturbed run."""
        for tokens_in, count, answer, _ in self._read:
            assert answer.error is None
            assert undisturbed(tuple(tokens_in), count).startswith(answer.text)

    async def leave(self) -> None:
        """The clients go."""
        for _, _, _, task in self._read:
            task.cancel()
        await asyncio.gather(*(task for _, _, _, task in self._read), return_exceptions=True)


async def alone(client: Client) -> None:
    """Wait until one replica is wanted, and no other is starting or going."""

    async def so() -> bool:
        state = await client.state()
        return bool(state["wanted_replicas"] == len(state["replicas"]) == 1)

    await eventually(so, 60)


@asynccontextmanager
async def scene(application: Application) -> AsyncIterator[tuple[Client, Streams]]:
    """A client, and streams that are gone when the test is over."""
    async with application.client() as client:
        streams = Streams(client)
        try:
            yield client, streams
        finally:
            await streams.leave()
            await client.idle()


@asynccontextmanager
async def begun(application: Application) -> AsyncIterator[tuple[Client, Streams]]:
    """A scene that begins with one lone replica, whatever the one before has left."""
    async with scene(application) as (client, streams):
        await alone(client)
        yield client, streams


async def replicas(client: Client) -> dict[str, int]:
    """The running replicas, and how many requests each has."""
    return {r["id"]: len(r["requests"]) for r in await client.running()}


def serving() -> set[int]:
    """The processes of the application's deployments, by their numbers."""
    return {each.pid for each in processes("ServeReplica:mell:")}


async def until(client: Client, condition: Any, within_s: float = 40) -> dict[str, int]:
    """Wait for the running replicas to be as a test wants them."""
    found: dict[str, int] = {}

    async def so() -> bool:
        found.clear()
        found.update(await replicas(client))
        return bool(condition(found))

    await eventually(so, within_s)
    return found


@asynccontextmanager
async def bounded(client: Client, low: int, high: int) -> AsyncIterator[None]:
    """Other bounds of the number of replicas, and then those of before again."""
    state = await client.state()
    before = state["min_replicas"], state["max_replicas"]
    try:
        await client.set_bounds(low, high)
        yield
    finally:
        await client.set_bounds(*before)


async def two(client: Client, streams: Streams) -> dict[str, int]:
    """Two replicas with requests on both: the second opens when the first is full."""
    await streams.start(4, LONG, 700, "fill")
    return await until(client, lambda now: len(now) == 2 and all(now.values()))


async def stopped(client: Client) -> dict[str, Any]:
    """The state once the replicas that were closed have copied their caches, and Serve stops them: one is wanted."""

    async def one_is_wanted() -> bool:
        return bool((await client.state())["wanted_replicas"] == 1)

    await eventually(one_is_wanted)
    return await client.state()


async def test_load_opens_replicas_and_its_end_closes_them(paced: Application) -> None:
    async with begun(paced) as (client, streams):
        await streams.start(8, 300, 700)
        await until(client, lambda now: len(now) >= 2)
        await streams.end()
        opened = {r["id"] for r in (await client.state())["replicas"]}
        left = await until(client, lambda now: len(now) == 1)
        assert set(left) <= opened, "with no load, none is opened"
        await stopped(client)

        async def is_at_the_minimum() -> bool:
            return bool((await client.state())["scaling"]["kept"] == "minimum")

        await eventually(is_at_the_minimum)
        state = await client.state()
        service, steps = state["service"], state["estimates"]["steps"]
        assert service["state"] in ("held", "slow"), "measured by now"
        assert service["step_limit_s"] == pytest.approx(
            1.0 / (1 + min(service["error"], MOST_ERROR)) - service["interruption_s"]
        )
        reached, predicted = service["reached"], service["predicted"]
        assert reached["first_tokens"] >= 8 and reached["gaps"] >= 8 * 200 and predicted["gaps"] > 0
        assert reached["itl_p99_ms"] > 15 and reached["ttft_p99_s"] > 0.02
        assert steps["overhead_s"] + steps["token_s"] + steps["sequence_s"] > 0.01, "a step takes 0.02 s"


async def test_requests_are_packed_and_just_the_emptied_replica_stops(paced: Application) -> None:
    async with begun(paced) as (client, streams):
        await streams.start(5, 150, 700, "short")
        await streams.start(2, 1200, 100, "long")
        await until(client, lambda now: len(now) >= 2)
        packed = await until(client, lambda now: list(now.values()) == [2])
        state = await stopped(client)
        await streams.go_on(20)
        await streams.check()
        moved = [
            m for m in await client.migrations() if m["reason"].startswith("drain") and m["outcome"] == "committed"
        ]
        assert set(packed) == {r["id"] for r in state["replicas"] if r["state"] == "RUNNING"}
        assert not {m["source"] for m in moved[:1]} & set(packed)


@LONG_ONLY
async def test_openais_service_tiers_are_classes(paced: Application) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Where do blocks move?"}], "max_tokens": 4}
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    made = AsyncOpenAI(base_url=f"{paced.url}/v1", api_key="none", http_client=http, max_retries=0)
    async with begun(paced) as (client, _), made as clients:
        before = await client.metrics()
        for tier in ("flex", "priority", "default", "auto", "scale"):
            await clients.chat.completions.create(**asked, service_tier=tier)
        response: Any = {"model": MODEL, "input": "x", "max_output_tokens": 4, "service_tier": "priority"}
        assert (await clients.responses.create(**response)).service_tier == "priority"
        with pytest.raises(openai.BadRequestError, match="'gold' is not among default, flex, priority, swift"):
            await clients.chat.completions.create(**asked, extra_headers={"X-Mell-Class": "gold"})
        after = await client.metrics()
    counted = {}
    for name in ("default", "flex", "priority"):
        ends = (total(metrics, "mell_request_ttft_seconds_count", **{"class": name}) for metrics in (after, before))
        counted[name] = next(ends) - next(ends)
    assert counted == {"default": 3, "flex": 1, "priority": 2}


@LONG_ONLY
async def test_under_pressure_the_lower_rank_waits(paced: Application) -> None:
    """Every replica is full, and two requests wait there, which do not fit at once: the lower rank came first.

    The replicas open before the streams begin: on a busy machine, the first stream would end before the last one opens.
    """
    async with begun(paced) as (client, streams), bounded(client, 4, 4):
        await until(client, lambda now: len(now) == 4)
        await streams.start(4, LONG, 2100, "full")
        assert list((await replicas(client)).values()) == [1] * 4
        ended: list[str] = []

        async def ask(label: str, tier: str) -> None:
            await client.stream(Answer(), prompt(2200, label), 30, label, service_tier=tier)
            ended.append(label)

        async def waiting() -> list[list[dict[str, Any]]]:
            return [[q for q in r["requests"] if q["phase"] == "waiting"] for r in await client.running()]

        asking = []
        for tier in ("flex", "priority"):
            asking += [asyncio.create_task(ask(f"{tier}-{number}", tier)) for number in range(4)]

            async def all_wait(count: int = len(asking)) -> bool:
                return sum(map(len, await waiting())) == count

            await eventually(all_wait)
        homes = [[(q["class"], q["label"]) for q in queue] for queue in await waiting()]
        pairs = [(p, q) for home in homes for rank, p in home for other, q in home if rank == "priority" > other]
        assert len(pairs) > 1, "both ranks wait on some replicas"
        await streams.leave()
        await asyncio.gather(*asking)
        assert all(ended.index(first) < ended.index(second) for first, second in pairs), ended


@LONG_ONLY
async def test_a_replica_is_drained_although_its_requests_run_for_long(paced: Application) -> None:
    async with begun(paced) as (client, streams):
        await streams.start(2, LONG)
        (home,) = [r for r, count in (await replicas(client)).items() if count == 2]
        assert (await client.drain("nobody")).status_code == 404
        assert (await client.drain(home)).status_code == 202
        assert (await client.drain(home)).status_code == 202, "asked twice, it drains all the same"

        async def gone() -> bool:
            return home not in [r["id"] for r in (await client.state())["replicas"]]

        await eventually(gone, 40)
        await streams.check()
        assert sum((await replicas(client)).values()) == 2


@LONG_ONLY
async def test_a_replica_that_serve_stops_is_evacuated(paced: Application) -> None:
    """A downscale by Serve itself, a drained node and a redeployment have the same effect: a busy replica stops."""
    async with begun(paced) as (client, streams):
        victim = max((await two(client, streams)).items(), key=lambda item: item[1])[0]
        await stop_replica(victim)

        async def gone() -> bool:
            return victim not in [r["id"] for r in (await client.state())["replicas"]]

        await eventually(gone, 25)
        await streams.check()
        assert sum((await replicas(client)).values()) == 4
        reasons = {m["reason"] for m in await client.migrations() if m["source"] == victim}
        assert "evacuate" in reasons
        assert not any(reason.startswith("replica lost") for reason in reasons)


async def test_an_upgrade_in_place_breaks_no_stream_and_refuses_no_call(paced: Application) -> None:
    """Other settings under `args`: Serve replaces ingress, scheduler and engines, below eight streams and new calls."""
    async with begun(paced) as (client, _):
        before = serving()
        upgraded = asyncio.Event()

        async def stream_on(number: int) -> int:
            ended = 0
            while not upgraded.is_set():
                answer, tokens_in = Answer(), prompt(300, f"upgrade-{number}-{ended}")
                await client.stream(answer, tokens_in, 250, f"upgrade-{number}-{ended}")
                assert (answer.error, answer.text) == (None, undisturbed(tuple(tokens_in), 250))
                ended += 1
            return ended

        async def call_on() -> int:
            calls = 0
            while not upgraded.is_set():
                async with paced.client() as other:  # by a connection of its own
                    await other.complete(prompt(20, f"call-{calls}"), 5)
                calls += 1
                await asyncio.sleep(0.1)
            return calls

        async def replaced() -> bool:
            return before.isdisjoint(serving())

        async with asyncio.TaskGroup() as group:
            streaming = [group.create_task(stream_on(number)) for number in range(8)]
            calling = group.create_task(call_on())
            await deploy(paced, linger_s=3.1)
            await eventually(replaced, 120)
            upgraded.set()
        assert all(task.result() for task in streaming) and calling.result() > 20


@LONG_ONLY
async def test_the_number_of_replicas_survives_scheduler_and_controller(paced: Application) -> None:
    async with begun(paced) as (client, streams):
        before = await two(client, streams)
        fence = (await client.state())["fence"]
        assert (await client.http.post("/mell/level", json={"ttft_p99_s": 29.0})).status_code == 200
        process("ServeReplica:mell:Scheduler").kill()

        async def back() -> bool:
            return bool((await client.state())["fence"] > fence)

        await eventually(back, 60)
        assert (await client.state())["service"]["target"]["ttft_p99_s"] == 29.0, "an operator's level stays"
        assert (await client.http.post("/mell/level", json={"ttft_p99_s": 30.0})).status_code == 200
        # On a slow machine, the streams have meanwhile grown beyond two replicas.
        assert (await client.state())["wanted_replicas"] >= 2
        assert set(before) <= set(await replicas(client))
        await streams.check()
        process("ServeController").kill()
        await asyncio.sleep(5)
        await streams.check()
        assert set(before) <= set(await until(client, lambda now: len(now) >= 2))


@LONG_ONLY
async def test_new_bounds_open_and_stop_replicas_beside_streams(paced: Application) -> None:
    async with begun(paced) as (client, streams):
        await streams.start(3, 700)
        async with bounded(client, 2, 2):
            await until(client, lambda now: len(now) == 2)
            await client.set_bounds(1, 1)
            await stopped(client)
            await until(client, lambda now: len(now) == 1)
        await streams.end()


@LONG_ONLY
async def test_a_replica_that_stands_still_costs_a_pause(paced: Application) -> None:
    async with begun(paced) as (client, streams):
        await streams.start(2, 250)
        (home,) = [r for r in await client.running() if len(r["requests"]) == 2]
        os.kill(home["pids"][0], signal.SIGSTOP)
        try:
            await streams.end()
        finally:
            os.kill(home["pids"][0], signal.SIGKILL)


@LONG_ONLY
async def test_under_a_steady_load_nothing_opens_or_closes(paced: Application) -> None:
    async with begun(paced) as (client, streams):
        (only,) = await replicas(client)
        await streams.start(3, 500, 300)
        seen = set()
        for _ in range(30):
            state = await client.state()
            seen.add((state["wanted_replicas"], *(r["id"] for r in state["replicas"])))
            await asyncio.sleep(0.25)
        assert seen == {(1, only)}
        await streams.check()


@LONG_ONLY
async def test_a_replica_opens_for_time_before_its_cache_is_full(paced: Application) -> None:
    """The level of a class limits steps to those of one request; so this is the last test with a load."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    made = AsyncOpenAI(base_url=f"{paced.url}/v1", api_key="none", http_client=http, max_retries=0)
    async with begun(paced) as (client, streams), made as swift:
        reasons: set[str] = set()

        async def two_run() -> bool:
            state = await client.state()
            reasons.update(filter(None, [state["scaling"]["up"]]))
            return len([r for r in state["replicas"] if r["state"] == "RUNNING"]) >= 2

        watching = asyncio.create_task(eventually(two_run, 60))
        await streams.start(1, LONG)
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Quick."}], "max_tokens": 4}
        await swift.chat.completions.create(**asked, extra_headers={"X-Mell-Class": "swift"})
        await streams.start(1, LONG)
        await watching
        state = await client.state()
        assert reasons & {"requests", "reserve", "prefills"}
        assert max(r["used_tokens"] / r["capacity_tokens"] for r in state["replicas"] if r["capacity_tokens"]) < 0.6
        assert state["service"]["classes"]["swift"]["target"]["itl_p99_ms"] == 21.5
        assert state["service"]["step_limit_s"] < 0.03


def test_the_recorded_epochs_give_the_same_plans_again(paced: Application) -> None:
    recordings = sorted((paced.folder / "epochs").glob("*.jsonl"))
    assert len(recordings) >= 2, "one of each scheduler"
    outcomes = [replay(path) for path in recordings]
    assert [outcome.different for outcome in outcomes] == [()] * len(outcomes)
    assert sum(outcome.moves for outcome in outcomes) > 0


async def test_ctrl_c_lets_answers_end(paced: Application, to_its_end: Callable[[], None]) -> None:
    async with paced.client() as client:
        streams = Streams(client)
        await streams.start(3, 200)
        await asyncio.gather(asyncio.to_thread(to_its_end), streams.end())

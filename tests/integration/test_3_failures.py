"""Deaths of processes, which cost clients a pause but no stream. These tests come late: new engines take time.

`test_7_differential` kills an engine core; MELL_TEST_LONG adds the other processes, and all replicas at once.
"""

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from deployments.processes.forkserver import FORK_SERVER
from deployments.processes.table import command_line
from tests.counts import LONG, LONG_ONLY
from tests.integration import faults
from tests.integration.application import Answer, Application, Client, eventually, process, prompt
from tests.integration.faults import Fault

STREAMS, TOKENS = 4, 600 if LONG else 300


async def undisturbed(client: Client, name: str) -> list[str]:
    prompts = [prompt(100 + 50 * i, f"{name}/{i}") for i in range(STREAMS)]
    return [text for text, _ in await asyncio.gather(*(client.complete(p, TOKENS) for p in prompts))]


async def under_way(client: Client, name: str) -> tuple[list[Answer], list["asyncio.Task[Any]"]]:
    """Streams of the same prompts that have had ten tokens each."""
    answers = [Answer() for _ in range(STREAMS)]
    tasks = [
        asyncio.create_task(client.stream(a, prompt(100 + 50 * i, f"{name}/{i}"), TOKENS, f"{name}-{i}"))
        for i, a in enumerate(answers)
    ]
    for answer in answers:
        await answer.until(10)
    return answers, tasks


async def home(client: Client) -> dict[str, Any]:
    """The replica with the most requests."""
    return max(await client.running(), key=lambda r: len(r["requests"]))


async def lost(client: Client, replica: dict[str, Any]) -> None:
    """Wait until streams went on without the replica, and all its processes are gone."""

    async def reported() -> bool:
        found = await client.migrations()
        return any(
            m["source"] == replica["id"] and m["path"] == "tokens" and m["reason"].startswith("replica lost")
            for m in found
        )

    async def gone() -> bool:
        return not any(psutil.pid_exists(pid) for pid in replica["pids"])

    await eventually(reported)
    await eventually(gone, within_s=60)


async def lost_and_replaced(client: Client, replica: dict[str, Any]) -> None:
    """Wait until streams went on without the replica, another runs in its place, and all its processes are gone."""

    async def two() -> bool:
        ids = [r["id"] for r in await client.running()]
        return len(ids) >= 2 and replica["id"] not in ids

    await lost(client, replica)
    await eventually(two, within_s=180)
    await client.idle()


async def test_streams_survive_the_death_of_the_scheduler(application: Application) -> None:
    async with application.client() as client:
        want = await undisturbed(client, "scheduler")
        answers, tasks = await under_way(client, "scheduler")
        before = await client.state()
        process("ServeReplica:mell:Scheduler").kill()
        stale = await client.state()
        placed_without, _ = await client.complete(prompt(10, "while away"), 5)
        await asyncio.gather(*tasks)
        assert placed_without
        assert stale["fence"] == before["fence"]
        assert [a.text for a in answers] == want

        async def back() -> bool:
            state = await client.state()
            return bool(state["fence"] > before["fence"] and state["as_of"] > stale["as_of"])

        await eventually(back, within_s=60)
        answer = Answer()
        reading = asyncio.create_task(client.stream(answer, prompt(50, "again"), 400, "again"))
        await answer.until(5)
        assert (await client.move("again", path="kv")).status_code == 202
        await reading
        assert answer.finish == "length"


@LONG_ONLY
async def test_death_of_a_replica_ends_neither_its_streams_nor_those_moving_to_it(application: Application) -> None:
    async with application.client() as client:
        want = await undisturbed(client, "target")
        answers, tasks = await under_way(client, "target")
        source = await home(client)
        (target,) = [r for r in await client.running() if r["id"] != source["id"]]
        *there, third, fourth = [q["label"] for q in source["requests"] if q["label"].startswith("target-")]
        orders = [await client.move(label, target=target["id"], path="tokens") for label in there]
        assert {(await client.outcome(o.json()["id"]))["outcome"] for o in orders} == {"committed"}
        faults.write(application.faults, "collective", Fault.SILENT)
        orders = [await client.move(label, target=target["id"], path="kv") for label in (third, fourth)]
        os.kill(target["pids"][0], signal.SIGKILL)
        records = [await client.outcome(o.json()["id"]) for o in orders if o.status_code == 202]
        assert records
        assert all(r["outcome"] == "aborted" for r in records), records
        await asyncio.gather(*tasks)
        assert [a.text for a in answers] == want
        faults.write(application.faults, "collective")
        await lost_and_replaced(client, target)


@LONG_ONLY
@pytest.mark.parametrize("victim", ["engine core", "worker", "fork server", "engine core that stands still"])
async def test_streams_survive_the_death_of_each_process(application: Application, victim: str) -> None:
    async with application.client() as client:
        want = await undisturbed(client, victim)
        answers, tasks = await under_way(client, victim)
        whole = asyncio.create_task(client.complete(prompt(100, f"{victim}/0"), TOKENS))
        await asyncio.sleep(0.2)
        doomed = await home(client)
        _, core, worker = doomed["pids"]
        forkers = {psutil.Process(pid).ppid() for pid in (core, worker)}
        assert [FORK_SERVER in command_line(pid) for pid in forkers] == [True]
        pid = {"worker": worker, "fork server": forkers.pop()}.get(victim, core)
        os.kill(pid, signal.SIGSTOP if "still" in victim else signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert [a.text for a in answers] == want
        assert (await whole)[0] == want[0]
        await lost_and_replaced(client, doomed)


@LONG_ONLY
@pytest.mark.parametrize("victims", ["engine cores", "workers", "replicas"])
async def test_streams_and_new_calls_survive_the_death_of_all_at_once(application: Application, victims: str) -> None:
    async with application.client() as client:
        want = await undisturbed(client, victims)
        answers, tasks = await under_way(client, victims)
        doomed = await client.running()
        for replica in doomed:
            os.kill(replica["pids"][["replicas", "engine cores", "workers"].index(victims)], signal.SIGKILL)
        new = asyncio.create_task(client.complete(prompt(100, f"{victims}/0"), TOKENS))
        await asyncio.gather(*tasks)
        assert [answer.text for answer in answers] == want
        assert (await new)[0] == want[0]
        dead = {replica["id"] for replica in doomed}

        async def replaced() -> bool:
            ids = {replica["id"] for replica in await client.running()}
            return len(ids) >= 2 and not ids & dead

        await eventually(replaced, within_s=180)
        await client.idle()

"""A model that sleeps while nobody asks it, and wakes for a request: real Serve, a real engine."""

import asyncio
import time
from typing import Any

import psutil

from tests.counts import LONG_ONLY
from tests.integration.application import Application, Client, eventually, process, prompt, total
from tests.integration.conftest import SLEEPS_AFTER_S

pytestmark = LONG_ONLY

ASKED = prompt(300, "asleep")


async def replica(client: Client) -> dict[str, Any]:
    """The only replica."""
    (found,) = (await client.state())["replicas"]
    return dict(found)


async def is_asleep(client: Client) -> bool:
    """True once it sleeps, and has reported that."""
    found = await replica(client)
    return (found["state"], found["memory"]["state"]) == ("ASLEEP", "asleep")


async def answer(client: Client, **extra: Any) -> str:
    """The same prompt's answer."""
    text, _ = await client.complete(ASKED, 20, **extra)
    return text


def resident(found: dict[str, Any]) -> int:
    """The resident bytes of the worker."""
    return int(psutil.Process(found["pids"][-1]).memory_info().rss)


async def test_an_idle_model_falls_asleep_and_a_request_wakes_it_and_is_answered_exactly(sleeping: Application) -> None:
    async with sleeping.client() as client:
        want, seeded = await answer(client), await answer(client, temperature=1.0, seed=5)
        found = await replica(client)
        awake, parameters = resident(found), found["memory"]["parameters_mib"] << 20
        for _ in range(2):
            await eventually(lambda: is_asleep(client), within_s=SLEEPS_AFTER_S + 30)
            found = await replica(client)
            assert awake - resident(found) >= 0.8 * parameters
            assert found["cache"]["exact"] and found["memory"]["blocks"] == found["memory"]["parameters_mib"] == 0
            (device,) = (await client.state())["devices"]
            rest = found["memory"]["rest_mib"]  # rounded up, as the sum is
            assert rest <= device["held_mib"] <= rest + 1, "what is left counts"
            began = time.monotonic()
            assert await answer(client) == want
            print(f"from a request to its {20} tokens, asleep before: {time.monotonic() - began:.2f} s")
            assert await answer(client, temperature=1.0, seed=5) == seeded
        families = await client.metrics()
        assert total(families, "mell_wakes_total", outcome="done") == 2
        assert total(families, "mell_wake_seconds_count") == 2


async def test_a_model_sleeps_and_wakes_by_order(sleeping: Application) -> None:
    async with sleeping.client() as client:
        want = await answer(client)
        name = (await client.http.get("/v1/models")).json()["data"][0]["id"]
        response = await client.http.post(f"/mell/models/{name}/sleep")
        assert response.status_code == 202, response.text
        await eventually(lambda: is_asleep(client))
        assert (await client.http.get("/health")).status_code == 200, "a request would be served"
        again = await client.http.post(f"/mell/models/{name}/sleep")
        assert (again.status_code, again.json()["error"]["message"]) == (409, "no replica of the model is awake")
        id = (await replica(client))["id"]
        blocks = await client.set_memory(id, 200)
        assert blocks.status_code == 409 and "is asleep" in blocks.json()["error"]["message"]
        assert (await client.http.post(f"/mell/replicas/{id}/wake")).status_code == 202

        async def is_awake() -> bool:
            return bool((await replica(client))["state"] == "RUNNING")

        await eventually(is_awake)
        assert await answer(client) == want
        unknown = await client.http.post("/mell/models/nobody/wake")
        assert unknown.status_code == 404


async def test_a_request_for_a_sleeper_waits_while_the_scheduler_is_away_and_the_next_one_wakes_it(
    sleeping: Application,
) -> None:
    async with sleeping.client() as client:
        want = await answer(client)
        await eventually(lambda: is_asleep(client), within_s=SLEEPS_AFTER_S + 30)
        scheduler = process("ServeReplica:mell:Scheduler")
        scheduler.suspend()
        asking = asyncio.create_task(answer(client))
        try:
            # Several calls to the scheduler get no answer in this time.
            finished, _ = await asyncio.wait((asking,), timeout=3.0)
            assert not finished, "it is not refused"
        finally:
            scheduler.kill()
        assert await asking == want


async def test_an_engine_that_dies_asleep_is_replaced(sleeping: Application) -> None:
    async with sleeping.client() as client:
        want = await answer(client)
        await eventually(lambda: is_asleep(client), within_s=SLEEPS_AFTER_S + 30)
        before = await replica(client)
        psutil.Process(before["pids"][1]).kill()

        async def is_another() -> bool:
            # Nobody has asked for a while, so the other one may fall asleep at once.
            found = [r["id"] for r in (await client.state())["replicas"] if r["state"] in ("RUNNING", "ASLEEP")]
            return bool(found) and before["id"] not in found

        await eventually(is_another, within_s=150)
        assert await answer(client) == want

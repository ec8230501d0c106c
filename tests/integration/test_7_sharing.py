"""Two models on one budget of memory: it follows the demand from one to the other, and their tokens stay the same."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from tests.counts import LONG, LONG_ONLY
from tests.integration.application import Answer, Application, Client, eventually, processes, prompt, total
from tests.integration.conftest import SHARED_MIB
from tests.integration.two_models import is_of_other, is_of_tiny

OURS = {"tiny": is_of_tiny, "other": is_of_other}
STREAMS, PROMPT, TOKENS = (60 if LONG else 48), 600, 200
"""Those of one model want a quarter of the KV memory or more: it depends on what the processes leave of the budget."""
Prompts = Sequence[list[int]]


def prompts(name: str) -> Prompts:
    return [prompt(PROMPT + i % 20, f"{name} {i}") for i in range(STREAMS)]


async def streamed(client: Client, model: str, asked: Prompts) -> list[str]:
    """The texts of all prompts, at once; none may have an error."""
    answers = [Answer() for _ in asked]
    pairs = zip(answers, asked, strict=True)
    await asyncio.gather(
        *(client.stream(each, p, TOKENS, f"{model}-{i}", model=model) for i, (each, p) in enumerate(pairs))
    )
    assert [(answer.error, answer.finish) for answer in answers] == [(None, "length")] * len(asked)
    assert all(OURS[model](answer.text) for answer in answers)
    return [answer.text for answer in answers]


async def seats(client: Client) -> dict[str, dict[str, Any]]:
    """The parts of the models' replicas in the memory of the node, by model.

    Beyond the budget there may be what a process was just seen to have grown by: pools shrink for it.
    """
    (device,) = (await client.state())["devices"]
    assert device["budget_mib"] == SHARED_MIB
    assert device["held_mib"] <= device["ordered_mib"] <= 1.02 * SHARED_MIB
    return {seat["model"]: seat for seat in device["seats"]}


async def sizes(client: Client) -> dict[str, int]:
    """The KV blocks of the models' replicas, once they are settled."""
    found: dict[str, Any] = {}

    async def settled() -> bool:
        found.update({replica["model"]: replica["memory"] for replica in await client.running()})
        return len(found) == 2 and all(memory["state"] == "settled" for memory in found.values())

    await eventually(settled, within_s=60)
    return {model: memory["blocks"] for model, memory in found.items()}


async def rests(client: Client) -> dict[str, int]:
    """The sizes of idle replicas once no resize is ordered any more, for some epochs."""
    await client.settle()
    found: list[tuple[dict[str, int], float]] = []

    async def is_quiet() -> bool:
        found.append((await sizes(client), total(await client.metrics(), "mell_resizes_total")))
        await asyncio.sleep(1.5)
        return len(found) > 1 and found[-1] == found[-2]

    await eventually(is_quiet, within_s=60)
    return found[-1][0]


def are_even(sizes: dict[str, int]) -> bool:
    """True if two models without demand share what is left."""
    return len(sizes) == 2 and abs(sizes["tiny"] - sizes["other"]) < 0.12 * sum(sizes.values())


@asynccontextmanager
async def watched(client: Client) -> AsyncIterator[list[int]]:
    """The resident memory of all replicas, in MiB, again and again."""
    found: list[int] = []

    async def watch() -> None:
        while True:
            pids = {pid for replica in await client.running() for pid in replica["pids"]}
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(sum(psutil.Process(pid).memory_info().rss for pid in pids) >> 20)
            await asyncio.sleep(0.3)

    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        watching.cancel()
        await asyncio.wait((watching,))


@pytest.mark.timeout(900 if LONG else 300)
async def test_memory_follows_the_demand_from_one_model_to_the_other(sharing: Application) -> None:
    async with sharing.client() as client:
        await client.set_mode("off")
        asked = {model: prompts(model) for model in OURS}
        want = {model: await streamed(client, model, asked[model]) for model in OURS}
        await client.set_mode("act")
        even = await rests(client)
        assert are_even(even), even
        async with watched(client) as resident:
            for model, other in (("tiny", "other"), ("other", "tiny")):
                streams = asyncio.create_task(streamed(client, model, asked[model]))

                async def has_grown(model: str = model, other: str = other) -> bool:
                    now = {r["model"]: r["memory"]["blocks"] for r in await client.running()}
                    return bool(now[model] > 1.1 * even[model] and now[other] < 0.9 * even[other])

                await eventually(has_grown, within_s=120)
                found = await seats(client)
                assert found[model]["by"] == "demand" and found[model]["want_mib"] > found[other]["want_mib"]
                assert await streams == want[model]
            if LONG:  # Both at once: each has its half again, whatever the other one wants.
                texts = await asyncio.gather(*(streamed(client, model, asked[model]) for model in OURS))
                assert dict(zip(OURS, texts, strict=True)) == want
        assert max(resident) < 1.1 * SHARED_MIB, max(resident)
        again = await rests(client)
        assert are_even(again), again
        assert all(replica["cache"]["exact"] for replica in await client.running())


async def test_a_model_that_sleeps_gives_its_memory_and_wakes_for_a_request(sharing: Application) -> None:
    """A request is answered as before, greedy or seeded."""
    asked = prompt(PROMPT, "asleep")

    async def texts(client: Client) -> list[str]:
        kinds: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 5})
        return [(await client.complete(asked, 20, model="other", **kind))[0] for kind in kinds]

    async def replicas(client: Client) -> dict[str, dict[str, Any]]:
        return {replica["model"]: replica for replica in (await client.state())["replicas"]}

    async with sharing.client() as client:
        even = await rests(client)
        want = await texts(client)
        await client.settle()
        bounds = {"model": "other", "max_replicas": 1}
        assert (await client.http.post("/mell/bounds", json=bounds | {"min_replicas": 0})).status_code == 200
        ordered = await client.http.post("/mell/models/other/sleep")
        assert ordered.status_code == 202, ordered.text

        async def other_has_its_memory() -> bool:
            found = await replicas(client)
            assert found["tiny"]["state"] == "RUNNING"
            grown: bool = found["tiny"]["memory"]["blocks"] > 1.5 * even["tiny"]
            return grown and found["other"]["state"] == "ASLEEP"

        await eventually(other_has_its_memory, within_s=60)
        memory = (await replicas(client))["other"]["memory"]
        assert (memory["state"], memory["blocks"], memory["parameters_mib"]) == ("asleep", 0, 0)
        await seats(client)
        assert await texts(client) == want
        assert total(await client.metrics(), "mell_wakes_total", outcome="done") == 1
        assert (await client.http.post("/mell/bounds", json=bounds | {"min_replicas": 1})).status_code == 200


@LONG_ONLY
async def test_a_size_by_hand_stays_until_it_is_given_back(sharing: Application) -> None:
    async with sharing.client() as client:
        even = await rests(client)
        mine = next(replica["id"] for replica in await client.running() if replica["model"] == "tiny")
        assert (await client.set_memory(mine, 100)).status_code == 202

        async def other_has_the_rest() -> bool:
            now = await sizes(client)
            return now["tiny"] == 100 and now["other"] > 1.5 * even["other"]

        await eventually(other_has_the_rest, within_s=60)
        assert {model: seat["by"] for model, seat in (await seats(client)).items()} == {
            "tiny": "hand",
            "other": "demand",
        }
        fence = (await client.state())["fence"]
        processes("ServeReplica:mell:Scheduler")[-1].kill()

        async def another_scheduler_divides() -> bool:
            state = await client.state()
            return bool(state["fence"] > fence and (await seats(client))["other"]["by"] == "demand")

        await eventually(another_scheduler_divides, within_s=60)
        assert (await sizes(client))["tiny"] == 100 and (await seats(client))["tiny"]["by"] == "hand"
        assert (await client.set_memory(mine, None)).status_code == 202

        async def even_again() -> bool:
            return are_even(await sizes(client))

        await eventually(even_again, within_s=60)


@LONG_ONLY
async def test_a_replica_that_dies_gets_its_memory_again(sharing: Application) -> None:
    """The other one grows into it, and shrinks before the new one starts."""
    async with sharing.client() as client:
        await rests(client)
        dead = next(replica for replica in await client.running() if replica["model"] == "tiny")
        async with watched(client) as resident:
            psutil.Process(dead["pids"][-1]).kill()

            async def replaced() -> bool:
                found = [r["id"] for r in await client.running() if r["model"] == "tiny"]
                await seats(client)
                return len(found) == 1 and found != [dead["id"]]

            await eventually(replaced, within_s=240)
        again = await rests(client)
        assert are_even(again), again
        assert max(resident) < 1.1 * SHARED_MIB, max(resident)

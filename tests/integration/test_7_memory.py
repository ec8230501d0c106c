"""KV pools of real replicas that shrink and grow by hand: tokens are those of pools that keep their size."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from tests.counts import LONG_ONLY
from tests.integration.application import Answer, Application, Client, eventually, process, prompt, total
from tests.integration.conftest import ELASTIC_BLOCKS, ELASTIC_TIMES
from tests.integration.test_2_metrics import OF_ELASTIC_POOLS

pytestmark = LONG_ONLY

STREAMS = 50
LEAST = 32
"""The blocks of one request of `max_model_len`."""
MOST = int(ELASTIC_TIMES * (ELASTIC_BLOCKS + 1)) - 1
Prompts = Sequence[tuple[list[int], int]]


def prompts(name: str, count: int = STREAMS, tokens: int = 200) -> Prompts:
    """Prompts that no other test has, each with a number of tokens to generate."""
    return [(prompt(60 + 11 * (i % 20), f"{name} {i}"), tokens + 5 * (i % 10)) for i in range(count)]


async def streamed(client: Client, name: str, asked: Prompts) -> list[str]:
    """The texts of all prompts, at once; none may have an error."""
    answers = [Answer() for _ in asked]
    streams = zip(answers, asked, strict=True)
    await asyncio.gather(*(client.stream(each, p, n, f"{name}-{i}") for i, (each, (p, n)) in enumerate(streams)))
    assert [answer.error for answer in answers] == [None] * len(asked)
    assert [answer.finish for answer in answers] == ["length"] * len(asked)
    return [answer.text for answer in answers]


async def memories(client: Client) -> dict[str, dict[str, Any]]:
    """The member `memory` of all replicas."""
    return {replica["id"]: replica["memory"] for replica in await client.running()}


async def have(client: Client, **sizes: int) -> None:
    """Wait until replicas have these sizes."""

    async def settled() -> bool:
        found = await memories(client)
        return all(
            (m["state"], m["blocks"], m["held_blocks"]) == ("settled", size, size)
            for replica, size in sizes.items()
            for m in (found[replica],)
        )

    await eventually(settled, within_s=60)


async def order(client: Client, **sizes: int) -> None:
    for replica, size in sizes.items():
        response = await client.set_memory(replica, size)
        assert response.status_code == 202, response.text


async def preemptions(client: Client) -> int:
    return sum(replica["preemptions"] for replica in await client.running())


async def as_at_the_start(client: Client) -> tuple[str, str]:
    """Two idle replicas that keep the sizes of a start; their ids."""
    a, b = sorted(await memories(client))
    await order(client, **{a: ELASTIC_BLOCKS, b: ELASTIC_BLOCKS})
    await have(client, **{a: ELASTIC_BLOCKS, b: ELASTIC_BLOCKS})
    await client.idle()
    return a, b


async def are_used(client: Client, blocks: int) -> None:
    """Wait until requests use more than that many blocks."""

    async def used() -> bool:
        return sum(int(memory["used_blocks"]) for memory in (await memories(client)).values()) > blocks

    await eventually(used)


async def test_streams_under_random_resizes_and_moves_have_the_same_tokens(elastic: Application) -> None:
    async with elastic.client() as client:
        await as_at_the_start(client)
        asked = prompts("resized")
        want = await streamed(client, "unresized", asked)
        await client.settle()
        before, moved = await preemptions(client), total(await client.metrics(), "mell_blocks_renumbered_total")
        stop, draw = asyncio.Event(), random.Random(3)

        async def resize() -> int:
            count = 0
            while not stop.is_set():
                replica = draw.choice(sorted(await memories(client)))
                await order(client, **{replica: draw.randrange(150, 600)})
                count += 1
                await asyncio.sleep(0.2)
            return count

        async def move() -> int:
            count = 0
            while not stop.is_set():
                response = await client.move(f"resized-{draw.randrange(STREAMS)}")
                count += response.status_code == 202
                await asyncio.sleep(0.3)
            return count

        resizing, moving = asyncio.create_task(resize()), asyncio.create_task(move())
        # Twice: the second time, contexts are in caches of which many blocks have moved.
        got = [await streamed(client, "resized", asked) for _ in range(2)]
        stop.set()
        resizes, moves = await resizing, await moving
        assert got == [want, want]
        renumbered = total(await client.metrics(), "mell_blocks_renumbered_total") - moved
        assert resizes > 5 and moves > 1 and renumbered > 20, (resizes, moves, renumbered)
        assert await preemptions(client) == before
        assert all(replica["cache"]["exact"] for replica in await client.running())


async def test_requests_beyond_a_smaller_pool_move_to_another_replica(elastic: Application) -> None:
    async with elastic.client() as client:
        a, b = await as_at_the_start(client)
        asked = prompts("leaving", tokens=500)
        want = await streamed(client, "staying", asked)
        await client.settle()
        before = await preemptions(client)
        streams = asyncio.create_task(streamed(client, "leaving", asked))
        await are_used(client, 4 * STREAMS)
        found = await memories(client)
        full, other = (a, b) if found[a]["used_blocks"] >= found[b]["used_blocks"] else (b, a)
        await order(client, **{full: LEAST, other: MOST})
        await have(client, **{full: LEAST})
        assert await streams == want
        assert await preemptions(client) == before
        reasons = {record["trigger"] for record in await client.migrations() if record["label"].startswith("leaving")}
        assert reasons & {"overload", "pack"}, reasons
        await have(client, **{other: MOST})


async def test_requests_that_fit_nowhere_are_given_back_and_continue_from_their_tokens(elastic: Application) -> None:
    async with elastic.client() as client:
        a, b = await as_at_the_start(client)
        asked = prompts("given back", tokens=400)
        want = await streamed(client, "kept", asked)
        await client.settle()
        streams = asyncio.create_task(streamed(client, "given-back", asked))
        await are_used(client, 3 * LEAST)
        await order(client, **{a: LEAST, b: LEAST})
        await have(client, **{a: LEAST, b: LEAST})
        assert await streams == want


async def test_memory_of_a_replica_follows_its_size(elastic: Application) -> None:
    async with elastic.client() as client:
        a, b = await as_at_the_start(client)
        await order(client, **{a: MOST, b: LEAST})
        await have(client, **{a: MOST, b: LEAST})
        filling = iter(range(1000))

        async def written() -> bool:
            await streamed(client, "filling", [(prompt(900, f"filling {next(filling)}"), 1) for _ in range(16)])
            (blank,) = (r["cache"]["hbm"]["blank"] for r in await client.running() if r["id"] == a)
            return bool(blank < 0.05 * MOST)

        await eventually(written, within_s=120)
        await client.idle()
        worker = next(r for r in await client.running() if r["id"] == a)["pids"][-1]
        block = 4 * 2 * 64 * 2 * 4 * 32
        full = resident(worker, block)
        await order(client, **{a: 100})
        await have(client, **{a: 100})
        assert full - resident(worker, block) == pytest.approx((MOST - 100) * block, rel=0.1)
        state = await client.state()
        (device,) = state["devices"]
        memory = await memories(client)
        assert device["held_mib"] <= device["ordered_mib"] <= device["budget_mib"] == 8000
        assert memory[a]["kv_mib"] == 100 * block >> 20
        families = await client.metrics()
        assert families.keys() >= OF_ELASTIC_POOLS
        assert total(families, "mell_kv_blocks", replica=a, state="withheld") == MOST - 100
        assert total(families, "mell_resizes_total", replica=a, direction="shrink", outcome="done") >= 1


def resident(pid: int, block: int) -> int:
    """The bytes of a worker's mappings in memory that may have its KV pool, by its page maps."""
    declared = (MOST + 1) * block
    return sum(int(each.rss) for each in psutil.Process(pid).memory_maps(grouped=False) if each.size >= declared)


async def test_orders_that_cannot_be_followed_are_refused(elastic: Application) -> None:
    async with elastic.client() as client:
        a, _ = await as_at_the_start(client)
        for blocks, message in [(LEAST - 1, "does not hold a request of max_model_len"), (MOST + 1, "can have")]:
            response = await client.set_memory(a, blocks)
            assert response.status_code == 422 and message in response.json()["error"]["message"]
        assert (await client.set_memory("nobody", 200)).status_code == 404
        response = await client.http.post(f"/mell/replicas/{a}/memory", json={"blocks": 99.5})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "blocks")
        assert (await memories(client))[a]["blocks"] == ELASTIC_BLOCKS


async def test_a_resize_survives_the_scheduler_and_a_replica_that_dies_in_one_is_replaced(elastic: Application) -> None:
    async with elastic.client() as client:
        a, b = await as_at_the_start(client)
        asked = prompts("killed", tokens=500)
        want = await streamed(client, "unkilled", asked)
        await client.settle()
        streams = asyncio.create_task(streamed(client, "killed", asked))
        await are_used(client, 4 * STREAMS)
        fence = (await client.state())["fence"]
        await order(client, **{a: LEAST, b: 300})
        process("ServeReplica:mell:Scheduler").kill()
        await have(client, **{a: LEAST, b: 300})

        async def back() -> bool:
            return bool((await client.state())["fence"] > fence)

        await eventually(back, within_s=60)
        await order(client, **{a: 200})
        await have(client, **{a: 200})
        # In a shrink or behind it: its requests continue on the other replica.
        await order(client, **{a: LEAST})
        psutil.Process(next(r for r in await client.running() if r["id"] == a)["pids"][-1]).kill()
        assert await streams == want

        async def replaced() -> bool:
            found = await memories(client)
            return len(found) == 2 and a not in found

        await eventually(replaced, within_s=120)
        await as_at_the_start(client)

"""Pairs of real replicas: streams run through both, and end with the tokens of whole replicas."""

import asyncio
import itertools
from typing import Any

import psutil

from tests.counts import LONG_ONLY
from tests.integration.application import Application, Client, eventually, process, total
from tests.integration.conftest import ELASTIC_BLOCKS
from tests.integration.test_7_memory import as_at_the_start, have, memories, order, prompts, streamed

pytestmark = LONG_ONLY

STREAMS = 12
SMALL = 64
"""Blocks of a pool that a third of the streams fills."""


async def pairs(client: Client) -> dict[str, dict[str, Any] | None]:
    """The member `memory.pair` of all replicas."""
    return {replica: memory["pair"] for replica, memory in (await memories(client)).items()}


async def reach(client: Client, state: str, *replicas: str) -> None:
    """Wait until the halves of replicas are in that state, and their pools have their sizes."""

    async def reached() -> bool:
        found = await memories(client)
        return all(
            replica in found
            and found[replica]["pair"] is not None
            and (found[replica]["pair"]["state"], found[replica]["state"]) == (state, "settled")
            for replica in replicas
        )

    await eventually(reached, within_s=90)


async def paired(client: Client, lower: str, upper: str) -> None:
    response = await client.http.post("/mell/pairs", json={"lower": lower, "upper": upper})
    assert response.status_code == 202, response.text
    await reach(client, "paired", lower, upper)


async def apart(client: Client, lower: str, upper: str) -> None:
    response = await client.http.delete(f"/mell/pairs/{upper}")
    assert response.status_code == 202, response.text
    await reach(client, "over", lower, upper)


async def is_busy(client: Client) -> None:
    async def used() -> bool:
        return all(memory["used_blocks"] > STREAMS for memory in (await memories(client)).values())

    await eventually(used)


async def test_streams_across_a_pair_that_forms_and_is_undone_have_the_same_tokens(elastic: Application) -> None:
    async with elastic.client() as client:
        a, b = await as_at_the_start(client)
        asked = prompts("paired", STREAMS, tokens=400)
        want = await streamed(client, "whole", asked)
        await client.settle()

        streams = asyncio.create_task(streamed(client, "forming", asked))
        await is_busy(client)
        await paired(client, a, b)
        assert await streams == want
        found = await memories(client)
        for replica, layers in ((a, [0, 2]), (b, [2, 4])):
            assert found[replica]["blocks"] > ELASTIC_BLOCKS
            pair = found[replica]["pair"]
            assert (pair["layers"], pair["remote_layers"], pair["guest_layers"]) == (layers, 2, 2)
        (device,) = (await client.state())["devices"]
        assert device["held_mib"] <= device["ordered_mib"] <= device["budget_mib"]

        response = await client.http.post("/mell/pairs", json={"lower": b, "upper": a})
        assert response.status_code == 202, "the order may come again"
        streams = asyncio.create_task(streamed(client, "undone", asked))
        await is_busy(client)
        assert sum(pair["hops"] for pair in (await pairs(client)).values() if pair) > 100
        await apart(client, a, b)
        assert await streams == want
        assert all(memory["blocks"] <= ELASTIC_BLOCKS for memory in (await memories(client)).values())
        assert (await client.http.delete(f"/mell/pairs/{a}")).status_code == 409
        for order, status in (({"lower": a, "upper": a}, 422), ({"lower": a, "upper": "nobody"}, 404)):
            assert (await client.http.post("/mell/pairs", json=order)).status_code == status


async def moved_by_kv(client: Client, name: str, streams: "asyncio.Task[list[str]]") -> list[dict[str, Any]]:
    """Have the streams move by KV, one after another, until all have ended; the records of the moves."""
    records: list[dict[str, Any]] = []
    for number in itertools.count():
        if streams.done():
            return records
        response = await client.move(f"{name}-{number % STREAMS}", path="kv")
        if response.status_code == 202:
            records.append(await client.outcome(response.json()["id"]))
        else:
            await asyncio.sleep(0.02)
    raise AssertionError


async def test_streams_move_by_kv_within_a_pair_and_while_it_forms_and_ends(elastic: Application) -> None:
    async with elastic.client() as client:
        a, b = await as_at_the_start(client)
        asked = prompts("moved", STREAMS, tokens=400)
        want = await streamed(client, "unmoved", asked)
        await client.settle()
        for name, change in (("into", paired), ("within", None), ("out-of", apart)):
            streams = asyncio.create_task(streamed(client, name, asked))
            moves = asyncio.create_task(moved_by_kv(client, name, streams))
            await is_busy(client)
            if change is not None:
                await change(client, a, b)
            assert await streams == want, name
            records = await moves
            by_kv = [record for record in records if (record["outcome"], record["path"]) == ("committed", "kv")]
            print(f"{name}: {len(by_kv)} of {len(records)} moves by KV")
            assert len(by_kv) > STREAMS // 2
            # A request that waits, or has been preempted, has no KV, and goes by tokens; another one may end by itself.
            assert {record["cause"] for record in records} <= {None, "request_ended", "blocks_gone"}


async def test_a_pair_survives_the_scheduler_and_its_streams_the_death_of_a_replica(elastic: Application) -> None:
    async with elastic.client() as client:
        a, b = await as_at_the_start(client)
        asked = prompts("survived", STREAMS, tokens=500)
        want = await streamed(client, "alive", asked)
        await client.settle()
        await paired(client, a, b)
        fence = (await client.state())["fence"]
        process("ServeReplica:mell:Scheduler").kill()

        async def back() -> bool:
            return bool((await client.state())["fence"] > fence)

        await eventually(back, within_s=60)
        await reach(client, "paired", a, b)
        streams = asyncio.create_task(streamed(client, "dead", asked))
        await is_busy(client)
        moves = asyncio.create_task(moved_by_kv(client, "dead", streams))

        async def moving() -> bool:
            return any(m["label"].startswith("dead") and m["outcome"] for m in await client.migrations())

        await eventually(moving)
        psutil.Process(next(r for r in await client.running() if r["id"] == b)["pids"][-1]).kill()
        assert await streams == want
        moves.cancel()  # The record of a move may have died with its replica.
        await reach(client, "over", a)

        async def replaced() -> bool:
            found = await memories(client)
            return len(found) == 2 and b not in found

        await eventually(replaced, within_s=240)
        await as_at_the_start(client)


async def test_the_policy_pairs_replicas_in_a_burst_and_undoes_the_pair_behind_it(pairing: Application) -> None:
    async with pairing.client() as client:
        a, b = await as_at_the_start(client)
        asked = prompts("burst", STREAMS, tokens=400)
        want = await streamed(client, "whole", asked)
        assert not (await client.state())["pairing"]["pairs"], "all of it fits"
        await client.settle()

        await order(client, **{a: SMALL, b: SMALL})
        await have(client, **{a: SMALL, b: SMALL})
        streams = asyncio.create_task(streamed(client, "burst", asked))
        await reach(client, "paired", a, b)
        (pair,) = (await client.state())["pairing"]["pairs"]
        assert (pair["phase"], pair["boundary"], pair["by_hand"]) == ("paired", 2, False)
        assert all(memory["blocks"] > SMALL for memory in (await memories(client)).values())
        assert await streams == want

        await reach(client, "over", a, b)
        assert not (await client.state())["pairing"]["pairs"]
        metrics = await client.metrics()
        for phase in ("forming", "undoing"):
            assert total(metrics, "mell_pair_seconds_count", phase=phase) == 2, "each half counts"
        assert total(metrics, "mell_hop_seconds_count") > 0
        for name in ("mell_hop_seconds", "mell_pair_seconds"):
            print(f"{name}: {total(metrics, f'{name}_sum') / total(metrics, f'{name}_count'):.4f} s")
        assert total(metrics, "mell_lost_steps_total") == 0
        assert total(metrics, "mell_pairs") == 0

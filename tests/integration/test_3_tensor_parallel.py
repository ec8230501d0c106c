"""Replicas of two workers each: both hold a shard of every KV block, and a request needs both shards to move."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from tests.counts import LONG, LONG_ONLY
from tests.integration import faults
from tests.integration.application import BLOCK, Answer, Application, Client, eventually, prompt
from tests.integration.faults import Fault
from tests.integration.models.rows import How, row
from tests.integration.test_1_migration import loaded, moved, reference
from tests.integration.test_3_failures import home, lost_and_replaced

MOVES, OUTPUT = (40 if LONG else 4), 300
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 7}]


async def test_replica_lists_both_workers(split: Application) -> None:
    async with split.client() as client:
        for replica in await client.running():
            own, *engine = map(psutil.Process, replica["pids"])
            assert len({process.pid for process in engine}) == 3
            (server,) = {process.ppid() for process in engine}
            assert psutil.Process(server).ppid() == own.pid, (
                "a core and two workers, forks of the replica's fork server"
            )
            assert len({os.getpgid(process.pid) for process in (own, *engine)}) == 1


async def test_moves_both_ways_change_nothing(split: Application) -> None:
    """Greedy and seeded at once, by KV and by tokens, over both transports."""
    assert row("`tensor_parallel_size`").how is How.KV
    draw = random.Random(20261122)
    committed: Counter[tuple[str, str]] = Counter()
    loads = 0

    async def journey(name: str, at: list[int], paths: list[str], sampling: dict[str, Any], want: str) -> int:
        """One request, which is moved forth and back; the blocks that it brings to its first target."""
        answer, records = await moved(client, f"split-{name}", prompts[name], OUTPUT, at, paths, **sampling)
        assert answer.text == want, (sampling, records)
        assert len(set(want.split())) > 20, "the model repeats itself: equality would prove nothing"
        committed.update((r["source"], r["path"]) for r in records if r["outcome"] == "committed")
        return sum(r["blocks"] for r in records[:1])

    async with split.client() as client:
        before = sum(r["kv_blocks_loaded"] for r in await client.running())
        for number in range(MOVES // 4):
            faults.write(split.faults, ("collective", "shared")[number % 2])
            names = [f"{number}/{kind}" for kind in range(len(SAMPLINGS))]
            prompts = {name: prompt(draw.randrange(2 * BLOCK, 12 * BLOCK), f"split/{name}") for name in names}
            await client.settle()  # so that all runs begin on the same replica, and the other one has no blocks
            wanted = await asyncio.gather(
                *(client.complete(prompts[n], OUTPUT, **kind) for n, kind in zip(names, SAMPLINGS, strict=True))
            )
            await client.settle()
            journeys = (
                journey(name, sorted(draw.sample(range(80), 2)), ["kv", draw.choice(["kv", "tokens"])], kind, want)
                for name, kind, (want, _) in zip(names, SAMPLINGS, wanted, strict=True)
            )
            loads += sum(await asyncio.gather(*journeys))
        await client.idle()
        read = sum(r["kv_blocks_loaded"] for r in await client.running()) - before
    assert committed.total() >= 0.75 * MOVES and len({source for source, _ in committed}) == 2, committed
    assert sum(n for (_, path), n in committed.items() if path == "kv") >= MOVES / 3, committed
    assert read >= loads > 0, "moved blocks were not read"


async def test_corrupted_shard_of_one_worker_changes_the_output(split: Application) -> None:
    """Of either worker."""
    prompts = [prompt(400, f"corrupt/{rank}") for rank in (0, 1)]
    async with split.client() as client:
        await client.settle()
        wanted = await asyncio.gather(*(reference(client, tokens, 80) for tokens in prompts))
        for rank, (tokens, want) in enumerate(zip(prompts, wanted, strict=True)):
            await client.settle()
            faults.write(split.faults, "shared", Fault.CORRUPT, rank=rank)
            before = {r["id"]: r["kv_blocks_loaded"] for r in await client.running()}
            answer, (record,) = await moved(client, f"corrupt-{rank}", tokens, 80, [10], ["kv"])
            assert (record["outcome"], record["path"]) == ("committed", "kv")
            await loaded(client, record["target"], before, record["blocks"])
            assert answer.text != want, rank


@LONG_ONLY
@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.FAIL])
async def test_failed_transfer_of_one_shard_fails_the_chunk(split: Application, fault: Fault) -> None:
    tokens = prompt(300, f"one-shard/{fault}")
    async with split.client() as client:
        want = await reference(client, tokens, 700)
        faults.write(split.faults, "collective", fault, rank=1)
        answer, (record,) = await moved(client, f"one-shard-{fault}", tokens, 700, [5], ["kv"])
        assert answer.text == want
        assert (record["outcome"], record["path"]) == ("committed", "tokens") and "kv failed" in record["reason"]
        faults.write(split.faults, "collective")
        tokens = prompt(400, f"after-one-shard/{fault}")
        _, (after,) = await moved(client, f"after-one-shard-{fault}", tokens, 200, [5], ["kv"])
        assert (after["outcome"], after["path"]) == ("committed", "kv")
        await client.idle()


@asynccontextmanager
async def three_streams(client: Client, name: str) -> AsyncIterator[None]:
    """Three streams, which have had ten tokens each when the body begins, and are whole when it has ended."""
    prompts = [prompt(100 + 50 * i, f"{name}/{i}") for i in range(3)]
    want = [text for text, _ in await asyncio.gather(*(client.complete(p, 300) for p in prompts))]
    answers = [Answer() for _ in prompts]
    tasks = [
        asyncio.create_task(client.stream(a, p, 300, f"{name}-{i}"))
        for i, (a, p) in enumerate(zip(answers, prompts, strict=True))
    ]
    for answer in answers:
        await answer.until(10)
    yield
    await asyncio.gather(*tasks)
    assert [a.text for a in answers] == want


@LONG_ONLY
async def test_streams_survive_the_death_of_one_worker(split: Application) -> None:
    async with split.client() as client:
        async with three_streams(client, "one-worker"):
            doomed = await home(client)
            os.kill(doomed["pids"][3], signal.SIGKILL)
        await lost_and_replaced(client, doomed)
        assert {len(r["pids"]) for r in await client.running()} == {4}


@LONG_ONLY
async def test_drained_replica_hands_its_streams_over_and_ends(split: Application) -> None:
    async with split.client() as client:
        async with three_streams(client, "drained"):
            drained = await home(client)
            assert (await client.drain(drained["id"])).status_code == 202

        async def ended() -> bool:
            ids = [r["id"] for r in (await client.state())["replicas"]]
            return drained["id"] not in ids and not any(map(psutil.pid_exists, drained["pids"]))

        await eventually(ended, within_s=60)
        left = [m for m in await client.migrations() if m["source"] == drained["id"] and m["trigger"] == "evacuate"]
        assert "committed" in {m["outcome"] for m in left}, left

        async def replaced() -> bool:
            return len(await client.running()) == 2

        await eventually(replaced, within_s=180)

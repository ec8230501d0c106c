"""Prefill and decoding on replicas of their own, on paced engines: who computes what, and that no stream notices."""

import asyncio
import os
import signal
from collections import Counter

import pytest

from benchmarks.chaos.offers import undisturbed
from tests import counts
from tests.integration.application import Answer, Application, Client, eventually, process, prompt, total

STREAMS, LONG, OUTPUT = (6 if counts.LONG else 4), 2000, 150
"""A prefill takes two seconds."""


async def roles(client: Client, prefill: int = 1) -> dict[str, str]:
    """The replicas' roles, once that many are for prefills."""
    found: dict[str, str] = {}

    async def assigned() -> bool:
        found.update({replica["id"]: replica["role"] for replica in await client.running()})
        return Counter(found.values()) == {"prefill": prefill, "decode": 3 - prefill}

    await eventually(assigned)
    return found


async def priced(client: Client) -> None:
    """Have a first request measure the steps of engines. No context returns before these are known."""
    await client.stream(Answer(), prompt(LONG, "first"), OUTPUT, "first")

    async def known() -> bool:
        return (await client.state())["estimates"]["steps"] is not None

    await eventually(known)


async def test_requests_are_prefilled_on_one_replica_and_decode_on_the_others(disaggregated: Application) -> None:
    async with disaggregated.client() as client:
        role = await roles(client)
        await priced(client)

        async def count(name: str, reason: str, outcome: str) -> float:
            return total(await client.metrics(), name, reason=reason, outcome=outcome)

        moves = "mell_migrations_total", "disaggregate", "committed"
        returns = "mell_cache_copies_total", "return", "done"
        moved_before, returned_before = await count(*moves), await count(*returns)
        (prefills,) = (replica for replica, its in role.items() if its == "prefill")
        answers = [Answer() for _ in range(STREAMS)]
        prompts = [prompt(LONG, f"disaggregated {number}") for number in range(STREAMS)]
        reading = []
        for number, (answer, tokens) in enumerate(zip(answers, prompts, strict=True)):
            reading.append(asyncio.create_task(client.stream(answer, tokens, OUTPUT, f"disaggregated-{number}")))
            await asyncio.sleep(0.3)
        await asyncio.gather(*reading)
        records = [m for m in await client.migrations() if m["label"].startswith("disaggregated-")]
        for answer, tokens in zip(answers, prompts, strict=True):
            assert answer.finish == "length" and answer.text == undisturbed(tuple(tokens), OUTPUT)
        assert [r["path"] for r in records if r["outcome"] == "committed"] == ["kv"] * STREAMS, records
        assert {r["source"] for r in records} == {prefills} and prefills not in {r["target"] for r in records}
        assert sum(r["waited_s"] > 0.2 and r["rounds"] > 2 for r in records) > STREAMS / 2, (
            "followed during the prefill"
        )
        assert {r["trigger"] for r in records} == {"disaggregate"}
        assert await count(*moves) == moved_before + STREAMS

        async def returned() -> bool:
            return await count(*returns) == returned_before + STREAMS

        await eventually(returned)
        await client.idle()
        assert await roles(client) == role


@counts.LONG_ONLY
@pytest.mark.parametrize("victim", ["source", "target"])
async def test_requests_survive_the_death_of_either_replica_of_their_move(
    disaggregated: Application, victim: str
) -> None:
    """A request is prefilled, and two wait: all have their moves already."""
    async with disaggregated.client() as client:
        await roles(client)
        answers = [Answer() for _ in range(3)]
        prompts = [prompt(LONG, f"{victim} {number}") for number in range(3)]
        reading = [
            asyncio.create_task(client.stream(answer, tokens, OUTPUT, f"{victim}-{number}"))
            for number, (answer, tokens) in enumerate(zip(answers, prompts, strict=True))
        ]
        await asyncio.sleep(1.0)
        moves = [m for m in await client.migrations() if m["label"].startswith(f"{victim}-")]
        assert [m["state"] for m in moves] == ["follow"] * 3
        pids = {replica["id"]: replica["pids"] for replica in await client.running()}
        os.kill(pids[moves[-1][victim]][0], signal.SIGKILL)
        await asyncio.gather(*reading)
        for answer, tokens in zip(answers, prompts, strict=True):
            assert answer.finish == "length" and answer.text == undisturbed(tuple(tokens), OUTPUT)
        await roles(client)
        await client.idle()


@counts.LONG_ONLY
async def test_an_operator_sets_a_role_that_a_new_scheduler_knows(disaggregated: Application) -> None:
    async with disaggregated.client() as client:
        before = await roles(client)
        first, second = sorted(replica for replica, its in before.items() if its == "decode")
        for replica in (first, second):
            assert (await client.set_role(replica, "prefill")).json() == {"id": replica, "role": "prefill"}
        (other,) = before.keys() - {first, second}
        assert (await roles(client, 2))[other] == "decode"
        answer, tokens = Answer(), prompt(LONG, "by hand")
        await client.stream(answer, tokens, OUTPUT, "by-hand")
        assert answer.text == undisturbed(tuple(tokens), OUTPUT)
        newest = (await client.migrations())[0]
        assert newest["target"] == other and newest["outcome"] == "committed"
        await client.idle()
        assert (await client.set_role("nobody", "both")).status_code == 404
        assert (await client.set_role(first, "writer")).status_code == 400
        fence = (await client.state())["fence"]
        process("ServeReplica:mell:Scheduler").kill()

        async def replaced() -> bool:
            return bool((await client.state())["fence"] > fence)

        await eventually(replaced)
        by_hand = {r["id"]: r["role_by_hand"] for r in await client.running()}
        assert by_hand == {first: "prefill", second: "prefill", other: None}
        for replica in (first, second):
            await client.set_role(replica, None)
        await roles(client)


@counts.LONG_ONLY
async def test_replicas_are_for_prefills_where_that_pays(disaggregated_as_it_pays: Application) -> None:
    """Prefills of a second beside short answers: they would stop the decoding of all for a second."""
    async with disaggregated_as_it_pays.client() as client:
        assert (await client.state())["disaggregation"]["reason"] == "measuring"
        reading: list[asyncio.Task[None]] = []
        answers: list[tuple[Answer, list[int]]] = []
        async with asyncio.timeout(120):
            while (await client.state())["disaggregation"]["apart_share"] < 0.3:
                answer, tokens = Answer(), prompt(1000, f"as it pays {len(answers)}")
                reading.append(asyncio.create_task(client.stream(answer, tokens, 30, f"as-it-pays-{len(answers)}")))
                answers.append((answer, tokens))
                await asyncio.sleep(0.8)
        shown = (await client.state())["disaggregation"]
        assert shown["reason"] == "times" and shown["prefill_replicas"] > 0
        predicted = {int(number): seconds for number, seconds in shown["predicted_s"].items()}
        assert predicted[shown["prefill_replicas"]] < predicted[0]
        assert "prefill" in {replica["role"] for replica in await client.running()}
        await asyncio.gather(*reading)
        for answer, tokens in answers:
            assert answer.finish == "length" and answer.text == undisturbed(tuple(tokens), 30)
        records = [m for m in await client.migrations() if m["trigger"] == "disaggregate"]
        assert records and {m["path"] for m in records if m["outcome"] == "committed"} == {"kv"}
        await client.idle()

"""Prefix caches on real engines: what replicas know of them, what clients learn of them, and what moves leave out."""

import asyncio
from typing import Any

import pytest

from app.client.api import ApiClient
from benchmarks.soak.cached import KINDS, CachedShape, CachedSoak
from tests.counts import LONG_ONLY
from tests.integration.application import BLOCK, MODEL, Answer, Application, Client, eventually, prompt, total

PROMPT = 6 * BLOCK + 8
"""Tokens of a prompt; the last 8 are never cached."""


def cached(usage: dict[str, Any] | None) -> int:
    """The prompt's tokens that were not computed, by an answer's usage."""
    assert usage is not None
    return int((usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"])


async def reset(client: Client) -> None:
    """Empty all caches, and wait until the replicas know it."""
    await client.idle()
    assert (await client.http.post("/mell/reset_prefix_cache")).status_code == 200

    async def all_blank() -> bool:
        caches = [replica["cache"] for replica in await client.running()]
        return all(cache["exact"] and not cache["hbm"]["historical"] for cache in caches)

    await eventually(all_blank)


async def check_mirrors(client: Client) -> None:
    """Audits, of which there is one per second, have found every mirror equal to its pool so far."""
    metrics = await client.metrics()
    assert total(metrics, "mell_cache_resyncs_total", reason="start") == len(await client.running())
    assert total(metrics, "mell_cache_resyncs_total", reason="audit") == 0
    assert total(metrics, "mell_cache_resyncs_total", reason="events_lost") == 0


async def streamed(
    client: Client, tokens: list[int], label: str, *moves: tuple[int, str], length: int = 150
) -> tuple[Answer, list[Any]]:
    """A streamed answer of `length` tokens, whose request moves at those of them by those paths; its migrations."""
    answer, records = Answer(), []
    reading = asyncio.create_task(client.stream(answer, tokens, length, label))
    for position, path in moves:
        await answer.until(position)
        response = await client.move(label, path=path)
        moved = response.json()
        assert "id" in moved, (label, len(answer.text.split()), response.status_code, moved)
        records.append(await client.outcome(moved["id"]))
    await reading
    return answer, records


async def test_caches_are_known_exactly_and_moves_send_only_what_is_missing(application: Application) -> None:
    tokens = prompt(PROMPT, "caching")
    async with application.client() as client:
        await reset(client)
        before = await client.metrics()
        cold, (there, back) = await streamed(client, tokens, "cold", (20, "kv"), (70, "tokens"), length=500)
        assert (there["outcome"], back["outcome"]) == ("committed", "committed")
        assert there["present"] == 0 and there["blocks"] >= 6
        assert cached(cold.usage) == 0, "its first replica has computed all of it"

        # Either replica has the prompt now.
        warm, (again,) = await streamed(client, tokens, "warm", (20, "kv"), length=500)
        assert warm.text == cold.text and cached(warm.usage) == 6 * BLOCK
        assert again["path"] == "kv" and again["present"] >= 6 and again["blocks"] <= 2
        assert again["bytes"] < there["bytes"] / 2
        _, body = await client.complete(tokens, 5)
        assert cached(body["usage"]) == 6 * BLOCK
        _, salted = await client.complete(tokens, 5, cache_salt="another")
        assert cached(salted["usage"]) == 0, "no hit crosses salts"

        await client.idle()
        caches = [replica["cache"] for replica in await client.running()]
        assert all(c["off"] is None and c["exact"] and c["version"] > 0 for c in caches)
        assert all(c["hbm"]["active"] == 0 and c["hbm"]["historical"] >= 6 for c in caches)
        assert {sum(c["hbm"].values()) * BLOCK for c in caches} == {application.capacity}
        grown = await client.metrics()
        for stage, count in (("prompt", 4 * PROMPT), ("delivered", 12 * BLOCK)):
            assert total(grown, "mell_cache_tokens_total", stage=stage) == count + total(
                before, "mell_cache_tokens_total", stage=stage
            )
        historical = total(grown, "mell_cache_blocks", tier="hbm", state="historical")
        assert historical == sum(c["hbm"]["historical"] for c in caches)

        await reset(client)
        _, body = await client.complete(tokens, 5)
        assert cached(body["usage"]) == 0
        await check_mirrors(client)


@LONG_ONLY
async def test_mirrors_are_exact_while_blocks_are_evicted_or_deleted_and_requests_move(
    application: Application,
) -> None:
    async with application.client() as client:

        async def one(number: int) -> None:
            await streamed(client, prompt(1000, number), f"evicting-{number}", (5, "kv"))

        async def delete(number: int) -> None:
            """Delete the blocks of a prompt whose request moves."""
            await asyncio.sleep(0.1 * number)
            answer = await client.http.request("DELETE", "/mell/cache", json={"prompt": prompt(1000, number)})
            assert answer.json()["success"], answer.text

        for first in (0, 6, 12):  # 36 blocks each, on both replicas
            deleted = range(4) if not first else ()
            await asyncio.gather(*(one(first + number) for number in range(6)), *map(delete, deleted))
        caches = [replica["cache"] for replica in await client.running()]
        assert all(c["hbm"]["blank"] < 100 for c in caches), "nothing was evicted"
        await asyncio.sleep(2.0)  # Two audits.
        await check_mirrors(client)


@LONG_ONLY
async def test_the_blocks_of_a_second_turn_are_found_where_the_first_was(application: Application) -> None:
    first = prompt(PROMPT, "first turn")
    second = [*first, *prompt(2 * BLOCK, "second turn")]
    async with application.client() as client:
        await reset(client)
        await client.complete(first, 5)
        await client.settle()
        stages = {stage: await counted(client, stage) for stage in ("available", "predicted", "delivered")}
        _, body = await client.complete(second, 5)
        assert cached(body["usage"]) == 6 * BLOCK
        _, body = await client.complete(second, 5, cache_salt="another")
        assert cached(body["usage"]) == 0
        # The scheduler knows the blocks by the names that the ingress gives, and only with the prompt's own salt.
        await client.idle()
        for stage, count in stages.items():
            assert await counted(client, stage) - count == 6 * BLOCK, stage
        routing = (await client.state())["routing"]
        assert (routing["kind"], routing["off"], routing["mirrors"]) == ("tree", None, len(await client.running()))
        assert routing["names"]["block_size"] == BLOCK and routing["distinct_blocks"] >= 6


@LONG_ONLY
async def test_deleted_blocks_are_computed_again_and_running_requests_keep_theirs(application: Application) -> None:
    tokens = prompt(PROMPT, "deleted")
    async with application.client() as client:

        async def delete(**order: Any) -> list[int]:
            """The numbers of deleted blocks."""
            answer = await client.http.request("DELETE", "/mell/cache", json=order)
            assert answer.status_code == 200 and answer.json()["success"], answer.text
            return list(answer.json()["blocks"].values())

        await reset(client)
        calm, _ = await streamed(client, tokens, "calm")
        running = Answer()
        reading = asyncio.create_task(client.stream(running, tokens, 150, "running"))
        await running.until(20)
        assert sorted(await delete(prompt=tokens)) == [0, 6]
        await reading
        assert running.text == calm.text and cached(running.usage) == 6 * BLOCK
        _, body = await client.complete(tokens, 5)
        assert cached(body["usage"]) == 0
        assert await delete(prompt=tokens, cache_salt="another") == [0, 0]
        assert sum(await delete()) >= 6
        _, body = await client.complete(tokens, 5)
        assert cached(body["usage"]) == 0
        refused = await client.http.request("DELETE", "/mell/cache", json={"prompt": tokens, "replica": "nobody"})
        assert refused.status_code == 404
        await check_mirrors(client)


async def counted(client: Client, stage: str) -> float:
    """The prompt tokens of a stage so far."""
    return total(await client.metrics(), "mell_cache_tokens_total", stage=stage)


async def test_a_copied_prefix_is_not_computed_and_gives_the_same_tokens(application: Application) -> None:
    tokens = prompt(PROMPT, "copying")
    seeded = {"temperature": 1.0, "seed": 7}
    async with application.client() as client:
        await reset(client)
        await client.settle()
        greedy, _ = await client.complete(tokens, 40)
        drawn, body = await client.complete(tokens, 40, **seeded)
        assert cached(body["usage"]) == 6 * BLOCK
        await client.settle()
        donor, target = await holders(client, tokens)

        before = await client.metrics()
        answer = await client.http.post("/mell/cache/copy", json={"prompt": tokens, "from": donor, "to": target})
        record = answer.json()
        assert answer.status_code == 200, record
        assert (record["outcome"], record["held"], record["present"], record["blocks"]) == ("done", 6, 0, 6)
        await client.settle()
        assert await held_tokens(client, tokens) == {donor: 6 * BLOCK, target: 6 * BLOCK}

        # The donor's blocks go, so that both answers are the target's.
        dropped = await client.http.request("DELETE", "/mell/cache", json={"prompt": tokens, "replica": donor})
        assert dropped.json()["blocks"] == {donor: 6}
        await client.settle()
        assert await held_tokens(client, tokens) == {donor: 0, target: 6 * BLOCK}
        for expected, extra in ((greedy, {}), (drawn, seeded)):
            text, body = await client.complete(tokens, 40, **extra)
            assert text == expected and cached(body["usage"]) == 6 * BLOCK
        grown = await client.metrics()
        for name, count in (("mell_cache_copies_total", 1), ("mell_cache_copy_bytes_total", record["bytes"])):
            assert total(grown, name) - total(before, name) == count

        wrong = await client.http.post("/mell/cache/copy", json={"prompt": tokens, "from": donor, "to": target})
        assert wrong.status_code == 409 and "has no block of this prefix" in wrong.json()["error"]["message"]
        await client.idle()
        await check_mirrors(client)


async def held_tokens(client: Client, tokens: list[int]) -> dict[str, int]:
    """The tokens of a prompt that each replica has."""
    return {replica["id"]: replica["tokens"]["hbm"] for replica in (await matched(client, tokens))["replicas"]}


async def holders(client: Client, tokens: list[int], count: int = 6 * BLOCK) -> tuple[str, str]:
    """The replica that has that many tokens of a prompt, and one that has none."""
    held = await held_tokens(client, tokens)
    donor, target = max(held, key=lambda each: held[each]), min(held, key=lambda each: held[each])
    assert (held[donor], held[target]) == (count, 0)
    return donor, target


@LONG_ONLY
async def test_a_prefix_is_fetched_where_its_replica_is_full(application: Application) -> None:
    """A stream on the donor holds the prefix, and others that begin with it fill the donor: the rest of the prompt has
    no room there, but elsewhere.

    The last ones are small, since a donor holds a prefix only while it has a free block, and all streams grow.
    """
    blocks = 90
    shared = prompt(blocks * BLOCK + 8, "fetched")
    follower = [*shared, *prompt(1000, "follower")]
    async with application.client() as client:
        await reset(client)
        await learn_that_copies_pay(client, shared)
        await reset(client)
        await client.settle()
        streams = [asyncio.create_task(client.stream(Answer(), shared, 700, "holder"))]
        await eventually(lambda: holds(client, shared, blocks * BLOCK))
        donor, other = await holders(client, shared, blocks * BLOCK)
        for size in (*[1000] * 9, *[150] * 50):
            found = await matched(client, follower)
            if found["replica"] == other:
                break
            filler = Answer()
            own = prompt(size, f"filler-{len(streams)}")
            fill = client.stream(filler, [*shared, *own], 700, "filler")
            streams.append(asyncio.create_task(fill))
            await filler.until(1)

        before = await client.metrics()
        fetched, body = await client.complete(follower, 8)
        after = await client.metrics()
        (chosen,) = [each for each in found["replicas"] if each["id"] == other]
        assert found["replica"] == other and chosen["copy"]["from"] == donor
        done, aborted = (
            total(after, "mell_cache_copies_total", **labels) - total(before, "mell_cache_copies_total", **labels)
            for labels in ({"reason": "fetch", "outcome": outcome} for outcome in ("done", "aborted"))
        )
        assert done + aborted == 1
        assert cached(body["usage"]) == done * blocks * BLOCK
        if aborted:  # on a busy machine, a copy may take longer than the computation that it would save
            (*_, last) = [line for line in log_of(application) if "(fetch)" in line]
            assert "the copy was not complete in time" in last
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await reset(client)
        computed, body = await client.complete(follower, 8)
        assert computed == fetched and cached(body["usage"]) == 0


async def learn_that_copies_pay(client: Client, tokens: list[int]) -> None:
    """Copy a prompt back and forth until the scheduler would copy it both ways.

    Slow transfers of earlier tests, and of a busy machine, have taught it that computing is faster.
    """
    await client.complete(tokens, 1)
    for _ in range(20):
        planned = 0
        for _ in range(2):
            await client.settle()
            donor, target = await holders(client, tokens, len(tokens) // BLOCK * BLOCK)
            (entry,) = [each for each in (await matched(client, tokens))["replicas"] if each["id"] == target]
            planned += entry["copy"] is not None
            copied = await client.http.post("/mell/cache/copy", json={"prompt": tokens, "from": donor, "to": target})
            assert copied.status_code == 200, copied.text
            await client.http.request("DELETE", "/mell/cache", json={"prompt": tokens, "replica": donor})
        if planned == 2:
            return
    pytest.fail("however many copies succeed, none is planned")


def log_of(application: Application) -> list[str]:
    """The lines that the application has written."""
    return (application.folder / "serve.log").read_text().splitlines()


async def matched(client: Client, tokens: list[int]) -> dict[str, Any]:
    """The placement that a prompt would get."""
    found: dict[str, Any] = (await client.http.post("/mell/cache/match", json={"prompt": tokens})).json()
    return found


async def holds(client: Client, tokens: list[int], count: int) -> bool:
    """True if a replica has that many tokens of a prompt."""
    return max((await held_tokens(client, tokens)).values()) >= count


@LONG_ONLY
async def test_answers_of_many_requests_that_share_prefixes_are_those_of_computed_ones(
    application: Application,
) -> None:
    """The short form of a soak, whose requests move, have second turns, and find copied and deleted prefixes."""
    shape = CachedShape(requests=24, at_once=6, families=5, turning=0.4)
    async with application.client() as client, ApiClient(application.url, timeout_s=60.0) as api:
        await reset(client)
        done = await CachedSoak(api, MODEL, shape, "short").round(1)
        assert not done.bad
        assert set(done.requests) == set(KINDS) and done.requests.total() > shape.requests
        assert done.tokens["cached"] > done.tokens["prompt"] / 4 and done.moves.total() > 0
        await client.idle()
        await check_mirrors(client)

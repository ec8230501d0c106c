"""Replicas that stop leave their caches to those that stay: the next turn of a conversation finds its beginning.

`test_6_nodes` has paced engines for this.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from tests.counts import LONG_ONLY
from tests.integration.application import BLOCK, Application, Client, eventually, prompt, total
from tests.integration.test_4_caching import cached, held_tokens

FIRST = 6 * BLOCK + 8
"""Tokens of the first prompt; the last 8 are never cached."""


async def after_closing(
    client: Client, seed: str, stop: Callable[[str], Awaitable[None]] | None = None, **extra: Any
) -> tuple[int, int]:
    """The cached tokens of a conversation's second turn on the replica of its first, and of its third after that ended.

    An operator drains the replica, unless there is another way to `stop` it. `extra` are members of the requests.
    """
    first = prompt(FIRST, seed)
    second, third = ([*first, *prompt(BLOCK, f"{seed}-{turn}")] for turn in (2, 3))
    await client.complete(first, 5, **extra)
    await client.settle()
    _, before = await client.complete(second, 5, **extra)
    await client.settle()
    found = await client.http.post("/mell/cache/match", json={"prompt": first, **extra})
    (donor,) = (r["id"] for r in found.json()["replicas"] if r["tokens"]["hbm"])
    if "cache_salt" in extra:
        assert not any((await held_tokens(client, first)).values()), "found without the salt"
    if stop is not None:
        await stop(donor)
    else:
        assert (await client.drain(donor)).status_code == 202

    async def gone() -> bool:
        return donor not in [replica["id"] for replica in (await client.state())["replicas"]]

    await eventually(gone)
    await client.settle()
    _, after = await client.complete(third, 5, **extra)
    return cached(before["usage"]), cached(after["usage"])


async def copies(client: Client, outcome: str) -> float:
    """The copies of replicas that stopped."""
    return total(await client.metrics(), "mell_cache_copies_total", reason="evacuate", outcome=outcome)


@LONG_ONLY
async def test_caches_end_with_their_replica_if_copies_are_off(without_copies: Application) -> None:
    async with without_copies.client() as client:
        assert await after_closing(client, "lost") == (6 * BLOCK, 0)
        assert await copies(client, "done") == 0


@LONG_ONLY
async def test_salted_cache_of_a_real_engine_survives_the_end_of_its_replica(application: Application) -> None:
    async with application.client() as client:
        await client.settle()
        done = await copies(client, "done")
        assert await after_closing(client, "real", cache_salt="mine") == (6 * BLOCK, 6 * BLOCK)
        assert await copies(client, "done") > done
        third = [*prompt(FIRST, "real"), *prompt(BLOCK, "real-3")]
        _, body = await client.complete(third, 5)
        assert cached(body["usage"]) == 0, "no hit crosses salts"

        async def replaced() -> bool:
            return len(await client.running()) == 2

        await eventually(replaced, within_s=150)

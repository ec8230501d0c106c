"""A source that stands still for longer than everybody waits for it, and wakes up: it has lost the request by then."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.counts import LONG_ONLY
from tests.integration import faults
from tests.integration.application import Answer, Application, Client, eventually, prompt
from tests.integration.faults import Fault

pytestmark = LONG_ONLY

TOKENS = 1500
STANDSTILL_S = 6.5
"""Above every time limit and lease of the application's migrations, its ingress's lease, and its ingress's patience."""


@contextmanager
def awake(pid: int) -> Iterator[None]:
    """However this ends, the process runs again."""
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def stopped(pid: int) -> None:
    async def stands_still() -> bool:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    await eventually(stands_still)


async def hosts(client: Client, label: str) -> list[tuple[str, int, str]]:
    """The replicas on which a request runs, each with its hop there and its phase."""
    found = [(r["id"], q) for r in (await client.state())["replicas"] for q in r["requests"] if q["label"] == label]
    return [(replica, request["hop"], request["phase"]) for replica, request in found]


async def source_of(client: Client, label: str) -> dict[str, Any]:
    """The replica on which a request runs, once it has been reported."""
    found: list[dict[str, Any]] = []

    async def reported() -> bool:
        found[:] = [r for r in await client.running() if any(q["label"] == label for q in r["requests"])]
        return bool(found)

    await eventually(reported)
    return found[0]


@pytest.mark.parametrize("path", ["kv", "tokens"])
async def test_source_that_stands_still_in_the_hand_over_does_not_take_the_request_back(
    application: Application, path: str
) -> None:
    """The target runs the request; its reader gives the source up, attaches there, and reads on."""
    label, tokens = f"standstill-{path}", prompt(200, f"standstill/{path}")
    async with application.client() as client:
        want, _ = await client.complete(tokens, TOKENS)
        answer = Answer()
        reading = asyncio.create_task(client.stream(answer, tokens, TOKENS, label))
        await answer.until(20)
        source = await source_of(client, label)
        pid = source["pids"][0]
        faults.write(application.faults, "collective", stop=pid)
        order = await client.move(label, path=path)
        assert order.status_code == 202, order.text
        with awake(pid):
            await stopped(pid)
            faults.write(application.faults, "collective")
            at_stop = answer.tokens
            await asyncio.sleep(STANDSTILL_S)
            assert answer.tokens > at_stop, "the request did not go on while its source stood still"
        record = await client.outcome(order.json()["id"])
        # Its engine goes on meanwhile: on a fast machine it may have computed the request to the end.
        assert record["outcome"] == "committed" or record["cause"] == "request_ended", record
        seen = await hosts(client, label)
        assert len([phase for _, _, phase in seen if phase != "moving"]) <= 1, seen
        await reading
        assert answer.text == want
        await client.idle()


async def test_replica_that_stands_still_amid_a_copy_gives_its_request_up(application: Application) -> None:
    """The target has no request to go on with: the reader submits it anew, and ends what the sleeper goes on with."""
    label, tokens = "standstill-copy", prompt(200, "standstill/copy")
    async with application.client() as client:
        want, _ = await client.complete(tokens, TOKENS)
        answer = Answer()
        reading = asyncio.create_task(client.stream(answer, tokens, TOKENS, label))
        await answer.until(20)
        source = await source_of(client, label)
        pid = source["pids"][0]
        faults.write(application.faults, "collective", Fault.SILENT)
        assert (await client.move(label, path="kv")).status_code == 202
        with awake(pid):
            await asyncio.sleep(0.5)
            os.kill(pid, signal.SIGSTOP)
            faults.write(application.faults, "collective")
            at_stop = answer.tokens
            await asyncio.sleep(STANDSTILL_S)
            assert answer.tokens > at_stop, "the request did not go on while its source stood still"

        async def one_owner() -> bool:
            seen = await hosts(client, label)
            return answer.done or [replica for replica, _, _ in seen if replica == source["id"]] == []

        await eventually(one_owner)
        await reading
        assert answer.text == want
        await client.idle()

"""A spot node goes away under streams, and no stream may break.

mell node watch --file /run/preempted       (on the node)
python examples/spot.py /run/preempted      (where that file can be written)
"""

import argparse
import asyncio
import os
from collections import Counter
from pathlib import Path

import httpx
from burst import stream


async def running(operator: httpx.AsyncClient) -> Counter[str]:
    """The number of running requests of each node with a replica."""
    replicas = (await operator.get("/mell/state")).raise_for_status().json()["replicas"]
    found = Counter({each["node"]: 0 for each in replicas if each["node"]})
    for each in replicas:
        found[each["node"]] += len(each["requests"])
    return found


async def announce(operator: httpx.AsyncClient, notice: Path, streams: int) -> None:
    """Write the notice once all streams run, and print the nodes' requests whenever these change, until cancelled."""
    before: Counter[str] = Counter()
    while True:
        now = await running(operator)
        if now.total() >= streams and not await asyncio.to_thread(notice.exists):
            await asyncio.to_thread(notice.touch)
            print(f"{notice} is written", flush=True)
        if now != before:
            print("  ".join(f"{node[:8]}: {count}" for node, count in sorted(now.items())), flush=True)
        before = now
        await asyncio.sleep(0.5)


async def main() -> None:
    """Stream, and announce the end of a node meanwhile."""
    parser = argparse.ArgumentParser(description="Streams, one of whose nodes goes away.")
    parser.add_argument("notice", type=Path, help="the file that `mell node watch --file` waits for; it is written")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument(
        "--admin-key", default=os.environ.get("MELL_ADMIN_KEY"), help="the ingress.admin_key, if one is set"
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000, help="the length of each answer (default: %(default)s)")
    given = parser.parse_args()
    headers = {"Authorization": f"Bearer {given.admin_key}"} if given.admin_key else {}
    if given.notice.exists():
        parser.error(f"{given.notice} exists: the node has been announced before")
    async with (
        httpx.AsyncClient(base_url=given.url, timeout=600) as client,
        httpx.AsyncClient(base_url=given.url, timeout=600, headers=headers) as operator,
    ):
        announcing = asyncio.create_task(announce(operator, given.notice, given.streams))
        found = await asyncio.gather(*(stream(client, number, given.tokens) for number in range(given.streams)))
        announcing.cancel()
    if not given.notice.exists():
        raise SystemExit("the streams ended before all of them ran at once: ask for more --tokens")
    print(f"{sum(found)} of {given.streams} streams whole")
    if not all(found):
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())

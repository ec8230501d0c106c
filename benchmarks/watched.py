"""The cost of open live pages: serving with and without them, in interleaved pairs.

    python -m benchmarks.watched [--pages 20] [--pairs 10] [--streams 16 64] [--json FILE]

One replica with a real engine. A page is a stream of `/mell/events`, read as it arrives; a browser's drawing is not
part of the measurement. A pair is one run with and one without pages, in alternating order; figures are the pairs'
ratios watched / unwatched.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tqdm import tqdm

from benchmarks.load import Load, offer
from benchmarks.servers import MODEL, mell
from benchmarks.serving import OUTPUT, PROMPT, print_pairs, write_pairs

PORT = 8100


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with mell(PORT, 1):
        results = {n: asyncio.run(_pairs(n, options.pairs, options.pages)) for n in options.streams}
    print_pairs(f"{options.pages} pages", "none", results)
    if options.json:
        write_pairs(results, options.json)


async def _pairs(streams: int, count: int, pages: int) -> list[tuple[Load, Load]]:
    """Measure (watched, unwatched) pairs; the order within a pair alternates."""
    pairs: list[tuple[Load, Load]] = []
    await offer(PORT, MODEL, streams, PROMPT, OUTPUT, f"warm/{streams}")
    for i in tqdm(range(count), desc=f"{streams} streams", unit="pair"):
        loads: dict[bool, Load] = {}
        for watched in (True, False)[:: 1 if i % 2 else -1]:
            async with _watching(pages if watched else 0):
                loads[watched] = await offer(PORT, MODEL, streams, PROMPT, OUTPUT, f"{streams}/{i}/{watched}")
        pairs.append((loads[True], loads[False]))
    return pairs


@contextlib.asynccontextmanager
async def _watching(pages: int) -> AsyncIterator[None]:
    """Open `pages` pages, and wait for the first picture of each."""
    opened = [asyncio.Event() for _ in range(pages)]
    reading = [asyncio.create_task(_page(event)) for event in opened]
    try:
        async with asyncio.timeout(30):
            await asyncio.gather(*(event.wait() for event in opened))
        yield
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _page(opened: asyncio.Event) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=1 << 20)
    try:
        writer.write(b"GET /mell/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while data := await reader.read(1 << 16):
            if b"data: " in data:
                opened.set()
    finally:
        writer.close()


if __name__ == "__main__":
    main()

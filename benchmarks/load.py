"""A cheap load generator: raw sockets, one read per chunk, timestamps at the arrival of bytes.

Client and server share the machine, so the client's CPU time reduces the server's speed: a chunk costs 30 us here and
110 us in `client`, a difference of a sixth of a core at 2,000 tokens per second.
"""

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TimedStream:
    """One streamed answer: the times of its request and of each SSE chunk (seconds of `time.perf_counter`)."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: bytes = b""
    epoch: float = field(default_factory=lambda: time.time() - time.perf_counter())
    """The offset of these times to Unix time."""

    @property
    def ttft(self) -> float:
        """Seconds to the first chunk."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that a cache had, by the usage in the answer (`include_usage`)."""
        events = [json.loads(line[6:]) for line in self.text.splitlines() if line.startswith(b"data: {")]
        (usage,) = [event["usage"] for event in events if event.get("usage")]
        return int((usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"])

    def spans(self) -> list[tuple[float, float]]:
        """The gaps between chunks, each as its beginning and end in Unix time."""
        times = [self.epoch + at for at in self.arrivals]
        return list(itertools.pairwise(times))


@dataclass(frozen=True, slots=True)
class Load:
    """The figures of one run: rates in tokens per second, times in seconds."""

    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    chunks_per_token: float


def percentile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1) by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and range, for a table."""
    low, high = (f"{edge(values):.{digits}f}" for edge in (min, max))
    return f"{statistics.median(values):.{digits}f} [{low}, {high}]"


def random_prompt(tokens: int, seed: object) -> list[int]:
    """Token ids drawn from `seed`, so that no prefix cache holds them."""
    draw = random.Random(str(seed))
    return [draw.randrange(3, 500) for _ in range(tokens)]


async def stream(
    port: int,
    model: str,
    prompt: list[int],
    max_tokens: int,
    label: str = "",
    into: TimedStream | None = None,
    headers: Mapping[str, str] = {},
    more: Mapping[str, Any] = {},
) -> TimedStream:
    """Send one greedy streaming completion and read it to its end, into `into` if given.

    `headers` and `more` members of the body are further ones.

    Raises:
        RuntimeError: the answer is an error, or incomplete.
    """
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            **more,
        }
    ).encode()
    others = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nX-Request-Id: {label or 'load'}\r\n{others}Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    result, seen = into if into is not None else TimedStream(), bytearray()
    try:
        writer.write(head + body)
        result.sent = time.perf_counter()
        while data := await reader.read(1 << 16):
            now = time.perf_counter()
            result.arrivals.extend([now] * data.count(b'"text":'))
            seen += data
    finally:
        writer.close()
    result.text = bytes(seen)
    if b" 200 " not in seen[:32] or b"data: [DONE]" not in seen:
        raise RuntimeError(f"port {port}: {seen[:500]!r}")
    return result


async def offer(port: int, model: str, streams: int, prompt: int, output: int, seed: object) -> Load:
    """Open `streams` streams at once, read all to their ends; the figures over all of them."""
    prompts = [random_prompt(prompt, f"{seed}/{i}") for i in range(streams)]
    started = time.perf_counter()
    done = await asyncio.gather(*(stream(port, model, p, output) for p in prompts))
    took = time.perf_counter() - started
    gaps = [gap for s in done for gap in s.gaps]
    chunks = sum(len(s.arrivals) for s in done)
    return Load(
        tokens_per_s=streams * output / took,
        ttft_p50=statistics.median(s.ttft for s in done),
        ttft_p99=percentile([s.ttft for s in done], 0.99),
        itl_p50=statistics.median(gaps),
        itl_p99=percentile(gaps, 0.99),
        chunks_per_token=chunks / (streams * output),
    )

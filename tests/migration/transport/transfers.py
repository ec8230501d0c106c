"""Transfers between two Ray actors, each with one end of a transport, and the bytes that they send."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable
from typing import Any

from migration.protocol.sizing import MIB


async def timed(work: Awaitable[object]) -> tuple[str, float]:
    """The result of the work, "ok" or the name of its error's type, and its seconds."""
    started = time.monotonic()
    try:
        await work
    except Exception as error:
        return type(error).__name__, time.monotonic() - started
    return "ok", time.monotonic() - started


def content(size: int, seed: int) -> bytes:
    """Pseudo-random bytes, without a repeated part."""
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(size)


def digest(size: int, seed: int) -> str:
    """The digest of `content`."""
    return hashlib.sha256(content(size, seed)).hexdigest()


async def transfer(source: Any, target: Any, name: str, size: int = MIB, seed: int = 1) -> tuple[str, str, bool]:
    """One chunk from source to target `name`: the results of both ends, and True if the bytes are equal."""
    channel = await source.channel.remote(name)
    sent, received = await asyncio.gather(source.send.remote(channel, size, seed), target.receive.remote(channel, size))
    return sent[0], received[0], received[2] == digest(size, seed)

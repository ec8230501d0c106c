"""Starts `server_process`, and misbehaving clients, which read late, in pieces, or never."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[4]
WITHIN_S = 120.0
"""A generous limit: the tests are not about speed."""


@dataclass(frozen=True)
class Server:
    """A server in another process."""

    pid: int
    port: int
    wordy: int
    """The port whose chunks are 4 KiB longer."""

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def rss(self) -> int:
        """Its resident memory in bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096

    @property
    def files(self) -> int:
        """The number of its open files and sockets."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    async def control(self, order: str) -> None:
        """Send `hold` or `go`."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=60) as client:
            (await client.post(f"/{order}")).raise_for_status()

    async def inside(self) -> dict[str, Any]:
        """Its open conversations, requests and tasks."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=60) as client:
            counts: dict[str, Any] = (await client.get("/inside")).json()
            return counts

    async def until(self, holds: Callable[[dict[str, Any]], bool], within_s: float = WITHIN_S) -> None:
        """Wait until `holds` is true of `inside`."""
        async with asyncio.timeout(within_s):
            while not holds(await self.inside()):
                await asyncio.sleep(0.05)

    async def at_rest(self) -> None:
        """Wait until no trace of any request is left."""
        await self.until(lambda counts: counts["idle"] and not counts["conversations"] and not counts["requests"])


@contextmanager
def serving() -> Iterator[Server]:
    """A server."""
    command = [sys.executable, "-m", "tests.app.ingress.http.server_process"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            yield Server(process.pid, *json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


class Client:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, limit: int = 1 << 16) -> "Client":
        """A connection that reads ahead at most twice `limit` bytes."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=limit))

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def get(self, path: str) -> int:
        """The status of a GET on this connection, which stays open."""
        await self.send(f"GET {path} HTTP/1.1\r\nHost: mell\r\n\r\n".encode())
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await self.reader.readexactly(int(length.split(b":")[1]))
        return int(head.split(b" ", 2)[1])

    async def post(self, fields: dict[str, Any], path: str = "/v1/completions") -> None:
        """Send the last request of this connection."""
        await self.send(post(fields, path))

    async def events(self) -> list[Any]:
        """The whole answer to a streaming request: JSON, and "[DONE]"."""
        head, _, body = (await self.reader.read()).partition(b"\r\n\r\n")
        self.close()
        assert head.startswith(b"HTTP/1.1 200 "), head
        blocks = _unchunked(body).decode().split("\n\n")
        assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
        return [text if (text := block[6:]) == "[DONE]" else json.loads(text) for block in blocks]

    async def text(self) -> str:
        """The text of a complete streamed answer."""
        *chunks, done = await self.events()
        assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    async def ended(self, within_s: float = WITHIN_S) -> bytes:
        """All bytes from the server until it closed the connection."""
        received = b""
        async with asyncio.timeout(within_s):
            try:
                while data := await self.reader.read(1 << 16):
                    received += data
            except ConnectionError:
                pass
        self.close()
        return received

    def close(self) -> None:
        """Disconnect at once."""
        self.writer.transport.abort()


def _unchunked(body: bytes) -> bytes:
    pieces, at = [], 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(pieces)


def post(fields: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """A request with `Connection: close`."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: mell\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

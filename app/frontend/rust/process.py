"""One life of the Rust frontend's process: its sockets, its arguments, its log lines, its end.

The process inherits its listening sockets, whose names are gone once it runs, so a killed ingress leaves no file
behind. It belongs to the ingress's process group, which ends with the ingress (`deployments.processes.guard`).
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from app.frontend.rust.exchange import ExchangeBroken, Headers, HttpExchange

log = logging.getLogger("ray.serve")

VARIABLE = "MELL_VLLM_RS"
"""Environment variable with the path of the binary, where vLLM's package has none."""

_START_S = 60.0
_END_S = 3.0
_LAST_LINES = 12
_LINE = re.compile(r"\(RustFrontend pid=[0-9]+\) (?P<level>[A-Z]+) [0-9-]+ [0-9:]+ (?P<text>.*)", re.S)


def find_binary() -> str:
    """The path of `vllm-rs`: MELL_VLLM_RS, or that in vLLM's package. Raises ValueError if there is none."""
    if given := os.environ.get(VARIABLE):
        path = Path(given)
    else:
        spec = importlib.util.find_spec("vllm")
        folders = spec.submodule_search_locations if spec is not None else None
        path = Path(next(iter(folders or ()), "")) / "vllm-rs"
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ValueError(
            f"ingress.frontend is rust, but {path} is no program: only the CUDA build of vLLM has it; write vllm, or "
            f"its path in {VARIABLE}"
        )
    return str(path)


class Listeners:
    """The sockets that the process inherits: HTTP, and both ends of vLLM's wire that a frontend binds.

    They are in `folder`, which only this user can read. The HTTP socket is reached by `address` without its name.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mell-"))
        self._sockets = {name: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for name in ("http", "in", "out")}
        for name, listening in self._sockets.items():
            listening.bind(str(self.folder / name))
            listening.listen(socket.SOMAXCONN)
        self._named = os.open(self.folder / "http", os.O_PATH | os.O_CLOEXEC)
        self.address = f"/proc/self/fd/{self._named}"

    @property
    def numbers(self) -> Mapping[str, int]:
        """File descriptors by name."""
        return {name: listening.fileno() for name, listening in self._sockets.items()}

    def close(self) -> None:
        """Close this process's sockets; those that another one has inherited go on."""
        for listening in self._sockets.values():
            listening.close()

    def forget(self) -> None:
        """Close `address` as well, and remove the names."""
        self.close()
        self.unlink()
        with contextlib.suppress(OSError):
            os.close(self._named)

    def unlink(self) -> None:
        """Remove the names."""
        shutil.rmtree(self.folder, ignore_errors=True)


class FrontendProcess:
    """A running process. `ended` is done at its end, with its exit status."""

    def __init__(self, binary: str, arguments: Mapping[str, Any], listeners: Listeners) -> None:
        """Start it. Raises OSError."""
        numbers = listeners.numbers
        fds = [numbers["http"], numbers["in"], numbers["out"]]
        options = ("--listen-fd", "--input-listener-fd", "--output-listener-fd")
        command = [binary, "frontend", *(str(part) for pair in zip(options, fds, strict=True) for part in pair)]
        # At its level INFO it writes lines for every request.
        environment = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ, "NO_COLOR": "1"}
        self._process = subprocess.Popen(
            [*command, "--args-json", json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            env=environment,
        )
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._address = listeners.address
        assert self._process.stdout is not None
        # A thread, since asyncio's ways to wait for a child depend on the loop, and on the thread that it runs in.
        threading.Thread(target=self._watch, args=(self._process.stdout,), name="vllm-rs", daemon=True).start()

    @classmethod
    async def start(cls, binary: str, arguments: Mapping[str, Any], listeners: Listeners) -> Self:
        """Start it, and wait until it serves.

        Raises:
            ValueError: it refuses its arguments.
            OSError: it cannot be started.
        """
        process = cls(binary, arguments, listeners)
        listeners.close()
        try:
            async with asyncio.timeout(_START_S):
                await process._serving()
        except (ExchangeBroken, TimeoutError) as error:
            status = await process.end()
            raise ValueError(
                f"ingress.frontend is rust, and vllm-rs ended with status {status}: {process.last_lines}"
            ) from error
        except BaseException:
            await process.end()
            raise
        return process

    async def _serving(self) -> None:
        """Wait for an answer. The socket accepts before the process serves, and breaks if the process ends."""
        exchange = await self.call("GET", "/health")
        try:
            await exchange.head()
        finally:
            exchange.close()

    async def call(self, method: str, path: str, headers: Headers = (), body: bytes = b"") -> HttpExchange:
        """Begin an HTTP call to it. Raises ExchangeBroken: it has ended."""
        return await HttpExchange.begin(self._address, method, path, headers, body)

    @property
    def last_lines(self) -> str:
        """The last lines of its log."""
        return " ".join(self._last).strip()

    async def end(self) -> int:
        """End it, with its requests. Returns its exit status."""
        for end in (self._process.terminate, self._process.kill):
            with contextlib.suppress(OSError):
                end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    return await asyncio.shield(self.ended)
        return await asyncio.shield(self.ended)

    # --- in a thread of its own -----------------------------------------------------------------------

    def _watch(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                self._take(line.decode(errors="replace").rstrip())
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._set_ended, status)

    def _set_ended(self, status: int) -> None:
        if not self.ended.done():
            self.ended.set_result(status)

    def _take(self, line: str) -> None:
        if not line:
            return
        found = _LINE.fullmatch(line)
        text = found["text"] if found is not None else line
        self._last.append(text)
        level = logging.getLevelNamesMapping().get(found["level"], logging.WARNING) if found is not None else None
        log.log(logging.WARNING if level is None else level, "vllm-rs: %s", text)

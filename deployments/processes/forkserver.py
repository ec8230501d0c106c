"""Starts an engine's processes as forks of a process that has imported vLLM already.

vLLM starts its engine core and its workers by `spawn`: each is a new interpreter that imports vLLM for several seconds
before it begins its work, one after the other. A replica cannot fork them itself, since it has threads. So it has a
fork server:

    replica           begins to import vLLM when the fork server does
      fork server     has vLLM imported, one thread, and neither a model nor a CUDA context
        engine core   a fork
        worker        a fork as well, requested by the engine core

- `start_fork_server` has this process's `spawn` context fork its processes. All else of `spawn` stays: a process is
  pickled, gets the pipes that it names, and shares no state of its starter. Its environment is the starter's.
- Native libraries read variables of the environment as they are loaded, which a fork cannot repeat. If such a variable
  has another value than in the fork server, or if there is no fork server any more, the process is spawned.
- The forks are members of the replica's process group, as the fork server is: `guard` ends them with the replica. The
  fork server itself ends with the replica. If it ends before, its forks count as ended, as do the engine's processes if
  they are killed: vLLM then gives the engine up, and Serve replaces the replica.
- Forks share the memory of everything that is imported.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import Any

from deployments.processes.importing import importing

FORK_SERVER = "deployments.processes.forkserver"
_NATIVE = ("LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "TCMALLOC_", "GLIBC_")
"""Prefixes of the variables that native libraries read as they are loaded."""

_THREADS = "OMP_NUM_THREADS"
"""The exception: torch can set it later."""

_MAX_BYTES = 1 << 17
_MAX_FDS = 250
_NUMBER = struct.Struct("q")
_REFUSED = 0


class NoForkServer(Exception):
    """The fork server does not fork this process: it has ended or refuses, or the request is too large."""


@dataclass(frozen=True, slots=True)
class _Access:
    """The socket for requests and, in the starter of the fork server, its process, which ends with that object."""

    socket: socket.socket
    server: "subprocess.Popen[bytes] | None" = None


_access: _Access | None = None
_inherited: list[int] = []
"""The descriptors that the starter of this process, a fork, sent with it."""


def start_fork_server(modules: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start this process's fork server, which imports `modules`, and fork what the `spawn` context starts from now on.

    Native variables must have their final values, but for those that the imports change. Returns before the modules are
    imported; requests wait for that. The fork server ends at the end of its standard input, if an import fails, and if
    forks could not use CUDA after the imports.

    Raises:
        OSError: no process can be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", "-m", FORK_SERVER, str(theirs.fileno()), str(ours.fileno()), *modules]
    # The pipe to its standard input is never written to; its end shows the end of this process.
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env=importing(os.environ),
        pass_fds=[theirs.fileno(), ours.fileno()],
    )
    theirs.close()
    _install(_Access(ours, server))
    return server


def _install(access: _Access) -> None:
    global _access
    _access = access
    multiprocessing.get_context("spawn").Process = ForkedProcess  # type: ignore[misc]


def _native(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_NATIVE) and name != _THREADS}


class ForkedProcess(SpawnProcess):
    """A process of the `spawn` context, forked off the fork server if that is possible, and spawned otherwise."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        if _access is not None:
            with contextlib.suppress(NoForkServer):
                return _ForkingPopen(process_obj)
        return popen_spawn_posix.Popen(process_obj)


class _InheritedFd:
    """A descriptor within a pickled process, as its place among those that are sent with the process."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        return _inherited[self.place]


class _ForkingPopen(popen_spawn_posix.Popen):
    """Starts a process by a request to the fork server, as `multiprocessing.popen_forkserver` does."""

    DupFd = _InheritedFd  # type: ignore[assignment]
    _fds: list[int]

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process_obj: Any) -> None:
        data = BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, parent_w = _request(self._fds)
        # The child sees the end of this process by the end of this pipe.
        self.finalizer = util.Finalize(self, _close, (os.dup(parent_w), self.sentinel))
        with open(parent_w, "wb") as pipe, contextlib.suppress(EOFError, BrokenPipeError):
            self.pid = _read_number(self.sentinel)
            if self.pid != _REFUSED:
                pipe.write(data.getbuffer())
                return
        self.finalizer()
        raise NoForkServer

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit status, None while the process runs. 255 if the fork server ended first."""
        if self.returncode is None and wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            try:
                self.returncode = _read_number(self.sentinel)
            except (OSError, EOFError):
                self.returncode = 255
        return self.returncode


def _request(fds: Sequence[int]) -> tuple[int, int]:
    """Ask for a fork. Returns two pipes: one with its pid or _REFUSED, and later its exit status; one for its data.

    Raises NoForkServer.
    """
    assert _access is not None
    body = json.dumps({"environment": dict(os.environ), "folder": os.getcwd()}).encode()
    if len(body) > _MAX_BYTES or len(fds) > _MAX_FDS:
        raise NoForkServer("the request is too large")
    tracker = resource_tracker.getfd()
    assert tracker is not None
    status_r, status_w = os.pipe()
    data_r, data_w = os.pipe()
    try:
        socket.send_fds(_access.socket, [body], [data_r, status_w, tracker, *fds])
    except OSError as error:
        _close(status_r, data_w)
        raise NoForkServer(str(error)) from error
    finally:
        _close(data_r, status_w)
    return status_r, data_w


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _read_number(fd: int) -> int:
    data = os.read(fd, _NUMBER.size)  # written at once, so read at once
    if not data:
        raise EOFError
    number: int = _NUMBER.unpack(data)[0]
    return number


# --- in the fork server's process ---------------------------------------------------------------------


def main() -> None:
    """`python -m deployments.processes.forkserver SERVER_FD CLIENT_FD MODULE...`: serve until the starter ends."""
    # Under its own name: forks are started and unpickle there.
    from deployments.processes import forkserver

    forkserver.serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])


def serve(server_fd: int, client_fd: int, modules: Sequence[str]) -> None:
    """Import the modules, then fork on request. Does not return in the forks."""
    _install(_Access(socket.socket(fileno=client_fd)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        importlib.import_module(module)
    if not _can_fork():
        return
    _find_title()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to the shared pages
    _ForkServer(socket.socket(fileno=server_fd)).run()


def _can_fork() -> bool:
    """False if a fork could not use CUDA, since an import has initialized it here. A fork finds that out."""
    if (torch := sys.modules.get("torch")) is None:
        return True
    if (pid := os.fork()) == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] == 0


def _find_title() -> None:
    """Have setproctitle find where the title is kept. A fork that has changed its environment could not find it."""
    with contextlib.suppress(ImportError):  # engines go without titles, too
        importlib.import_module("setproctitle").getproctitle()


class _ForkServer:
    """The loop of the fork server: requests, ended forks, and the end of its starter."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._native = _native(os.environ)
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until standard input ends."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._requests:
                    self._answer()
                elif key.data is None:
                    return
                else:
                    self._reap(int(key.fd), *key.data)

    def _answer(self) -> None:
        body, (data_r, status_w, *fds), _, _ = socket.recv_fds(self._requests, _MAX_BYTES, _MAX_FDS + 3)
        request = json.loads(body)
        pid = None
        if _native(request["environment"]) == self._native:
            with contextlib.suppress(OSError):  # no memory, or too many processes, for now
                pid = os.fork()
        if pid == 0:
            os.close(status_w)
            self._become(request, data_r, fds)
        with contextlib.suppress(BrokenPipeError):  # the starter has ended
            os.write(status_w, _NUMBER.pack(_REFUSED if pid is None else pid))
        if pid is None:
            os.close(status_w)
        else:
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status_w))
        _close(data_r, *fds)

    def _become(self, request: Mapping[str, Any], data_r: int, fds: list[int]) -> None:
        """Run the process of the request in this fork, and exit."""
        status = 1
        try:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)
                    os.close(key.data[1])
            self._selector.close()
            self._requests.close()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, sys.stdin.fileno())
            os.close(null)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _take_environment(request["environment"], request["folder"])
            tracker, *_inherited[:] = fds
            sys.argv[1:] = ["--multiprocessing-fork"]  # as in the command of a spawned process
            spawn.spawn_main(pipe_handle=data_r, tracker_fd=tracker)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def _reap(self, pidfd: int, pid: int, status_w: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # the starter has ended
            os.write(status_w, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(status_w)


def _take_environment(environment: Mapping[str, str], folder: str) -> None:
    threads = os.environ.get(_THREADS)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    wanted = environment.get(_THREADS)
    if wanted not in (None, threads) and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(wanted))


if __name__ == "__main__":
    main()

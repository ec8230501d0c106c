"""A standby: a worker process of Ray that has imported vLLM, and waits on its node to become the next replica.

- **Hook.** Every worker process for an engine begins with `prepare` (`HOOK` in its runtime environment), before Ray
  gives it an actor: it imports vLLM and starts the fork server. It has no model, and no CUDA context.
- **One per node.** A standby listens at an abstract socket of its node, whose name the kernel frees with the process.
  `keep_standby` runs in every replica: it connects now and then, and if nothing listens, it has Ray start a worker.
- **End.** A standby that becomes a replica stops listening. One that no replica has connected to for `ABANDONED_S`
  ends, as does one that is one too many, after `SURPLUS_S`. Ray ends it with its node.

A start without a standby only takes longer: on a node without replicas, or if the standby has died.
"""

import contextlib
import logging
import os
import socket
import threading

import ray

from deployments.processes.guard import start_guard
from deployments.replica.imports import import_vllm
from deployments.serve.prestart import prestart_worker
from migration.concurrency import repeat

log = logging.getLogger("ray.serve")

HOOK = {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "deployments.replica.standby.prepare"}
"""The variable by which Ray's worker processes find their hook (ray/_private/ray_constants.py)."""

LOOK_S = 5.0
"""Time between two looks of a replica for its node's standby, in seconds."""

STARTING_S = 120.0
"""Time limit of a standby's start until it listens, in seconds. Meanwhile none is started."""

ABANDONED_S = 600.0
SURPLUS_S = 60.0

_standby: "Standby | None" = None


def prepare() -> None:
    """Ray's hook: prepare this process to become a replica. Never raises, since Ray would end the process."""
    global _standby
    try:
        start_guard()
        _standby = Standby(_address())
        import_vllm()
        _standby.wait()
    except Exception:
        log.exception("this process is not prepared for an engine; its replica starts without that")


def take() -> bool:
    """Turn this process into a replica's. True if its hook has run, which includes the start of a guard."""
    if _standby is not None:
        _standby.take()
    return _standby is not None


async def keep_standby() -> None:
    """Keep a standby on this node, as long as this replica runs. It starts once this replica does."""
    address, patience_s = _address(), 0.0

    async def look() -> None:
        nonlocal patience_s
        patience_s -= LOOK_S
        if not _listens(address) and patience_s <= 0:
            patience_s = STARTING_S
            await prestart_worker()

    await repeat(look, LOOK_S)


class Standby:
    """A worker process that may become a replica. Ends itself if it does not in time."""

    def __init__(self, address: str) -> None:
        self._taken = threading.Event()
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(address)
            self._listener.listen()
        except OSError:  # the node has a standby already, or this process is about to become a replica
            self._listener.close()
            self._listener = None

    def wait(self) -> None:
        """Begin to wait for the replica, in a thread."""
        threading.Thread(target=self._wait, name="mell-standby", daemon=True).start()

    def take(self) -> None:
        """This process becomes a replica."""
        self._taken.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which a close would not
            self._listener.close()

    def _wait(self) -> None:
        if self._listener is None:
            self._taken.wait(SURPLUS_S)
        else:
            self._listener.settimeout(ABANDONED_S)
            with contextlib.suppress(OSError):  # nobody has connected in time, or the process is taken
                while True:
                    self._listener.accept()[0].close()
        if not self._taken.is_set():
            os._exit(0)


def _listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(address)
        except OSError:
            return False
    return True


def _address() -> str:
    """The abstract name of the socket, for this node of this cluster."""
    context = ray.get_runtime_context()
    return f"\0mell-standby-{context.get_node_id()}"

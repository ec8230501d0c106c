"""A transport for tests: the real ones, with faults that a test switches on by writing a file.

Named in the test application's settings as `tests.integration.faults:make`; both ends of a migration read the same
file, whose path is in MELL_TEST_FAULTS: {"over": "collective" | "shared", "fault": null | a `Fault`, "rank": null | the
only worker with the fault, "bytes_per_s": null | a number, for `Fault.SLOW`, "stop": null | the process that is stopped
in the hand-over, "refuse": true if the target adopts nothing, "instead": null | the key of the run whose blocks the
workers send by themselves, instead of the moved one's}.
"""

import asyncio
import json
import os
import signal
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from deployments.config import MigrationSettings
from deployments.replica.moves import Moves
from deployments.replica.transports import make_transport
from migration.kv.copier.client import Copiers
from migration.kv.staging import HEADER, Segments
from migration.protocol.errors import Refused, TransferFailed
from migration.protocol.messages import Adopt, SlotRef
from migration.protocol.ports import Slot, Transport
from migration.protocol.sizing import MIB, StagingSizes
from policies.causes import Cause
from policies.model import Bytes, ReplicaId

VARIABLE = "MELL_TEST_FAULTS"

SIZES = StagingSizes(workers=2, count=4, slot_bytes=8 * MIB)
"""As many workers as any test has, and slots no smaller."""


class Fault(StrEnum):
    """The receiving end's fault."""

    SILENT = "silent"
    FAIL = "fail"
    CORRUPT = "corrupt"
    SLOW = "slow"
    """All chunks come through one link of limited bandwidth (bytes per second), one after the other."""


def write(
    path: Path,
    over: str,
    fault: Fault | None = None,
    bytes_per_s: float | None = None,
    stop: int | None = None,
    rank: int | None = None,
    refuse: bool = False,
    instead: str | None = None,
) -> None:
    """Switch, for all processes at once. Raises ValueError if SLOW is without a speed, or a speed without SLOW."""
    if (fault is Fault.SLOW) != (bytes_per_s is not None):
        raise ValueError("bytes_per_s goes with Fault.SLOW")
    fresh = path.with_suffix(".new")
    switches = {"over": over, "fault": fault, "rank": rank, "bytes_per_s": bytes_per_s, "stop": stop, "refuse": refuse}
    switches["instead"] = instead
    fresh.write_text(json.dumps(switches))
    fresh.replace(path)


def make(config: MigrationSettings) -> Transport:
    """The factory that the settings name. It is called once in every replica."""
    Moves.adopt = _faulty_adopt  # type: ignore[method-assign, assignment]
    Copiers.send = _faulty_send  # type: ignore[method-assign, assignment]
    return FaultyTransport(config)


_ADOPT = Moves.adopt


async def _faulty_adopt(moves: Moves, message: Adopt) -> None:
    """The target refuses the request, or it runs it and the source's process stands still before it learns of that."""
    switches = _switches() if VARIABLE in os.environ else {}
    if switches.get("refuse"):
        raise Refused("a test wants it so", Cause.NO_ROOM)
    await _ADOPT(moves, message)
    if pid := switches.get("stop"):
        os.kill(pid, signal.SIGSTOP)


_SEND = Copiers.send


async def _faulty_send(copiers: Copiers, key: str, *rest: Any) -> Bytes:
    """The workers send the blocks of another request."""
    switches = _switches() if VARIABLE in os.environ else {}
    return await _SEND(copiers, switches.get("instead") or key, *rest)


def _switches() -> dict[str, Any]:
    switches: dict[str, Any] = json.loads(Path(os.environ[VARIABLE]).read_text())
    return switches


class FaultyTransport:
    """Passes everything on to the transport that the file names."""

    name = "faulty"

    def __init__(self, config: MigrationSettings) -> None:
        self._over = {
            name: make_transport(config.model_copy(update={"transport": name}), SIZES)
            for name in ("collective", "shared")
        }
        self._segments = Segments()
        self._link = asyncio.Lock()

    @property
    def _real(self) -> Transport:
        return self._over[_switches()["over"]]

    @property
    def direct(self) -> bool:
        """As the transport in use, but for faults."""
        return self._real.direct and _switches()["fault"] is None

    @property
    def shares_slots(self) -> bool:
        """As the transport in use."""
        return self._real.shares_slots

    def channel(self, source: ReplicaId, target: ReplicaId, rank: int) -> str:
        """Passed on; the rank is prefixed."""
        return f"{rank}|{self._real.channel(source, target, rank)}"

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        """Passed on."""
        await self._real.send(_real_channel(channel), slot, size)

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        """Passed on, unless the fault prevents it."""
        switches = _switches()
        fault = switches["fault"] if switches["rank"] in (None, _rank(channel)) else None
        if fault == Fault.SILENT:
            await asyncio.Event().wait()
        if fault == Fault.FAIL:
            raise TransferFailed("a test wants it so")
        where = await self._real.receive(_real_channel(channel), staged, size, slot)
        if fault == Fault.SLOW:
            async with self._link:
                await asyncio.sleep(size / switches["bytes_per_s"])
        if fault == Fault.CORRUPT:
            payload = self._segments.get(where.segment).view(where.offset + HEADER, size - HEADER)
            values = np.frombuffer(payload, dtype=np.float32)
            values += np.random.default_rng(0).normal(size=values.shape).astype(np.float32)
        return where

    def drop(self, channel: str) -> None:
        """Passed on."""
        self._real.drop(_real_channel(channel))

    def close(self) -> None:
        """Close both."""
        for transport in self._over.values():
            transport.close()


def _rank(channel: str) -> int:
    return int(channel.split("|", 1)[0])


def _real_channel(channel: str) -> str:
    return channel.split("|", 1)[1]

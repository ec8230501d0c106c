"""One end of a transport on another node, as a process.

    python -m tests.migration.transport.node_process send|recv ADDRESS FOLDER
    python -m tests.migration.transport.node_process map CHANNEL

The first is an end of gloo pairs at ADDRESS; it meets the other one in FOLDER instead of in Ray's key-value store. It
reads a list per line, a pair's name and a slot's mebibytes. The second maps a slot that was staged under CHANNEL. Both
answer with a JSON object.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Literal

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0
MIB = 1 << 20


class Folder:
    """Stands in for `migration.transport.rendezvous`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, key: str, value: bytes) -> None:
        """See `rendezvous.put`."""
        fresh = self._file(key).with_suffix(".new")
        fresh.write_bytes(value)
        fresh.replace(self._file(key))

    def wait_for(self, key: str, deadline: float, closed: Callable[[], bool] = lambda: False) -> bytes:
        """See `rendezvous.wait_for`."""
        while not self._file(key).exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{key}: timed out, the peer did not appear")
            time.sleep(0.005)
        return self._file(key).read_bytes()

    def delete(self, key: str) -> None:
        """See `rendezvous.delete`."""
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "-")


def content(mib: int) -> bytes:
    """The sent bytes."""
    return Random(mib).randbytes(mib * MIB)


class End:
    """One end of gloo pairs, which sends or receives on an address of its node."""

    def __init__(self, verb: Literal["send", "recv"], address: str, folder: Path) -> None:
        from migration.transport import gloo_group

        for name, stand_in in (("rendezvous", Folder(folder)), ("get_node_ip_address", lambda: address)):
            setattr(gloo_group, name, stand_in)
        gloo_group.GlooPair.timeout_s = LIMIT_S
        self._verb = verb

    def transfer(self, name: str, mib: int) -> dict[str, Any]:
        """Pass a slot through a pair, after a first transfer that only connects it.

        The answer has the seconds that it took, and the digest of what is in the slot then.
        """
        from ray.util.collective.types import RecvOptions, SendOptions

        from migration.kv.staging import HostSegment
        from migration.transport.collective import RECEIVER, SENDER, HostMemory
        from migration.transport.gloo_group import GlooPair
        from policies.model import Bytes

        sends = self._verb == "send"
        to, of = SendOptions(), RecvOptions()
        to.dst_rank, of.src_rank = RECEIVER, SENDER
        pair = GlooPair(2, SENDER if sends else RECEIVER, name)
        with HostSegment.create(mib * MIB) as segment:
            slot = segment.slot(0, mib * MIB)
            slot.memory[:] = content(mib) if sends else bytes(mib * MIB)
            took_s = 0.0
            for size in 64, mib * MIB:
                buffer, began = HostMemory().buffer(slot, Bytes(size)), time.monotonic()
                if sends:
                    pair.send([buffer], to)
                else:
                    pair.recv([buffer], of)
                took_s = time.monotonic() - began
            return {"seconds": took_s, "sha256": hashlib.sha256(slot.memory).hexdigest()}


def map_slot(channel: str) -> dict[str, Any]:
    """The slot that the peer staged."""
    from migration.protocol.messages import SlotRef
    from migration.transport.shared import SharedSlots
    from policies.model import Bytes

    staged = SlotRef("/proc/1/fd/3", 0, 1)
    return {"segment": asyncio.run(SharedSlots().receive(channel, staged, Bytes(64), None)).segment}


def answer(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The result; an error as its type and its text."""
    try:
        return work(*args)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def main(verb: str, *args: str) -> None:
    """See the module."""
    if verb == "map":
        print(json.dumps(answer(map_slot, *args)), flush=True)
        return
    address, folder = args
    end = End("send" if verb == "send" else "recv", address, Path(folder))
    for line in sys.stdin:
        print(json.dumps(answer(end.transfer, *json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
